"""The ledgers of a source's consumers: where each lies, and telling of one that is lost.

Invariants: a consumer is served under the name that its ledger had when its cursor was
read; a ledger that could not be used is reported until a delivery has used it again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import structlog

from cdc.config import SinkConfig, WebhookDestination
from cdc.connection import Connection
from cdc.cursor import ORIGIN, Cursor
from cdc.queue.ledger.base import LedgerUse
from cdc.queue.ledger.open import LedgerAddress
from cdc.state.active_consumers import ActiveConsumers
from cdc.state.health import Condition, report_conditions
from sinks.ledgered import LedgerPlace
from spark_pipeline.delivery.outcome import Outcome

_logger = structlog.get_logger("walbrook.worker")
_TELL_S = 5.0  # how often a count that grows is written


def needs_ledger(consumer: SinkConfig) -> bool:
    """Whether its destination takes a repeat for new, and it may not get any."""
    return isinstance(consumer.destination, WebhookDestination) and consumer.destination.ledger


def ledger_name(place: LedgerPlace | None) -> str | None:
    """The name of a ledger that lies in the state database."""
    return place.ledger if place is not None and place.address.type == "postgres" else None


@dataclass
class _Reported:
    """What was last written to SQL of a consumer's ledger."""

    lost: bool
    unnoted: int = 0
    at: float = 0.0  # monotonic


class Ledgers:
    """What one query knows of them."""

    def __init__(self, source: str, term: int, address: LedgerAddress | None) -> None:
        self._source = source
        self._term = term
        self._address = address
        self._names: dict[str, str] = {}
        self._reported: dict[str, _Reported] = {}
        self._without: set[str] = set()

    def join(self, active: ActiveConsumers, joining: Collection[str]) -> None:
        """Those that join are served under the names that ``active`` has for them.

        Those who are served already keep theirs: it goes with the cursor they were admitted at.
        """
        self._names |= {name: active.ledgers[name] for name in joining if name in active.ledgers}

    def place(self, consumer: SinkConfig, settled: Cursor | None) -> LedgerPlace | None:
        """The ledger of a consumer, if it needs one; ``settled`` is where it stands."""
        name = self._names.get(consumer.name)
        if self._address is None or name is None or not needs_ledger(consumer):
            self._without.add(consumer.name)
            return None
        self._without.discard(consumer.name)
        return LedgerPlace(self._address, name, settled or ORIGIN)

    def epoch(self, consumer: str) -> str:
        """The name of its ledger, used or not: another one since its cursor was moved back."""
        return self._names.get(consumer, "")

    def has_news(self, outcome: Outcome) -> bool:
        """Whether ``report`` may have something to write of an outcome."""
        reported = self._reported.get(outcome.consumer)
        if outcome.ledger is None and outcome.consumer not in self._without:
            return False
        return reported is None or reported.lost or (outcome.ledger or LedgerUse()).lost is not None

    def report(self, state: Connection, outcomes: Mapping[str, Outcome]) -> None:
        """Tell of ledgers that these deliveries could not use, and of those that are back."""
        for consumer, outcome in outcomes.items():
            if outcome.ledger is not None:
                self._report(state, consumer, outcome.ledger)
            elif consumer in self._without:  # it may have had one, which was lost
                self._report(state, consumer, LedgerUse())

    def _report(self, state: Connection, consumer: str, use: LedgerUse) -> None:
        before, now = self._reported.get(consumer), time.monotonic()
        about = {"source": self._source, "consumer": consumer}
        if use.lost is None:
            # An earlier process may have reported something.
            if before is None or before.lost:
                self._tell(state, consumer, [])
                self._reported[consumer] = _Reported(lost=False)
            if before is not None and before.lost:
                _logger.info("ledger.back", **about, unnoted=before.unnoted)
            return
        reported = (
            before if before is not None and before.lost else _Reported(lost=True, at=-_TELL_S)
        )
        reported.unnoted += use.unnoted
        if reported is not before:
            _logger.warning("ledger.lost", **about, error=use.lost)
            self._reported[consumer] = reported
        if now - reported.at >= _TELL_S:
            self._tell(state, consumer, [_lost(use.lost, reported.unnoted)])
            reported.at = now

    def _tell(self, state: Connection, consumer: str, conditions: list[Condition]) -> None:
        report_conditions(
            state, self._source, self._term, conditions, consumer=consumer, scope="ledger_"
        )


def _lost(why: str, unnoted: int) -> Condition:
    return Condition(
        "ledger_lost",
        "warning",
        f"{why}; {unnoted} messages were delivered without being noted, and nothing is held back",
        "bring the Redis server at ledger.url back; until then a crash or a failure repeats "
        "messages that were delivered",
    )
