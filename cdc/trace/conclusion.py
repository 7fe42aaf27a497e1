"""What became of a change for one consumer, by all that is known of it. Pure.

Invariant: a conclusion says no more than what is known. Where records were removed, or an
expression was not evaluated, the conclusion says so in place of a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cdc.cursor import Cursor
from cdc.state.traces import KnownStep
from cdc.trace.records import DeliveryRecord, RetryClaim


class Conclusion(StrEnum):
    DELIVERED = "delivered"
    ACKNOWLEDGED = "fetched and acknowledged"
    LEFT_OUT = "left out"
    FILTERED = "filtered out"
    DELIVERED_OR_LEFT_OUT = "delivered or left out"
    WAITS = "waits to be tried again"
    STORED = "waits to be fetched"
    DEAD = "a dead letter"
    GIVEN_UP = "given up"
    DISCARDED = "refused, and discarded since"
    NOT_YET = "not delivered yet"
    HELD_OR_DELIVERED = "held back for its time, or delivered"
    COMES_AGAIN = "delivered, and comes again"
    BEGAN_LATER = "committed before the consumer began"
    SETTLED = "settled, without a record of how"


class Filtering(StrEnum):
    """What is known of a consumer's filter and this change."""

    NONE = "it has no filter"
    PASSES = "its filter lets it pass"
    KEEPS_BACK = "its filter keeps it back"
    FAILED = "its expressions fail on it"
    NOT_EVALUATED = "filter: not evaluated (needs --evaluate)"
    DROPS_LATE = "in event-time order it may have come late, and late changes are dropped"
    AGGREGATES = "the sink gets results of windows in place of changes"
    UNKNOWN = "the log does not have it, so its table and its values are not known"


_UNSURE = (
    Filtering.NOT_EVALUATED,
    Filtering.FAILED,
    Filtering.DROPS_LATE,
    Filtering.AGGREGATES,
    Filtering.UNKNOWN,
)
_DOUBTFUL = (*_UNSURE, Filtering.KEEPS_BACK)


class Latest(StrEnum):
    """What the records say of a change last."""

    NOTHING = "nothing"
    NONE_TAKEN = "a delivery came past it and sent nothing"
    CAME_PAST = "a delivery came past it"
    REFUSED = "it was refused"
    RETRIED_WELL = "a retry delivered it"


@dataclass(frozen=True)
class Evidence:
    """All that is known of one change and one consumer."""

    cursor: Cursor
    known: Sequence[KnownStep]  # of SQL
    left_out_by: str | None  # the rule of its configuration
    filtering: Filtering
    deliveries: Sequence[DeliveryRecord]  # that cover the change
    retries: Sequence[RetryClaim]
    is_pull: bool

    def has(self, step: str) -> bool:
        return any(each.step == step for each in self.known)

    @property
    def settled(self) -> bool:
        return any(each.step == "cursor" and each.detail.get("settled") for each in self.known)

    @property
    def is_read_ahead(self) -> bool:
        """In event-time order: whether it was read while the cursor is not beyond it."""
        return any(each.step == "cursor" and bool(each.detail.get("read")) for each in self.known)

    @property
    def covering(self) -> list[DeliveryRecord]:
        """The deliveries that came past the change: the settled ones, if any was settled."""
        past = [each for each in self.deliveries if each.covers(self.cursor)]
        return [each for each in past if each.settled_us] or past

    @property
    def latest(self) -> Latest:
        """What the records say of it last. A refusal that was never settled was tried again."""
        found = [(each.timing.ended_us, _of_delivery(each, self.cursor)) for each in self.covering]
        found += [(claim.ended_us, _of_retry(claim, self.cursor)) for claim in self.retries]
        told = [each for each in found if each[1] is not Latest.NOTHING]
        return max(told, key=lambda each: each[0])[1] if told else Latest.NOTHING


def conclude(evidence: Evidence) -> Conclusion:
    """By what counts most: rows that are there, then the cursor, then the records."""
    for step, conclusion in (
        ("waits", Conclusion.WAITS),
        ("stored", Conclusion.STORED),
        ("dead", Conclusion.DEAD),
    ):
        if evidence.has(step):
            return conclusion
    if evidence.left_out_by is not None:
        return Conclusion.LEFT_OUT
    if evidence.has("gap") and not _went_out(evidence):
        return Conclusion.GIVEN_UP
    if not evidence.settled and evidence.is_read_ahead:
        return Conclusion.HELD_OR_DELIVERED
    if not evidence.settled:
        return Conclusion.COMES_AGAIN if _went_out(evidence) else Conclusion.NOT_YET
    if evidence.has("begun") and not evidence.covering:
        return Conclusion.BEGAN_LATER
    if evidence.filtering is Filtering.KEEPS_BACK:
        return Conclusion.FILTERED
    return _of_settled(evidence)


def _of_settled(evidence: Evidence) -> Conclusion:
    latest = evidence.latest
    if latest is Latest.NOTHING:
        return Conclusion.SETTLED
    if latest is Latest.REFUSED:
        # It is neither in the queue nor among the dead letters any more.
        return Conclusion.DISCARDED
    if latest is Latest.NONE_TAKEN:
        passes = evidence.filtering in (Filtering.NONE, Filtering.PASSES)
        return Conclusion.SETTLED if passes else Conclusion.FILTERED
    if latest is Latest.CAME_PAST and evidence.filtering in _UNSURE:
        return Conclusion.DELIVERED_OR_LEFT_OUT
    return Conclusion.ACKNOWLEDGED if evidence.is_pull else Conclusion.DELIVERED


def _went_out(evidence: Evidence) -> bool:
    """Whether its destination has had it, as far as the records say without doubt."""
    if evidence.latest is Latest.RETRIED_WELL:
        return True
    if evidence.latest is not Latest.CAME_PAST or evidence.filtering in _DOUBTFUL:
        return False
    return not any(each.queued for each in evidence.covering)


def _of_delivery(delivery: DeliveryRecord, cursor: Cursor) -> Latest:
    if any(refusal.cursor == cursor for refusal in delivery.refusals):
        return Latest.REFUSED
    # In event-time order it may have gone out before the cursor came past it.
    taken = delivery.passed or delivery.ordered_by_time
    return Latest.CAME_PAST if taken else Latest.NONE_TAKEN


def _of_retry(claim: RetryClaim, cursor: Cursor) -> Latest:
    if cursor in claim.delivered:
        return Latest.RETRIED_WELL
    refused = any(refusal.cursor == cursor for refusal in claim.refusals)
    return Latest.REFUSED if refused else Latest.NOTHING
