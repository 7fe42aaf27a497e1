"""The worker of one consumer in commit order: it takes the next range, delivers it and reports.

Invariants: a worker delivers in order, and its cursor never passes a change that is not delivered,
filtered, dead or queued. Its cursor may be ahead of the settled one; after a failure, and whenever
an operator acts, it begins again from its row in Postgres.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from cdc.config import PullDestination, SinkConfig
from cdc.connection import Connection
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError
from cdc.generation import FIRST
from cdc.log.view import LogReader
from cdc.state.active_consumers import ActiveConsumers, read_active_consumers
from cdc.state.dead_letters import report_dead_letters
from cdc.state.health import Condition
from cdc.state.positions import left_behind
from sinks.base import UNFIT_TABLE, StoppedTable
from spark_pipeline.backfill.mark import MarkPiece
from spark_pipeline.backfill.piece import Piece
from spark_pipeline.backfill.pieces import Pieces
from spark_pipeline.backfill.runner import BackfillRunner
from spark_pipeline.capacity.backlog import end_of, fits
from spark_pipeline.delivery.deliver import Share, cursors_in
from spark_pipeline.delivery.gaps import pass_gaps
from spark_pipeline.delivery.isolate import deliver_carefully
from spark_pipeline.delivery.ledgers import Ledgers, ledger_name
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.delivery.value_formats import wanted_of_reads
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.slices.exchange import SliceMarker
from spark_pipeline.stage.unread_dead_letters import UnreadDeadLetters
from spark_pipeline.verify.runner import VerifyRunner
from spark_pipeline.workers.base import BaseWorker, RestartError, UndeliveredError
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.followed_tables import FollowedTables
from spark_pipeline.workers.gathering import Gathering
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.settler import Report
from spark_pipeline.workers.state import Reason, Work

_CLAIM_S = 0.02  # at least between two claims, if what is due cannot be claimed
_FLOORS_LOOKS_MAX = 10
TABLES_STOPPED = "worker_tables_stopped"
"""The kind of the health event of tables whose changes wait at the destination."""


class Worker(BaseWorker):
    """Serves one consumer of one source in commit order."""

    def __init__(
        self,
        consumer: SinkConfig,
        context: WorkerContext,
        *,
        attempts: int = 0,
        stopped: Condition | None = None,
    ) -> None:
        """``stopped``: what an earlier process reported of tables whose changes wait."""
        super().__init__(consumer, [context], attempts=attempts)
        settings = context.settings
        self._context = context
        self._settings = settings
        (self._input,) = self.inputs.values()
        self._ledgers = Ledgers(settings.source, settings.term, settings.ledger)
        self._followed = FollowedTables(consumer, settings.source, context.connections)
        self._cursor = ORIGIN
        self._passed = ORIGIN  # the end of the last range
        self._matched = 0  # changes of this range that it takes
        self._generation = FIRST
        self._pieces = Pieces(
            settings.source,
            settings.term,
            self.name,
            wanted_of_reads(consumer),
            context.connections,
            in_steps=not consumer.expressions,  # which judge all rows of a piece together
        )
        self._gathering = Gathering.of(consumer, settings.much.bytes)
        self._backfills = BackfillRunner(consumer, context, self._pieces)
        self._verifications = VerifyRunner(consumer, context)
        self._stopped = stopped  # until its sink says something else

    @property
    def stopped(self) -> Condition | None:
        """What is known of tables whose changes wait at the destination."""
        return self._stopped

    @property
    def conditions(self) -> list[Condition]:
        return [] if self._stopped is None else [self._stopped]

    @property
    def cursor(self) -> Cursor:
        """Everything below is delivered, filtered, dead or queued; not all of it is settled."""
        return self._cursor

    @property
    def batch(self) -> int:
        """The next batch of the log that it needs."""
        return self._input.batch

    @property
    def retries(self) -> RetryQueue:
        return self._input.retries

    def settled(self, source: str) -> Cursor | None:
        return self._context.settler.settled(self.name)

    def must_look(self, active: ActiveConsumers, settled: Cursor | None) -> bool:
        if self.name not in active.served or self.name in active.unreported:
            return True
        return settled is not None and active.served[self.name] < settled

    def begin(self) -> bool:
        if self._must_wait():
            return False
        with self.current.doing(Work.SETTLEMENT):
            self._context.settler.flush(self.name)
        log = self._input.open()
        with self._context.connections.connection() as state:
            active = read_active_consumers(state, self._settings.source)
            if self.name in active.served:
                self._require_fit(state)
                self._ledgers.join(active, [self.name])
                self._generation = active.generations[self.name]
                with self.current.doing(Work.DELIVERY):
                    self._pass_gaps(state, log)
                active = read_active_consumers(state, self._settings.source)
            if self.name not in active.served:
                self.current.parked(
                    Reason.PAUSED if self.name in active.paused else Reason.INACTIVE
                )
                return False
            self._ledgers.join(active, [self.name])
            self.retries.look(state)
            self._pieces.begin(state, active.served[self.name], end_of(log))
        self._cursor, self._generation = active.served[self.name], active.generations[self.name]
        self._context.settler.begin(self.name, self._cursor)
        self._input.begin(self._cursor)
        if self._gathering is not None:
            self._gathering.begin()
        return True

    def drain(self, *, by_operator: bool) -> None:
        if self._gathering is not None:
            self._gathering.drain()

    def backfill(self) -> None:
        self._backfills.wake()

    def verify(self) -> None:
        self._verifications.wake()

    def step(self, wait_s: float) -> bool:
        """What is due, a piece of a backfill, the next range; returns whether there was any."""
        some = self._deliver_due()
        some = self._serve_piece() or some
        return self.serve_next(0.0 if some else wait_s) or some

    def serve_next(self, wait_s: float) -> bool:
        """The next range, from the feed or from the log; returns whether there was any."""
        if self._context.settler.was_moved(self.name):
            raise RestartError("its cursor was moved")
        if wait_s and (due_s := self.retries.due_in_s()) is not None:
            wait_s = min(wait_s, max(due_s, _CLAIM_S))
        if self._gathering is not None:
            left_s = self._gathering.wait_s(self._input.log, self._input.batch, time.monotonic())
            if left_s > 0:
                self._input.rest(min(wait_s, left_s))
                return False
        with self._input.next(wait_s) as decoded:
            if decoded is not None:
                self._serve_range(decoded)
        return decoded is not None

    def _pass_gaps(self, state: Connection, log: LogReader) -> None:
        """Pass what the log gave up, and tell the sink of it.

        Telling it takes time, in which the log may give up more: then once more.
        """
        settings = self._settings
        shares = {self.name: self._share(None, ORIGIN)}
        for _ in range(_FLOORS_LOOKS_MAX):
            earliest, evicted = floors = log.floors()
            unreported = pass_gaps(
                state, evicted, source=settings.source, term=settings.term, shares=shares
            )
            lost = left_behind(state, settings.source, earliest)
            if (error := unreported.get(self.name) or lost.get(self.name)) is not None:
                raise error
            if log.floors() == floors:
                return
        raise TransientError("the log gives up changes faster than its gaps can be told")

    def _serve_range(self, decoded: DecodedRange) -> None:
        """Deliver and report all of a range that the consumer has not had."""
        if self._followed.look(decoded.slices):
            self._consumer = self._followed.consumer
        if decoded.rows:
            self._pieces.changes_came()
        whole, self._matched = self._passed == self._cursor, 0
        while self._cursor < decoded.high:
            cut = self._pieces.cut(self._cursor)
            if cut is None or cut >= decoded.high:
                self._serve_to(decoded, decoded.high)
            else:
                self._serve_to(decoded, cut)
                self._serve_piece()
        if whole:
            dead = sum(piece.errors for piece in decoded.slices)
            self._input.measures.filtered(decoded.rows - self._matched - dead)
        self._passed = decoded.high

    def _serve_piece(self) -> bool:
        """Deliver and report a piece of a backfill, if one stands at the cursor."""
        if not self._pieces.has_any:
            return False
        log, batch = self._input.log, self._input.batch
        behind = not fits(log, batch, log.next_batch(), self._settings.little)
        piece = self._pieces.next(self._cursor, log, behind=behind)
        if piece is None:
            return False
        if isinstance(piece, MarkPiece):
            self._serve_mark(piece)
            return True
        ended = False
        try:
            while not ended:
                began, first = time.monotonic(), max(self._cursor, piece.place)
                ended = self._serve_to(piece, self._pieces.step_end(piece, first))
                rows = self._cursor.idx - first.idx
                self._pieces.delivered(piece, rows, time.monotonic() - began)
        except UndeliveredError as error:
            if error.kind == UNFIT_TABLE and self._cursor <= piece.place:
                self._pieces.refused(piece, error.reason)
            raise
        self._pieces.settled(piece.done_at(self._cursor))
        return True

    def _serve_mark(self, mark: MarkPiece) -> None:
        """Tell the sink what a reload asks for; what it refuses fails that backfill alone."""
        began, settings = time.monotonic(), self._settings
        share = self._share(None, mark.high)
        with (
            settings.slots.hold(settings.source, self.name, self.priority, self._context.over, 0),
            self.current.doing(Work.DELIVERY),
        ):
            error = mark.tell(share)
        if isinstance(error, TransientError):
            raise error
        if error is not None:
            self._pieces.mark_refused(mark, error)
            return
        report = Report(
            start=self._cursor,
            outcome=Outcome(self.name, mark.high),
            piece=mark.done,
            ledger=ledger_name(share.ledger),
            deliver_ms=(time.monotonic() - began) * 1000,
            generation=self._generation,
        )
        with self.current.doing(Work.SETTLEMENT):
            if not self._context.settler.settle(self.name, report):
                raise RestartError("its cursor was moved")
        self._cursor = mark.high
        self._pieces.mark_settled()
        self._succeeded()

    def _serve_to(self, decoded: DecodedRange | Piece, end: Cursor) -> bool:
        """Deliver and report once, up to ``end`` if nothing stops it before.

        Returns whether it was the last time for a range or a piece.
        """
        share = self._share(decoded, end)
        if not share.slices:
            return self._report(decoded, None, Outcome(self.name, end), 0.0)
        if self._consumer.destination.defers:
            with self._context.connections.connection() as state:
                share = self.retries.before(state, share)
        began = time.monotonic()
        share, outcome = self._deliver(decoded, share)
        took_s = time.monotonic() - began
        self._measure(decoded, outcome, took_s)
        changes = partial(decoded.plan.changes, share.slices)
        self._context.live.sample(share, changes, self._context.connections)
        return self._report(decoded, share, outcome, took_s)

    def _measure(self, decoded: DecodedRange | Piece, outcome: Outcome, took_s: float) -> None:
        measures = self._input.measures
        if isinstance(decoded, Piece):
            measures.delivered(outcome, took_s)  # rows of a backfill were committed at any time
            return
        size = decoded.plan.decoded_bytes
        self._matched += measures.delivered(outcome, took_s, decoded.slices, size)

    def _deliver(self, decoded: DecodedRange | Piece, share: Share) -> tuple[Share, Outcome]:
        settings, plan = self._settings, decoded.plan
        size = plan.decoded_bytes if plan.in_driver else 0
        over = self._context.over
        with settings.slots.hold(settings.source, self.name, self.priority, over, size):
            try:
                with self.current.doing(Work.DELIVERY):  # waiting for a slot does not count
                    if isinstance(decoded, Piece):
                        share = decoded.judge(self._context.session, share, self._context.scratch)
                    else:
                        share = self._input.planner.judge(share)
                    outcome = deliver_carefully(
                        plan.deliver,
                        share,
                        lambda piece: cursors_in(piece, plan.changes(piece.slices)),
                    )
            except BaseException:
                _remove(share)
                raise
        if outcome.is_whole and share.stop_reason is not None:
            outcome = replace(outcome, error=share.stop_reason)
        return share, outcome

    def _report(
        self, decoded: DecodedRange | Piece, share: Share | None, outcome: Outcome, took_s: float
    ) -> bool:
        if isinstance(decoded, Piece):
            ended, committed_at = self._ends(decoded, outcome), None
            rows = outcome.cursor.idx - max(self._cursor, decoded.place).idx
            piece = decoded.done_at(outcome.cursor) if ended else None
        else:
            ended, rows, piece = outcome.cursor >= decoded.high, decoded.rows, None
            committed_at = decoded.committed_at if ended else None
        ended_us = time.time_ns() // 1000
        report = Report(
            start=self._cursor,
            outcome=outcome,
            rows=rows,
            committed_at=committed_at,
            piece=piece,
            ledger=ledger_name(share.ledger) if share is not None else None,
            dead=() if share is None else self._dead(decoded, share, outcome),
            deliver_ms=took_s * 1000,
            generation=self._generation,
            reached=None if share is None else share.end,
            timing=replace(
                decoded.timing, began_us=ended_us - int(took_s * 1_000_000), ended_us=ended_us
            ),
        )
        settler = self._context.settler
        try:
            with self.current.doing(Work.SETTLEMENT):
                if report.is_plain and not isinstance(self._consumer.destination, PullDestination):
                    # Changes that wait for rows of a backfill do not wait for the pace as well.
                    at_once = rows > 0 and self._pieces.has_any and not isinstance(decoded, Piece)
                    settler.report(self.name, report, at_once=at_once)
                elif not settler.settle(self.name, report):
                    raise RestartError("its cursor was moved")
        finally:
            _remove(share)
        self._cursor = max(self._cursor, outcome.cursor)
        self._input.isolate = False
        if outcome.stopped is not None:
            self._stopped = _stopped_tables(outcome.stopped)
        self._settled(outcome, has_dead=bool(report.dead) or outcome.has_dead)
        if outcome.error is not None:
            raise UndeliveredError(outcome.error)
        if outcome.is_whole:
            self._succeeded()
        return ended

    def _ends(self, piece: Piece, outcome: Outcome) -> bool:
        """Whether a piece ends where a step has got to: at its end, or before waiting changes.

        Invariant: nothing of a piece that ends early was ever sent from there on.
        """
        if outcome.cursor >= piece.high:
            return True
        may_end = not piece.repeated and outcome.error is None and outcome.cursor > piece.place
        return may_end and self._input.has_next

    def _settled(self, outcome: Outcome, *, has_dead: bool) -> None:
        self.retries.settled(outcome)
        queued = outcome.queued is not None
        if queued or has_dead or self._ledgers.has_news(outcome):
            with self._context.connections.connection() as state:
                if queued:
                    self.retries.look(state)
                self._ledgers.report(state, {self.name: outcome})
                if has_dead:
                    report_dead_letters(state, self._settings.source, self._settings.term)

    def _dead(
        self, decoded: DecodedRange | Piece, share: Share, outcome: Outcome
    ) -> UnreadDeadLetters | tuple[()]:
        """What it went on without; of most ranges nothing, and nothing is read."""
        errors = any(piece.errors for piece in share.slices)
        if not outcome.dead and not errors and not share.failed:
            return ()
        return UnreadDeadLetters(decoded, share, outcome, self._settings.log_directory)

    def _share(self, decoded: DecodedRange | Piece | None, end: Cursor) -> Share:
        """What the consumer lacks of a range up to ``end``; without one, what its sink needs."""
        settled = self._context.settler.settled(self.name)
        return Share(
            self._consumer,
            self._settings.origin,
            self._context.run,
            self._cursor,
            end,
            self._slices(decoded) if decoded is not None else [],
            decoded.wanted if isinstance(decoded, Piece) else self._settings.wanted,
            match=self._followed.match,
            ledger=self._ledgers.place(self._consumer, settled),
            state_dsn=self._settings.state_dsn,
            settled_cursor=settled,
            generation=self._generation,
            epoch=self._ledgers.epoch(self.name),
            reload=decoded.reload if isinstance(decoded, Piece) else None,
        )

    def _slices(self, decoded: DecodedRange | Piece) -> list[SliceMarker]:
        """The slices of a range; none if it has nothing for the consumer.

        All or none: a slice's rows are numbered within its batch by the slices before it.
        """
        some = [piece for piece in decoded.slices if piece.rows]
        return some if any(map(self._may_take, some)) else []

    def _may_take(self, piece: SliceMarker) -> bool:
        if piece.errors or piece.tables is None:
            return True
        return self._followed.match.takes_any(piece.tables)


def _remove(share: Share | None) -> None:
    """Remove the verdicts of a share that was delivered."""
    if share is not None and share.verdicts is not None:
        Path(share.verdicts).unlink(missing_ok=True)


def _stopped_tables(tables: tuple[StoppedTable, ...]) -> Condition | None:
    if not tables:
        return None
    first, more = tables[0], len(tables) - 1
    others = f"; and those of {more} more" if more else ""
    what = f"changes of {first.table} wait at the destination: {first.what}{others}"
    return Condition(TABLES_STOPPED, "error", what, first.fix)
