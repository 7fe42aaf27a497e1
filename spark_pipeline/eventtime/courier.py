"""Sending the messages of a release, through the same desk as the lanes' messages.

What must always hold: messages go out in their order, one piece after another; what is said of the
outcome speaks of each database's own cursors again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc.change import ROUTE, MessageBatch
from cdc.config import Sink as SinkConfig
from cdc.connection import Connection
from cdc.cursor import END, ORIGIN, Cursor
from cdc.errors import TransientError, WalbrookError
from cdc.eventtime.sequencer import Step
from cdc.generation import Generation
from cdc.queue.waiting import NOTHING, Waiting
from sinks import Sink
from sinks.ledgered import LedgerPlace
from spark_pipeline.delivery.deliver import Share, shape_of, sink_of
from spark_pipeline.delivery.isolate import is_suspect, told
from spark_pipeline.delivery.ledgers import Ledgers, ledger_name, needs_ledger
from spark_pipeline.delivery.one_by_one import OneByOne
from spark_pipeline.delivery.outcome import Outcome, Poison, together
from spark_pipeline.delivery.sender import ASIDE_ROWS_MAX, Sender
from spark_pipeline.eventtime.release import OfSource, Release, by_source, position
from spark_pipeline.eventtime.shape import MergedShape
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.settings import StageSettings

_logger = structlog.get_logger("walbrook.event_time")
_ROWS: Final = 10_000


@dataclass(frozen=True)
class Sent:
    """What an attempt came to: everything before the message at ``reached`` is settled."""

    reached: int
    absorbed: int
    parts: list[OfSource]  # by database
    error: WalbrookError | None
    outcome: Outcome


@dataclass
class UnderWay:
    """A release on its way."""

    release: Release
    step: Step | None  # None: gaps are told
    at: int = 0  # everything before this message is at the destination, aside or dead
    sent: list[Sent] = field(default_factory=list)

    @property
    def aside(self) -> list[pa.RecordBatch]:
        """What was put aside of it and is to be tried again; nobody else knows of it yet."""
        asides = (sent.outcome.aside for sent in self.sent)
        return [rows.filter(pc.invert(rows.column("dead"))) for rows in asides if rows is not None]

    @property
    def aside_by_source(self) -> list[pa.RecordBatch | None]:
        """All that was put aside of it, by the place of its database."""
        parts = zip(*(sent.parts for sent in self.sent), strict=True)
        return [together([part.aside for part in of_source]) for of_source in parts]

    @property
    def has_much_aside(self) -> bool:
        """Whether it is more than is kept in memory."""
        return sum(len(rows) for rows in self.aside) >= ASIDE_ROWS_MAX

    def forget_aside(self) -> None:
        """It is in the queues now."""
        self.sent = [
            replace(
                sent,
                parts=[replace(part, aside=None) for part in sent.parts],
                outcome=replace(sent.outcome, aside=None),
            )
            for sent in self.sent
        ]


Bury = Callable[[str, list[Poison]], None]
"""What makes dead letters of a database's changes, before anything behind them is sent."""


class UndeliveredError(TransientError):
    """A release could not be delivered; it is tried again, whatever the reason."""

    def __init__(self, reason: WalbrookError) -> None:
        super().__init__(reason.what, fix=reason.fix, kind=reason.kind, detail=reason.detail)


class Courier:
    """Delivers for one consumer; ``settings`` by database, the first of which is its home."""

    def __init__(
        self,
        consumer: SinkConfig,
        settings: Mapping[str, StageSettings],
        queues: Mapping[str, RetryQueue],
        *,
        generation: Generation,
        run: str,
        over: threading.Event,
    ) -> None:
        self._consumer = consumer
        self._generation = generation
        self._settings = settings
        self._queues = queues
        self._home = next(iter(settings.values()))
        self._run = run
        self._over = over
        self._ledgers = Ledgers(self._home.source, self._home.term, self._home.ledger)

    def deliver(self, state: Connection, under_way: UnderWay, ledger: str, bury: Bury) -> None:
        """A piece of it, on from where it is; UndeliveredError if that failed."""
        sent = self._send(state, under_way, ledger)
        for name, part in zip(self._settings, sent.parts, strict=True):
            bury(name, part.dead)
        under_way.at = sent.reached
        under_way.sent.append(sent)
        self._ledgers.report(state, {self._consumer.name: sent.outcome})
        if sent.error is not None:
            self._failed(sent)
            raise UndeliveredError(sent.error)

    def _send(self, state: Connection, under_way: UnderWay, ledger: str) -> Sent:
        """As far as it goes in one attempt."""
        release, begun = under_way.release, under_way.at
        share, held = self._share(state, release, ledger)
        if held is not None:
            nothing = [OfSource(0, None, []) for _ in self._settings]
            return Sent(begun, 0, nothing, held, Outcome(self._consumer.name, ORIGIN, error=held))
        for rows in under_way.aside:
            share = replace(share, waiting=share.waiting.with_these(rows))
        home, consumer = self._home, self._consumer
        with home.slots.hold(home.source, consumer.name, consumer.priority, self._over):
            outcome = self._deliver(share, release, begun)
        parts = by_source(release, outcome, begun, len(self._settings))
        reached = position(release.numbering, outcome.cursor, len(release))
        error = None if outcome.error is None or not outcome.failed else outcome.error
        return Sent(max(begun, reached), outcome.absorbed, parts, error, outcome)

    def settled(self, sent: Sequence[Sent]) -> None:
        """What these attempts put aside is in the queues."""
        for attempt in sent:
            for source, outcome in self._outcomes(attempt).items():
                self._queues[source].settled(outcome)

    def _failed(self, sent: Sent) -> None:
        """Nothing was settled, and the destination did not take what it was sent."""
        for source, outcome in self._outcomes(sent).items():
            self._queues[source].settled(replace(outcome, aside=None))

    def _outcomes(self, sent: Sent) -> dict[str, Outcome]:
        return {
            source: replace(sent.outcome, delivered=part.delivered, aside=part.aside, dead=())
            for source, part in zip(self._settings, sent.parts, strict=True)
        }

    def _share(
        self, state: Connection, release: Release, ledger: str
    ) -> tuple[Share, WalbrookError | None]:
        home = self._home
        share = Share(
            self._consumer, home.origin, self._run, ORIGIN, END, [],
            ledger=self._place(ledger, release.numbering.place(0)), state_dsn=home.state_dsn,
            generation=self._generation,
        )  # fmt: skip
        waiting: Waiting = NOTHING
        for source, settings in self._settings.items():
            asked = self._queues[source].before(state, replace(share, origin=settings.origin))
            if asked.held is not None:
                return share, asked.held
            share = replace(share, strikes=asked.strikes, strikes_max=asked.strikes_max)
            waiting = _both(waiting, asked.waiting)
        return replace(share, waiting=waiting), None

    def ledger_name(self, ledger: str) -> str | None:
        """The name of its ledger, if it has one in the state database."""
        return ledger_name(self._place(ledger, ORIGIN))

    def _place(self, ledger: str, settled: Cursor) -> LedgerPlace | None:
        if self._home.ledger is None or not needs_ledger(self._consumer):
            return None
        return LedgerPlace(self._home.ledger, ledger, settled)

    def _deliver(self, share: Share, release: Release, begun: int) -> Outcome:
        """If it breaks in a way that nobody foresaw, message by message."""
        try:
            return self._through(share, release, begun, lambda sink: sink)
        except Exception as error:
            if not is_suspect(error):
                raise
            _logger.warning("event_time.broke", consumer=share.consumer.name, error=told(error))
            return self._through(share, release, begun, OneByOne)

    def _through(
        self, share: Share, release: Release, begun: int, around: Callable[[Sink], Sink]
    ) -> Outcome:
        assert release.rows is not None
        desk = Sender(
            share.consumer,
            around(sink_of(share)),
            self._shaped,
            release.numbering.place(begun),
            share.waiting,
            strikes=share.strikes,
            strikes_max=share.strikes_max,
        )
        end = min(begun + _ROWS, len(release))
        if not desk.take(release.rows.slice(begun, end - begun)):
            return desk.outcome
        return desk.finish(release.numbering.place(end))

    def _shaped(self, rows: pa.RecordBatch) -> MessageBatch:
        shapes = [shape_of(self._consumer, each.origin) for each in self._settings.values()]
        shape = MergedShape(shapes) if len(shapes) > 1 else shapes[0]
        shaped = shape.rows(rows)
        if ROUTE in rows.schema.names:
            shaped = shaped.append_column(ROUTE, rows.column(ROUTE))
        return MessageBatch(shaped, shape)


def _both(one: Waiting, other: Waiting) -> Waiting:
    if not other:
        return one
    return Waiting(
        np.union1d(one.groups, other.groups),
        one.tables | other.tables,
        one.barred | other.barred,
        one.count + other.count,
    )
