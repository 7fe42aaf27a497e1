"""The worker of one consumer: from its cursor on, it takes the next range, delivers and reports.

At the head of the log it takes ranges from the feed. A worker that is behind (it failed, is slow,
was moved back, is new, or was paused) reads the log itself, in the driver when that is little, as a
Spark job when it is much, and is in the feed again when it gets there.

Invariants: a worker delivers in order, and its cursor never passes a change that is not delivered,
filtered, dead or queued. Its cursor may be ahead of the settled one; after a failure, and whenever
an operator acts, it begins again from its row in Postgres. What fails is tried again with backoff,
and holds nobody else.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import structlog

from cdc.backoff import Backoff
from cdc.config import PullDestination
from cdc.config import Sink as SinkConfig
from cdc.connection import Connection
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, GapError, TransientError, WalbrookError
from cdc.log.damage import report_damage
from cdc.log.open import open_log
from cdc.log.view import LogReader
from cdc.state.dead_letters import report_dead_letters
from cdc.state.positions import left_behind, report_consumer
from cdc.state.roll import call_roll
from spark_pipeline.backfill.piece import Piece
from spark_pipeline.backfill.pieces import Pieces
from spark_pipeline.backfill.runner import BackfillRunner
from spark_pipeline.delivery.deliver import Share, cursors_in
from spark_pipeline.delivery.gaps import pass_gaps
from spark_pipeline.delivery.isolate import deliver_carefully, told
from spark_pipeline.delivery.ledgers import Ledgers, ledger_name
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.feed.backlog import end_of, fits, fitting
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.exchange import PlannedRange
from spark_pipeline.feed.feed import BehindError
from spark_pipeline.feed.planner import Planner
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.dead import UnreadDeadLetters
from spark_pipeline.workers.retries import RetryQueue, is_failure
from spark_pipeline.workers.settler import Report
from spark_pipeline.workers.state import CurrentState, Reason

_logger = structlog.get_logger("walbrook.worker")

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_STATE_AWAY_S = 1.0  # at most between two tries of a state database that does not answer
_WAIT_S = 0.5
_STALLED_S = 0.4
_POLL_S = 0.05
_CLAIM_S = 0.02  # at least between two claims, if what is due cannot be claimed
_FLOORS_LOOKS_MAX = 10
ATTEMPTS_IN_DRIVER = 3
"""Processes in a row that settled nothing for a consumer before it is served outside the driver."""


class AgainError(TransientError):
    """The worker must begin again from its row."""


class _UndeliveredError(TransientError):
    """A delivery failed, and that is settled."""

    def __init__(self, reason: WalbrookError) -> None:
        super().__init__(reason.what)
        self.reason = reason


class Worker:
    """Serves one consumer; ``run`` is its thread. ``attempts`` as ``walbrook.consumers`` has it."""

    def __init__(self, consumer: SinkConfig, context: WorkerContext, *, attempts: int = 0) -> None:
        settings = context.settings
        self.name = consumer.name
        self.priority = consumer.priority
        self.current = CurrentState()
        self.retries = RetryQueue(consumer, settings, context.run, context.refusals)
        self.batch = 0
        """The next batch of the log that it needs."""
        self._consumer = consumer
        self._context = context
        self._settings = settings
        self._isolate = attempts > ATTEMPTS_IN_DRIVER
        self._ledgers = Ledgers(settings.source, settings.term, settings.ledger)
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        self._nudged = threading.Event()
        self._deferred_until = 0.0  # monotonic
        self._stalled_since: float | None = None  # monotonic
        self._cursor = ORIGIN
        self._pieces = Pieces(
            settings.source, settings.term, self.name, settings.wanted, context.connections
        )
        self._backfills = BackfillRunner(consumer, context, self._pieces)
        self._log: LogReader | None = None
        self._planner: Planner | None = None

    @property
    def cursor(self) -> Cursor:
        """Everything below is delivered, filtered, dead or queued; not all of it is settled."""
        return self._cursor

    def run(self) -> None:
        """Serve until the stage ends."""
        while not self._context.ended.is_set():
            try:
                if self.begin():
                    self._serve()
                else:
                    self._wait(None)
            except AgainError as error:
                _logger.debug("worker.again", consumer=self.name, why=error.what)
            except Exception as error:
                self._wait(self.failed(error))
            finally:
                self._context.feed.leave(self.name)
        self.close()

    def nudge(self) -> None:
        """Let it look at its row at once."""
        self._nudged.set()
        self._context.feed.wake()

    def defer(self, until: float) -> None:
        """Let it wait until then (monotonic), or until it is resumed."""
        self._deferred_until = until
        self.nudge()

    def resume(self) -> None:
        """A deferred worker goes on."""
        if self._deferred_until:
            self._deferred_until = 0.0
            self.nudge()

    @property
    def is_held(self) -> bool:
        """Whether nothing is delivered to it until something else happens."""
        return self.current.is_held

    @property
    def is_deferred(self) -> bool:
        return self.current.reason is Reason.DEFERRED

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._planner is not None:
            self._planner.close()
        self._log = self._planner = None

    def begin(self) -> bool:
        """Read its row and take its place; returns whether it may be served now."""
        self._nudged.clear()
        self._context.feed.leave(self.name)
        self._context.settler.flush(self.name)
        if self._deferred_until > time.monotonic():
            self.current.waits(Reason.DEFERRED, self._deferred_until)
            return False
        self._deferred_until = 0.0
        self.close()
        self._log = open_log(self._settings.log_directory)
        with self._context.connections.connection() as state:
            roll = call_roll(state, self._settings.source)
            if self.name in roll.served:
                self._ledgers.join(roll, [self.name])
                self._pass_gaps(state, self._log)
                roll = call_roll(state, self._settings.source)
            if self.name not in roll.served:
                self.current.parked(Reason.PAUSED if self.name in roll.paused else Reason.INACTIVE)
                return False
            self._ledgers.join(roll, [self.name])
            self.retries.look(state)
            self._pieces.begin(state, roll.served[self.name], end_of(self._log))
        self._cursor = roll.served[self.name]
        self._context.settler.begin(self.name, self._cursor)
        self.batch = self._log.seek(self._cursor)
        self._planner = Planner(
            self._settings,
            self._log.history(),
            self._context.scratch,
            pool="catch_up",
            spark=self._context.spark,
        )
        return True

    def backfill(self) -> None:
        """It has backfills that are to be looked at."""
        self._backfills.wake()

    def step(self, wait_s: float) -> bool:
        """What is due, a piece of a backfill, the next range; returns whether there was any."""
        some = self._deliver_due()
        some = self._serve_piece() or some
        return self.serve_next(0.0 if some else wait_s) or some

    def serve_next(self, wait_s: float) -> bool:
        """The next range, from the feed or from the log; returns whether there was any."""
        if self._context.settler.was_moved(self.name):
            raise AgainError("its cursor was moved")
        assert self._log is not None
        feed, history = self._context.feed, self._log.history()
        if self._isolate or not feed.join(self.name, history, self.batch):
            return self._catch_up(wait_s)
        self.current.live()
        if wait_s and (due_s := self.retries.due_in_s()) is not None:
            wait_s = min(wait_s, max(due_s, _CLAIM_S))
        try:
            with feed.next(self.name, wait_s) as decoded:
                if decoded is not None:
                    self._serve_range(decoded)
        except BehindError:
            return True
        if decoded is None:
            return self._is_stalled(self._log) and self._catch_up(0.0)
        self.batch, self._stalled_since = decoded.end, None
        return True

    def _is_stalled(self, log: LogReader) -> bool:
        """Whether the log has had a little for a while that the feed does not bring.

        So it is while Spark starts, or starts again: then the worker leaves the feed and serves
        itself. Where there is much it waits for the feed.
        """
        if log.next_batch() <= max(self.batch, self._context.feed.position):
            self._stalled_since = None
            return False
        now = time.monotonic()
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since < _STALLED_S:
            return False
        if not fits(log, self.batch, log.next_batch(), self._settings.little):
            return False
        self._context.feed.leave(self.name)
        return True

    def failed(self, error: Exception) -> float:
        """Note what failed; returns when (monotonic) it is tried again."""
        self._context.feed.leave(self.name)
        pause_s, reason = self._backoff.next_s(), told(error)
        if isinstance(error, psycopg.Error):
            pause_s = min(pause_s, _STATE_AWAY_S)
            until = time.monotonic() + pause_s
            self.current.waits(Reason.STATE_UNREACHABLE, until)
            return until
        if isinstance(error, _UndeliveredError):
            reason = error.reason
        elif not isinstance(error, WalbrookError):
            _logger.exception("worker.broke", consumer=self.name)
        if isinstance(reason, GapError) and self._backoff.failures == 1:
            pause_s = 0.0  # what the log gave up is passed when it begins again
        if isinstance(reason, CorruptionError):
            # The reader looks, and reads again from the slot what is damaged if it can.
            report_damage(self._settings.log_directory)
        until = time.monotonic() + pause_s
        if is_failure(reason):
            _logger.warning(
                "worker.failed", consumer=self.name, error=reason, again_in_s=round(pause_s, 1)
            )
        self.current.waits(Reason.of(reason), until, reason)
        if not isinstance(error, _UndeliveredError):
            self._note_error(reason)
        return until

    def _serve(self) -> None:
        ended = self._context.ended
        while not ended.is_set() and not self._nudged.is_set():
            self.step(_WAIT_S)

    def _wait(self, until: float | None) -> None:
        """Until a nudge, the end of the stage, or ``until`` (monotonic)."""
        if until is None and self._deferred_until:
            until = self._deferred_until
        while not self._context.ended.is_set():
            left_s = _WAIT_S if until is None else min(_WAIT_S, until - time.monotonic())
            if left_s <= 0 or self._nudged.wait(left_s):
                return

    def _note_error(self, error: WalbrookError) -> None:
        try:
            with self._context.connections.connection() as state:
                report_consumer(state, self._settings.source, self.name, error)
        except psycopg.Error as problem:
            _logger.debug("worker.state_unreachable", consumer=self.name, error=problem)

    def _pass_gaps(self, state: Connection, log: LogReader) -> None:
        """Pass what the log gave up, and tell the sink of it.

        Telling it takes time, in which the log may give up more: then once more.
        """
        settings = self._settings
        shares = {self.name: self._share(None)}
        for _ in range(_FLOORS_LOOKS_MAX):
            earliest, evicted = floors = log.floors()
            untold = pass_gaps(
                state, evicted, source=settings.source, term=settings.term, shares=shares
            )
            lost = left_behind(state, settings.source, earliest)
            if (error := untold.get(self.name) or lost.get(self.name)) is not None:
                raise error
            if log.floors() == floors:
                return
        raise TransientError("the log gives up changes faster than its gaps can be told")

    def _deliver_due(self) -> bool:
        """Deliver what is due for a retry; returns whether there was anything."""
        if not self._consumer.destination.defers or self.retries.due_in_s() != 0.0:
            return False
        self.current.delivering(time.monotonic())
        try:
            with self._context.connections.connection() as state:
                outcome = self.retries.deliver_due(state, self._context.over)
                if outcome is not None and outcome.error is not None:
                    report_consumer(state, self._settings.source, self.name, outcome.error)
        finally:
            self.current.delivering(None)
        if outcome is None:
            return False
        if outcome.error is not None:
            raise _UndeliveredError(outcome.error)
        self._succeeded()
        return True

    def _catch_up(self, wait_s: float) -> bool:
        """The next range of the log, read by this worker; returns whether there was any."""
        assert self._log is not None
        assert self._planner is not None
        end = self._log.wait(self.batch, wait_s if self._isolate else 0.0)
        if end <= self.batch:
            # The feed is about to begin again, or could not decode what comes next.
            self._nudged.wait(min(wait_s, _POLL_S))
            return False
        self.current.catching_up()
        settings, over = self._settings, self._context.over
        with self._context.catch_up.hold(settings.source, self.name, self.priority, over):
            decoded = self._read(self._log, self._planner, end)
            with closing(decoded):
                self._serve_range(decoded)
        self.batch = decoded.end
        return True

    def _read(self, log: LogReader, planner: Planner, end: int) -> DecodedRange:
        settings, first = self._settings, self.batch
        as_job = self._context.spark is not None and (
            self._isolate or not fits(log, first, end, settings.little)
        )
        batches, rows = fitting(log, first, end, settings.much if as_job else settings.little)
        if not batches:  # one alone is more than that
            batches, rows = 1, int(log.entries(first, first + 1)["rows"].sum())
        planned = PlannedRange(first, first + batches, rows)
        plan = planner.as_job(planned) if as_job else planner.in_driver(planned)
        return DecodedRange.decode(log.history(), planned.start, planned.end, plan)

    def _serve_range(self, decoded: DecodedRange) -> None:
        """Deliver and report all of a range that the consumer has not had."""
        while self._cursor < decoded.high:
            cut = self._pieces.cut(self._cursor)
            if cut is None or cut >= decoded.high:
                self._serve_to(decoded, decoded.high)
            else:
                self._serve_to(decoded, cut)
                self._serve_piece()

    def _serve_piece(self) -> bool:
        """Deliver and report a piece of a backfill, if one stands at the cursor."""
        if not self._pieces.has_any:
            return False
        assert self._log is not None
        behind = not fits(self._log, self.batch, self._log.next_batch(), self._settings.little)
        piece = self._pieces.next(self._cursor, self._log, behind=behind)
        if piece is None:
            return False
        began, waiting = time.monotonic(), self._log.entries(self.batch, self._log.next_batch())
        while self._cursor < piece.high:
            self._serve_to(piece, piece.high)
        live = bool(waiting["rows"].sum())
        self._pieces.settled(piece, time.monotonic() - began, live=live)
        return True

    def _serve_to(self, decoded: DecodedRange | Piece, end: Cursor) -> None:
        """Deliver and report once, up to ``end`` if nothing stops it before."""
        if not decoded.rows:
            self._report(decoded, None, Outcome(self.name, end), 0.0)
            return
        share = replace(self._share(decoded), end=end)
        if self._consumer.destination.defers:
            with self._context.connections.connection() as state:
                share = self.retries.before(state, share)
        began = time.monotonic()
        share, outcome = self._deliver(decoded, share)
        self._report(decoded, share, outcome, time.monotonic() - began)

    def _deliver(self, decoded: DecodedRange | Piece, share: Share) -> tuple[Share, Outcome]:
        assert self._planner is not None
        settings, plan = self._settings, decoded.plan
        size = plan.decoded_bytes if plan.in_driver else 0
        over = self._context.over
        with settings.slots.hold(settings.source, self.name, self.priority, over, size):
            self.current.delivering(time.monotonic())  # waiting for a slot does not count
            try:
                if isinstance(decoded, Piece):
                    share = decoded.judge(self._context.spark, share, self._context.scratch)
                else:
                    share = self._planner.judge(share)
                outcome = deliver_carefully(
                    plan.deliver, share, lambda piece: cursors_in(piece, plan.changes(piece.slices))
                )
            except BaseException:
                _remove(share)
                raise
            finally:
                self.current.delivering(None)
        return share, replace(outcome, error=outcome.error or share.held)

    def _report(
        self, decoded: DecodedRange | Piece, share: Share | None, outcome: Outcome, took_s: float
    ) -> None:
        whole = outcome.cursor >= decoded.high
        report = Report(
            start=self._cursor,
            outcome=outcome,
            rows=decoded.rows,
            committed_at=None if isinstance(decoded, Piece) or not whole else decoded.committed_at,
            piece=decoded.done if isinstance(decoded, Piece) and whole else None,
            ledger=ledger_name(share.ledger) if share is not None else None,
            dead=() if share is None else self._dead(decoded, share, outcome),
            deliver_ms=took_s * 1000,
        )
        settler = self._context.settler
        try:
            if report.is_plain and not isinstance(self._consumer.destination, PullDestination):
                settler.report(self.name, report)
            elif not settler.settle(self.name, report):
                raise AgainError("its cursor was moved")
        finally:
            _remove(share)
        self._cursor = max(self._cursor, outcome.cursor)
        self._isolate = False
        self._settled(outcome, has_dead=bool(report.dead) or outcome.has_dead)
        if outcome.failed:
            assert outcome.error is not None
            raise _UndeliveredError(outcome.error)
        if outcome.error is None:
            self._succeeded()

    def _settled(self, outcome: Outcome, *, has_dead: bool) -> None:
        self.retries.settled(outcome)
        queued = outcome.aside is not None
        if queued or has_dead or self._ledgers.has_news(outcome):
            with self._context.connections.connection() as state:
                if queued:
                    self.retries.look(state)
                self._ledgers.report(state, {self.name: outcome})
                if has_dead:
                    report_dead_letters(state, self._settings.source, self._settings.term)

    def _succeeded(self) -> None:
        self._backoff.reset()
        self.current.recovered()

    def _dead(
        self, decoded: DecodedRange | Piece, share: Share, outcome: Outcome
    ) -> UnreadDeadLetters | tuple[()]:
        """What it went on without; of most ranges nothing, and nothing is read."""
        errors = any(piece.errors for piece in share.slices)
        if not outcome.dead and not errors and not share.failed:
            return ()
        return UnreadDeadLetters(decoded, share, outcome, self._settings.log_directory)

    def _share(self, decoded: DecodedRange | Piece | None) -> Share:
        """What the consumer lacks of a range; without one, what opening its sink needs."""
        settled = self._context.settler.settled(self.name)
        return Share(
            self._consumer,
            self._settings.origin,
            self._context.run,
            self._cursor,
            decoded.high if decoded is not None else ORIGIN,
            [piece for piece in decoded.slices if piece.rows] if decoded is not None else [],
            self._settings.wanted,
            ledger=self._ledgers.place(self._consumer, settled),
            state_dsn=self._settings.state_dsn,
            standing=settled,
        )


def _remove(share: Share | None) -> None:
    """Remove the verdicts of a share that was delivered."""
    if share is not None and share.verdicts is not None:
        Path(share.verdicts).unlink(missing_ok=True)
