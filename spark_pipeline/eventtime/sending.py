"""Sending the messages of a release, piece by piece, by the same sender as any other messages.

Invariants: messages go out in their order, one piece after another. The outcome of a piece speaks
of each source's own cursors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import SinkConfig
from cdc.connection import Connection
from cdc.cursor import END, ORIGIN, Cursor
from cdc.errors import WalbrookError
from cdc.eventtime.sequencer import WatermarkStep
from cdc.generation import Generation
from cdc.metrics.catalogue import WATERMARKS_EMITTED
from cdc.state.blocked_groups import NOTHING, BlockedGroups
from cdc.state.positions import report_consumer
from sinks.ledgered import LedgerPlace
from spark_pipeline.delivery.deliver import Share
from spark_pipeline.delivery.ledgers import Ledgers, ledger_name, needs_ledger
from spark_pipeline.delivery.one_by_one import deliver_messages
from spark_pipeline.delivery.outcome import Outcome, Poison, together
from spark_pipeline.delivery.sender import QUEUED_ROWS_MAX
from spark_pipeline.eventtime.release import Release, SourceResult, by_source, position
from spark_pipeline.workers.base import UndeliveredError
from spark_pipeline.workers.inputs import Input
from spark_pipeline.workers.state import CurrentState, Work

_ROWS: Final = 10_000


@dataclass(frozen=True)
class Attempt:
    """What an attempt came to: everything before the message at ``reached`` is settled."""

    reached: int
    absorbed: int
    parts: list[SourceResult]  # by source
    error: WalbrookError | None
    outcome: Outcome


@dataclass
class Sending:
    """A release that is being sent."""

    release: Release
    step: WatermarkStep | None  # None: the sink hears of gaps
    at: int = 0  # everything before this message is at the destination, queued or dead
    sent: list[Attempt] = field(default_factory=list)

    @property
    def emits_watermark(self) -> bool:
        """Whether the watermark is higher at its end."""
        return self.step is not None and self.step.watermark > self.step.before

    @property
    def queued(self) -> list[pa.RecordBatch]:
        """What was queued of it and is to be tried again; it is not in the database yet."""
        all_queued = (sent.outcome.queued for sent in self.sent)
        return [
            rows.filter(pc.invert(rows.column("dead"))) for rows in all_queued if rows is not None
        ]

    @property
    def queued_by_source(self) -> list[pa.RecordBatch | None]:
        """All that was queued of it, by the number of its source."""
        parts = zip(*(sent.parts for sent in self.sent), strict=True)
        return [together([part.queued for part in of_source]) for of_source in parts]

    @property
    def has_much_queued(self) -> bool:
        """Whether it is more than is kept in memory."""
        return sum(len(rows) for rows in self.queued) >= QUEUED_ROWS_MAX

    def forget_queued(self) -> None:
        """It is in the queues now."""
        self.sent = [
            replace(
                sent,
                parts=[replace(part, queued=None) for part in sent.parts],
                outcome=replace(sent.outcome, queued=None),
            )
            for sent in self.sent
        ]


Bury = Callable[[str, list[Poison]], None]
"""What makes dead letters of a source's changes, before anything behind them is sent."""


class ReleaseSender:
    """Sends for one consumer; ``inputs`` by source, the first of which is its home."""

    def __init__(
        self,
        consumer: SinkConfig,
        inputs: Mapping[str, Input],
        current: CurrentState,
        generation: Generation,
    ) -> None:
        self._consumer = consumer
        self._generation = generation
        self._inputs = inputs
        self._current = current
        self._context = next(iter(inputs.values())).context
        self._home = self._context.settings
        event_time = consumer.event_time
        self._emits = event_time is not None and event_time.emit_watermarks
        self._watermarks = WATERMARKS_EMITTED.of(consumer.name)
        self._ledgers = Ledgers(self._home.source, self._home.term, self._home.ledger)

    def send(self, state: Connection, sending: Sending, ledger: str, bury: Bury) -> None:
        """The next piece of a release; UndeliveredError if that failed."""
        sent = self._send(state, sending, ledger)
        for name, part in zip(self._inputs, sent.parts, strict=True):
            bury(name, part.dead)
        sending.at = sent.reached
        sending.sent.append(sent)
        if self._emits and sending.emits_watermark and sent.reached == len(sending.release):
            self._watermarks.add()
        self._ledgers.report(state, {self._consumer.name: sent.outcome})
        if sent.error is not None:
            self._failed(state, sent)
            raise UndeliveredError(sent.error)

    def settled(self, sent: Sequence[Attempt]) -> None:
        """What these attempts queued is in the queues."""
        for attempt in sent:
            for source, outcome in self._outcomes(attempt).items():
                self._inputs[source].retries.settled(outcome)

    def ledger_name(self, ledger: str) -> str | None:
        """The name of its ledger, if it has one in the state database."""
        return ledger_name(self._place(ledger, ORIGIN))

    def _send(self, state: Connection, sending: Sending, ledger: str) -> Attempt:
        """As far as it goes in one attempt."""
        release, begun, name = sending.release, sending.at, self._consumer.name
        share = self._share(state, release, begun, ledger)
        if share.stop_reason is not None:
            nothing = [SourceResult(0, None, []) for _ in self._inputs]
            outcome = Outcome(name, ORIGIN, error=share.stop_reason)
            return Attempt(begun, 0, nothing, share.stop_reason, outcome)
        for rows in sending.queued:
            share = replace(share, waiting=share.waiting.with_these(rows))
        end = min(begun + _ROWS, len(release))
        piece, until = release.piece(begun, end), release.numbering.place(end)
        slots, over = self._home.slots, self._context.over
        with (
            slots.hold(self._home.source, name, self._consumer.priority, over),
            self._current.doing(Work.DELIVERY),  # waiting for a slot does not count
        ):
            began_at = time.monotonic()
            outcome = deliver_messages(share, piece, until)
        self._inputs[self._home.source].measures.delivered(outcome, time.monotonic() - began_at)
        parts = by_source(release, outcome, begun, len(self._inputs))
        reached = position(release.numbering, outcome.cursor, len(release))
        return Attempt(max(begun, reached), outcome.absorbed, parts, outcome.error, outcome)

    def _failed(self, state: Connection, sent: Attempt) -> None:
        """Nothing was settled, and the destination did not take what it was sent."""
        assert sent.error is not None
        for source, outcome in self._outcomes(sent).items():
            self._inputs[source].retries.settled(replace(outcome, queued=None))
            report_consumer(state, source, self._consumer.name, sent.error)

    def _outcomes(self, sent: Attempt) -> dict[str, Outcome]:
        return {
            source: replace(sent.outcome, delivered=part.delivered, queued=part.queued, dead=())
            for source, part in zip(self._inputs, sent.parts, strict=True)
        }

    def _share(self, state: Connection, release: Release, begun: int, ledger: str) -> Share:
        """What a delivery needs to know, with what the queues of all sources hold back."""
        home = self._home
        share = Share(
            self._consumer, home.origin, self._context.run, release.numbering.place(begun), END, [],
            origins=tuple(each.settings.origin for each in self._inputs.values()),
            ledger=self._place(ledger, release.numbering.place(0)), state_dsn=home.state_dsn,
            generation=self._generation,
        )  # fmt: skip
        waiting: BlockedGroups = NOTHING
        for each in self._inputs.values():
            asked = each.retries.before(state, replace(share, origin=each.settings.origin))
            if asked.stop_reason is not None:
                return asked
            share = replace(share, refusals=asked.refusals, refusals_max=asked.refusals_max)
            waiting = _both(waiting, asked.waiting)
        return replace(share, waiting=waiting)

    def _place(self, ledger: str, settled: Cursor) -> LedgerPlace | None:
        if self._home.ledger is None or not needs_ledger(self._consumer):
            return None
        return LedgerPlace(self._home.ledger, ledger, settled)


def _both(one: BlockedGroups, other: BlockedGroups) -> BlockedGroups:
    if not other:
        return one
    return BlockedGroups(
        np.union1d(one.groups, other.groups),
        one.tables | other.tables,
        one.blocked_tables | other.blocked_tables,
        one.count + other.count,
    )
