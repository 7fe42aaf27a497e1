"""Settling for all workers of a source: one transaction for all of them, at a bounded pace.

A worker reports how far it got and goes on. The settler writes what was reported every
``PACE_S`` or ``ROWS_MAX`` rows, and at once if a worker waits for it. A report with dead letters,
queued messages or an error is settled by its worker itself, in a transaction of its own, behind
what it reported before: however long that takes, no other worker waits for it.

Invariants: the reports of a consumer are settled in their order, each from where the one before it
ended. A cursor that an operator moved is left where it is, and its worker is notified. What was
reported and is not settled yet is bounded: a worker waits for the settler before it reports more.
Locks: there is one, and it is not held while Postgres is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

import psycopg
import structlog

from cdc.connection import Connection, connect
from cdc.connection_pool import ConnectionPool
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import WalbrookError
from cdc.generation import FIRST, Generation
from cdc.metrics.catalogue import FEED_BYTES, SETTLE_SECONDS
from cdc.metrics.clock import PhaseClock
from cdc.state.backfill_chunks import PieceDone
from cdc.state.dead_letters import DeadLetter
from cdc.state.feeds import FeedFigures
from cdc.state.positions import MovedError, Settlement, settle
from cdc.trace.record_log import RecordLog
from cdc.trace.records import (
    MESSAGES_MAX,
    UNKNOWN_TIMES,
    DeliveryRecord,
    DeliveryTiming,
    Refusal,
    refusals_of,
    shown,
)
from spark_pipeline.delivery.outcome import Outcome

_logger = structlog.get_logger("walbrook.settler")

PACE_S = 0.05
ROWS_MAX = 20_000
_UNSETTLED_ROWS_MAX = 100_000  # of one consumer
_UNSETTLED_S = 1.0  # how old the oldest report of a consumer may be before it waits
_AWAY_S = 0.5  # between two tries of a state database that does not answer
_WAIT_S = 0.5


@dataclass(frozen=True)
class Report:
    """What a worker did for its consumer, from ``start`` on."""

    start: Cursor
    outcome: Outcome
    rows: int = 0
    committed_at: datetime | None = None
    ledger: str | None = None
    dead: Iterable[DeadLetter] = ()
    deliver_ms: float | None = None
    generation: Generation = FIRST  # that it was delivered to
    piece: PieceDone | None = None  # of a backfill: all of it is delivered
    reached: Cursor | None = None  # how far it was to go; None: as far as it did
    timing: DeliveryTiming = UNKNOWN_TIMES
    ranges: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether it only moves a cursor and counts."""
        outcome = self.outcome
        sound = outcome.queued is None and outcome.is_whole
        return sound and not self.dead and self.piece is None

    def after(self, before: Report) -> Report:
        """Both as one."""
        return replace(
            self,
            start=before.start,
            outcome=self.outcome.after(before.outcome),
            rows=before.rows + self.rows,
            committed_at=self.committed_at or before.committed_at,
            timing=self.timing.after(before.timing),
            ranges=before.ranges + self.ranges,
        )

    def delivery(self) -> DeliveryRecord:
        """As it is recorded."""
        outcome, queued = self.outcome, self.outcome.queued
        refusals, unnamed = refusals_of(queued)
        refusals += tuple(
            Refusal(poison.cursor, 1, "poison", "refused", dead=True)
            for poison in outcome.dead[:MESSAGES_MAX]
        )
        return DeliveryRecord(
            outcome.consumer,
            self.start,
            outcome.cursor,
            max(outcome.cursor, self.reached or outcome.cursor),
            self.timing,
            self.ranges,
            self.rows,
            outcome.delivered,
            outcome.absorbed,
            queued=0 if queued is None else queued.num_rows,
            dead=len(outcome.dead),
            refusals=refusals,
            unnamed=unnamed,
            error=shown(outcome.error) if outcome.failed and outcome.error is not None else None,
        )

    def settlement(self) -> Settlement:
        outcome = self.outcome
        return Settlement(
            since=self.start,
            cursor=outcome.cursor,
            delivered=outcome.delivered,
            absorbed=outcome.absorbed,
            last_commit=self.committed_at if outcome.is_whole else outcome.last_commit,
            error=None if outcome.error is None else str(outcome.error),
            dead=self.dead,
            queued=outcome.queued,
            ledger=self.ledger,
            top_before=outcome.top_before,
            top=outcome.top,
            deliver_ms=self.deliver_ms,
            generation=self.generation,
            piece=self.piece,
        )


@dataclass
class _Unsettled:
    report: Report
    since: float  # monotonic


class Settler:
    """Settles for one source, in one process. All methods may be called from any thread."""

    def __init__(
        self,
        source: str,
        term: int,
        run: int,
        state_dsn: str,
        connections: ConnectionPool,
        figures: Callable[[], FeedFigures],
        records: RecordLog | None = None,
    ) -> None:
        self._source, self._term, self.feed_run = source, term, run
        self._state_dsn = state_dsn
        self._connections = connections
        self._figures = figures
        self.records = records or RecordLog(source, None)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the settler's thread waits for it
        self._done = threading.Condition(self._lock)  # workers wait for it
        self._waiting: dict[str, _Unsettled] = {}
        self._writing: dict[str, _Unsettled] = {}
        self._moved: set[str] = set()
        self._settled: dict[str, Cursor] = {}
        self._read_to: Cursor | None = None
        self._closing = False
        self._flushing = 0  # how many wait for what was reported
        self._hurries = False  # whether something reported is to be settled at once
        self._runs = False
        self._state: Connection | None = None
        self._took_ms: float | None = None
        self._seconds = SETTLE_SECONDS.of(source)
        self._feed_bytes = FEED_BYTES.of(source)
        self._clock = PhaseClock("settler", source)
        self.is_away = False
        """Whether the state database does not answer."""
        self.failure: Exception | None = None
        """Why nothing can be settled any more."""

    def begin(self, consumer: str, cursor: Cursor) -> None:
        """A worker begins at a cursor that was read from its row."""
        with self._lock:
            self._moved.discard(consumer)
            self._settled[consumer] = cursor

    def settled(self, consumer: str) -> Cursor | None:
        """Where a consumer's row stands, as far as this process wrote or read it."""
        with self._lock:
            return self._settled.get(consumer)

    def was_moved(self, consumer: str) -> bool:
        """Whether an operator moved its cursor; it has to begin again."""
        with self._lock:
            return consumer in self._moved

    def report(self, consumer: str, report: Report, *, at_once: bool = False) -> None:
        """Have a report settled soon, or at once; waits while too much is unsettled."""
        with self._lock:
            while not self._has_room(consumer) and self.failure is None and not self._closing:
                self._done.wait(_WAIT_S)
            if consumer in self._moved:
                return
            before = self._waiting.get(consumer)
            if before is None:
                self._waiting[consumer] = _Unsettled(report, time.monotonic())
            else:
                before.report = report.after(before.report)
            self._hurries |= at_once
            # At its pace it looks by itself: it is woken only from rest, or when there is much.
            if len(self._waiting) == 1 or self._must_write():
                self._work.notify_all()

    def settle(self, consumer: str, report: Report) -> bool:
        """Settle a report now, behind all that was reported before; returns whether it was.

        False: an operator moved the cursor. Raises if the state database does not answer.
        """
        self.flush(consumer)
        if self.was_moved(consumer):
            return False
        with self._connections.connection() as state:
            return self._write(state, {consumer: report}, None) == []

    def note_failure(self, consumer: str, error: WalbrookError) -> None:
        """Record an attempt that ended before it delivered anything."""
        self.records.failed(consumer, self.settled(consumer) or ORIGIN, error)

    def flush(self, consumer: str | None = None) -> None:
        """Wait until what was reported, of one consumer or of all, is settled or refused.

        Without a thread that runs the settler, the caller writes.
        """
        if not self._runs:
            self.write()
        with self._lock:
            self._flushing += 1
            self._work.notify_all()
            try:
                while self._has_unsettled(consumer) and self.failure is None and not self._closing:
                    self._done.wait(_WAIT_S)
            finally:
                self._flushing -= 1
            if self.failure is not None:
                raise self.failure

    @property
    def has_unsettled(self) -> bool:
        """Whether something was reported that is not settled."""
        with self._lock:
            return self._has_unsettled(None)

    def note_read(self, read_to: Cursor) -> None:
        """The feed went on: the restart cursor may follow."""
        with self._lock:
            self._read_to = read_to
            self._work.notify_all()

    def run(self) -> None:
        """Write at the pace until closed, then once more; ``failure`` says why it ended before."""
        try:
            self._run()
        except Exception as error:
            self._fail(error)

    def _run(self) -> None:
        self._runs = True
        while True:
            with self._lock:
                while not self._closing and not self._waiting and self._read_to is None:
                    self._work.wait(_WAIT_S)
                closing = self._closing
                if not closing:
                    self._work.wait_for(self._must_write, PACE_S)
            if not self.write() and not closing:
                with self._lock:
                    self._work.wait_for(lambda: self._closing, _AWAY_S)
            if closing or self.failure is not None:
                break
        self._disconnect()

    def write(self) -> bool:
        """Write all that was reported; returns whether the state database answered."""
        with self._lock:
            self._writing, self._waiting = self._waiting, {}
            self._hurries = False
            reports = {name: each.report for name, each in self._writing.items()}
            read_to, self._read_to = self._read_to, None
        if not reports and read_to is None:
            return True
        try:
            figures = self._figures()
            self._feed_bytes.set(figures.bytes)
            with self._clock.during("settle"):
                self._write(self._connected(), reports, figures)
        except psycopg.Error as error:
            if not self.is_away:
                _logger.warning("settler.state_unreachable", source=self._source, error=error)
            self.is_away = True
            self._disconnect()
            self._take_back(read_to)
            return False
        except Exception as error:
            self._fail(error)
            return True
        if self.is_away:
            _logger.info("settler.state_reachable", source=self._source)
        self.is_away = False
        return True

    def close(self) -> None:
        """Let ``run`` end, after one more write."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._done.notify_all()
        if not self._runs:
            self._disconnect()

    def _write(
        self, state: Connection, reports: dict[str, Report], figures: FeedFigures | None
    ) -> list[str]:
        """One transaction; returns the consumers whose cursors operators moved."""
        began = time.monotonic()
        deliveries = [report.delivery() for report in reports.values()]
        settlement = self.records.begin(deliveries)
        consumers = {name: report.settlement() for name, report in reports.items()}
        moved: list[str] = []
        read_to = (figures or self._figures()).read_to
        read_to = max([read_to, *(each.cursor for each in consumers.values())])
        while True:
            try:
                settle(
                    state,
                    source=self._source,
                    term=self._term,
                    run=self.feed_run,
                    read_to=read_to,
                    consumers=consumers,
                    figures=figures and replace(figures, settle_ms=self._took_ms),
                )
                break
            except MovedError as error:
                moved.append(error.consumer)
                del consumers[error.consumer]
        took_s = time.monotonic() - began
        self._took_ms = took_s * 1000
        self._seconds.observe(took_s)
        self.records.settled(settlement, deliveries, moved)
        with self._lock:
            self._settled |= {name: each.cursor for name, each in consumers.items()}
            self._moved |= set(moved)
            if figures is not None:
                self._writing = {}
            self._done.notify_all()
        return moved

    def _fail(self, error: Exception) -> None:
        """Nothing is settled any more: waiting callers get the error."""
        with self._lock:
            self.failure = error
            self._writing = {}
            self._done.notify_all()

    def _take_back(self, read_to: Cursor | None) -> None:
        """Reports that could not be written come before those made since."""
        with self._lock:
            for name, unwritten in self._writing.items():
                since = self._waiting.get(name)
                whole = unwritten.report if since is None else since.report.after(unwritten.report)
                self._waiting[name] = _Unsettled(whole, unwritten.since)
            self._writing = {}
            self._read_to = self._read_to or read_to
            self._done.notify_all()

    def _has_room(self, consumer: str) -> bool:
        waiting = self._waiting.get(consumer)
        if waiting is None:
            return True
        old = time.monotonic() - waiting.since > _UNSETTLED_S
        return not old and waiting.report.rows < _UNSETTLED_ROWS_MAX

    def _has_unsettled(self, consumer: str | None) -> bool:
        if consumer is None:
            return bool(self._waiting or self._writing)
        return consumer in self._waiting or consumer in self._writing

    def _must_write(self) -> bool:
        """Whether the settler may not wait for its pace."""
        return self._closing or self._flushing > 0 or self._hurries or self._is_full()

    def _is_full(self) -> bool:
        return sum(each.report.rows for each in self._waiting.values()) >= ROWS_MAX

    def _disconnect(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            state.close()

    def _connected(self) -> Connection:
        if self._state is None or self._state.closed:
            self._state = connect(self._state_dsn, name=f"{self._source}:settler")
        return self._state
