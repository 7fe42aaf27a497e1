"""The trace of a change as a value: what happened when, per consumer. Pure.

Times are in UTC. A step without a time is a state that is known without its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cdc.cursor import Cursor
from cdc.state.traces import KnownStep
from cdc.trace.change import NotFound, TracedChange
from cdc.trace.conclusion import Conclusion, Filtering
from cdc.trace.recorded import RecordedDeliveries
from cdc.trace.records import DeliveryRecord, RetryClaim

_EPOCH = datetime.fromtimestamp(0, UTC)
_FAILURES_SHOWN = 3  # of many that failed, the first and the last


@dataclass(frozen=True)
class TraceStep:
    """One thing that happened, or that is known."""

    what: str
    at: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True)
class ConsumerTrace:
    """What became of the change for one consumer, and ``why`` where that needs a word."""

    consumer: str
    conclusion: Conclusion
    why: str
    steps: Sequence[TraceStep]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class ChangeTrace:
    """All of it; ``change`` is None where the log does not have it, and ``missing`` says why."""

    source: str
    cursor: Cursor
    change: TracedChange | None
    missing: NotFound | None
    steps: Sequence[TraceStep]
    consumers: Sequence[ConsumerTrace]
    notes: Sequence[str] = field(default_factory=tuple)


def steps_of_source(change: TracedChange | None, known: Sequence[KnownStep]) -> list[TraceStep]:
    """From the commit until the log had it."""
    steps = []
    if change is not None:
        steps.append(
            TraceStep(f"committed by transaction {change.xid}", moment(change.committed_us))
        )
        logged = f"read and logged in batch {change.batch}"
        if change.logged_us:
            steps.append(TraceStep(logged, moment(change.logged_us)))
        else:
            steps.append(TraceStep(f"{logged}; its frame is of a version that noted no time"))
    steps += [TraceStep(each.what) for each in known if each.consumer is None]
    return steps


def steps_of_consumer(
    cursor: Cursor,
    consumer: str,
    known: Sequence[KnownStep],
    recorded: RecordedDeliveries,
    since_us: int | None,
) -> list[TraceStep]:
    """What happened for one consumer, in the order of time; then what holds now.

    Attempts that failed as a whole count from ``since_us`` on; without it they are left out.
    """
    deliveries = [each for each in recorded.deliveries if each.consumer == consumer]
    retries = [each for each in recorded.retries if each.consumer == consumer]
    steps = [step for each in deliveries for step in _of_delivery(each, cursor)]
    steps += [TraceStep(_of_claim(each, cursor), moment(each.ended_us)) for each in retries]
    if since_us is not None:
        failed = _of_failures(consumer, deliveries, recorded, cursor, since_us)
        steps += _shortened(sorted(failed, key=_time))
    return [*sorted(steps, key=_time), *_of_rows(known, _refusals(cursor, [*deliveries, *retries]))]


def why(
    conclusion: Conclusion,
    left_out_by: str | None,
    filtering: Filtering,
    known: Sequence[KnownStep],
) -> str:
    """What a conclusion needs beside its name."""
    if conclusion is Conclusion.LEFT_OUT:
        return left_out_by or ""
    if conclusion is Conclusion.FILTERED and filtering is not Filtering.KEEPS_BACK:
        return "of the stretch that it was in nothing was sent"
    if conclusion in (Conclusion.FILTERED, Conclusion.DELIVERED_OR_LEFT_OUT):
        return filtering.value
    if conclusion is Conclusion.NOT_YET:
        return _why_not_yet(known)
    return ""


def _why_not_yet(known: Sequence[KnownStep]) -> str:
    for each in known:
        if each.step == "cursor":
            if not each.detail.get("active"):
                return "it is not active"
            state, reason = each.detail.get("state"), each.detail.get("state_reason")
            stands = f"it stands at {each.detail.get('cursor')}"
            if reason or state:
                return f"{stands} and is {state}{f': {reason}' if reason else ''}"
            return stands
    return "it has no row in walbrook.consumers"


def _of_failures(
    consumer: str,
    deliveries: Sequence[DeliveryRecord],
    recorded: RecordedDeliveries,
    cursor: Cursor,
    since_us: int,
) -> Iterator[TraceStep]:
    """Attempts that were to deliver the change and did not come to it."""
    for each in deliveries:
        if not each.ordered_by_time and each.tried(cursor) and each.error is not None:
            yield TraceStep(f"an attempt ended before it: {each.error}", *_span(each))
    past = [each.timing.ended_us for each in deliveries if each.covers(cursor)]
    until_us = min(past, default=None)
    for failure in recorded.failures:
        meant = since_us <= failure.at_us and (until_us is None or failure.at_us <= until_us)
        if failure.consumer == consumer and meant:
            what = f"an attempt failed before anything was sent: {failure.error}"
            yield TraceStep(what, moment(failure.at_us))


def _shortened(failed: Sequence[TraceStep]) -> list[TraceStep]:
    """The first and the last ones of many."""
    if len(failed) <= 2 * _FAILURES_SHOWN:
        return [*failed]
    first, last = failed[:_FAILURES_SHOWN], failed[-_FAILURES_SHOWN:]
    more = len(failed) - 2 * _FAILURES_SHOWN
    return [*first, TraceStep(f"{more} more attempts failed until the next", first[-1].at), *last]


def _of_delivery(delivery: DeliveryRecord, cursor: Cursor) -> Iterator[TraceStep]:
    if delivery.ordered_by_time:
        yield from _of_release(delivery, cursor)
        return
    if not delivery.covers(cursor):
        return
    timing = delivery.timing
    if timing.decoded_us:
        began, ended = moment(timing.decoded_from_us), moment(timing.decoded_us)
        yield TraceStep("decoded", began, ended)
    refusal = next((each for each in delivery.refusals if each.cursor == cursor), None)
    yield TraceStep(_counts(delivery), *_span(delivery))
    if refusal is not None:
        became = "a dead letter" if refusal.dead else "put into the retry queue"
        yield TraceStep(
            f"refused, the {ordinal(refusal.deliveries)} time: {refusal.answer}; {became}",
            moment(timing.ended_us),
        )
    if delivery.settled_us:
        yield TraceStep("settled", moment(delivery.settled_us))
    else:
        yield TraceStep("its settlement was not confirmed to the process", moment(timing.ended_us))


def _of_release(delivery: DeliveryRecord, cursor: Cursor) -> Iterator[TraceStep]:
    """In event-time order a change goes out before the cursor comes past it."""
    at = moment(delivery.settled_us or delivery.timing.ended_us)
    if delivery.covers(cursor):
        yield TraceStep(f"settled; {delivery.passed} changes were released with it", at)
    elif delivery.passed:
        yield TraceStep(
            f"{delivery.passed} changes were released; it may have been one of them", at
        )


def _counts(delivery: DeliveryRecord) -> str:
    parts = [f"{delivery.delivered} delivered"]
    for count, what in (
        (delivery.absorbed, "known to the destination already"),
        (delivery.queued, "put into the retry queue"),
        (delivery.dead, "dead"),
    ):
        if count:
            parts.append(f"{count} {what}")
    stretch = f"a stretch of {delivery.rows} change{'' if delivery.rows == 1 else 's'}"
    return f"sent in {stretch} ({delivery.start} to {delivery.end}): {', '.join(parts)}"


def _of_claim(claim: RetryClaim, cursor: Cursor) -> str:
    if cursor in claim.delivered:
        return "tried again from the retry queue: delivered"
    for refusal in claim.refusals:
        if refusal.cursor == cursor:
            became = "; a dead letter" if refusal.dead else ""
            time = ordinal(refusal.deliveries)
            return f"tried again: refused, the {time} time: {refusal.answer}{became}"
    return f"tried again: {claim.error}"


def _refusals(
    cursor: Cursor, records: Sequence[DeliveryRecord | RetryClaim]
) -> set[tuple[int, str]]:
    """The refusals of a change that have a record: the how many-th each was, and its answer."""
    return {
        (refusal.deliveries, refusal.answer)
        for each in records
        for refusal in each.refusals
        if refusal.cursor == cursor
    }


def _of_rows(known: Sequence[KnownStep], recorded: Set[tuple[int, str]]) -> Iterator[TraceStep]:
    """What SQL says of it now; of its attempts those that have no record."""
    for each in known:
        if each.step == "cursor":
            if each.detail.get("settled"):
                yield TraceStep(f"{each.what} ({each.detail.get('cursor')})")
            continue
        yield TraceStep(each.what, each.at)
        attempts = each.detail.get("attempts")
        for attempt in attempts if isinstance(attempts, list) else []:
            number, said = int(attempt["deliveries"]), str(attempt["answer"])
            if (number, said) not in recorded:
                when = datetime.fromisoformat(str(attempt["at"]))
                yield TraceStep(f"refused, the {ordinal(number)} time: {said}", when)


def _span(delivery: DeliveryRecord) -> tuple[datetime, datetime]:
    timing = delivery.timing
    return moment(timing.began_us or timing.ended_us), moment(timing.ended_us)


def _time(step: TraceStep) -> datetime:
    return step.at or _EPOCH


def moment(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)


def ordinal(number: int) -> str:
    ending = (
        "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"
