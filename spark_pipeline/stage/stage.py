"""The stage of one source: its query, its feed, one worker per consumer, and one settler.

Threads: the caller of ``run`` watches (operators, pressure, deadlines, status); ``feed`` starts the
streaming query again and again, whose body runs in a thread of Spark's; one thread per worker; one
for the settler.

A worker in event-time order may have inputs in several sources: it is in the stages of all of them,
and has its thread in that of the first. ``take`` gives a running stage other consumers.

Invariants: a consumer has one worker. What a worker cannot do concerns no other. What the query
cannot do is tried again with backoff. A stop first lets the workers deliver what the log has, up to
the drain limit; then the body ends, then the workers, then the last settlement is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from contextlib import closing

import psycopg
import structlog

from cdc.backoff import Backoff
from cdc.connection import Connection, connect
from cdc.connection_pool import ConnectionPool
from cdc.cursor import Cursor
from cdc.errors import OperatorError, WalbrookError
from cdc.log.manifest import read_manifest
from cdc.log.open import open_log
from cdc.queue.claims import due
from cdc.queue.health import report_queues
from cdc.state.active_consumers import ActiveConsumers, read_active_consumers
from cdc.state.backfills import consumers_with_backfills, report_backfills
from cdc.state.dead_letters import report_dead_letters
from cdc.state.feeds import FeedRun, open_feed
from cdc.state.health import open_of_kind, report_conditions
from cdc.state.lost_destinations import report_lost_destinations
from cdc.state.verifications import consumers_with_verifications
from cdc.stop import StopSignal
from spark_pipeline.capacity.backlog import beyond
from spark_pipeline.capacity.slots import Slots
from spark_pipeline.eventtime.workers import EventTimeWorkers
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.jvm.jvm import end_jvm
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.slices.exchange import Exchange
from spark_pipeline.stage.feed_runner import FeedRunner
from spark_pipeline.stage.notifications import heard, listen
from spark_pipeline.stage.readiness import ReadyNotice
from spark_pipeline.stage.stage_workers import StageWorkers
from spark_pipeline.stage.status import (
    GIVEN_UP_AFTER,
    StatusWriter,
    slow_step,
)
from spark_pipeline.stage.throttle import Throttle
from spark_pipeline.stage.worker import TABLES_STOPPED
from spark_pipeline.workers.base import ATTEMPTS_IN_DRIVER, BaseWorker
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.settler import Settler
from spark_pipeline.workers.state import Reason

_logger = structlog.get_logger("walbrook.stage")
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_TICK_S = 0.1
_LOOK_S = 1.0  # how often rows are looked at for changes by operators, if none is notified
_REPORT_S = 5.0
_AHEAD_S = 5.0  # how long a cursor may stand beyond the end of the log before health says so
_END_S = 60.0  # for a query that is stopped, and for the last settlement
_FEED_BYTES_MAX = 64 << 20


class SourceStage:
    """Serves a source's consumers until it is stopped."""

    def __init__(
        self,
        spark: LateSession | None,
        settings: StageSettings,
        stop: StopSignal,
        event_time: EventTimeWorkers | None = None,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._stop = stop
        self._source, self._term = settings.source, settings.term
        self.feed = Feed(_FEED_BYTES_MAX, patience_s=settings.patience_s)
        self._connections = ConnectionPool(settings.state_dsn, name=f"{self._source}:worker")
        self._staged = StageWorkers(self._source, event_time or EventTimeWorkers(), self._thread)
        self.workers = self._staged.current
        self.settler: Settler | None = None
        self._throttle = Throttle(settings, self.feed, self.workers)
        self._statuses = StatusWriter(self._source, self._term)
        self._ready = ReadyNotice(self._source, self._term)
        self._runner: FeedRunner | None = None
        self._fatal: list[Exception] = []
        self._state: Connection | None = None
        self._context: WorkerContext | None = None
        self._state_away = False
        self._looked = self._reported = float("-inf")
        self._ahead: dict[str, float] = {}  # since when (monotonic) beyond the end of the log
        self._seen: dict[str, Cursor] = {}
        self._has_reported = True  # an earlier process may have reported something
        self._next = self._taken = settings

    def take(self, settings: StageSettings) -> None:
        """Serve by these settings soon, which differ in their consumers; from any thread."""
        self._next = settings

    def has_taken(self, settings: StageSettings) -> bool:
        """Whether every worker serves by these settings, and no earlier one is at work."""
        return self._taken is settings

    def run(self, drain_timeout_s: float) -> None:
        """Until a stop, then drain; raises what only a person or a new process can mend."""
        if not self._wait_for_log():
            return
        scratch, exchange = (
            Exchange.create(self._settings.checkpoint_directory / name)
            for name in ("scratch", "exchange")
        )
        try:
            context, attempts = self._begin(scratch, exchange)
            self._context = context
            settler = self._thread("settler", self._settle)
            feed = self._thread("feed", self._run_feed)
            self._staged.start(attempts)
            try:
                while not self._stop.wait(_TICK_S) and not self._fatal:
                    self._tick()
                if not self._fatal:
                    self._drain(drain_timeout_s)
            finally:
                self._end(context, settler, feed)
        finally:
            scratch.remove()
            exchange.remove()
            self._connections.end()  # a worker that hangs gives its own back later
            self._disconnect()
        if self._fatal:
            self._stop.request()
            raise self._fatal[0]

    def _wait_for_log(self) -> bool:
        """Until its reader has begun it there is no history to follow."""
        while read_manifest(self._settings.log_directory) is None:
            if self._stop.wait(_TICK_S):
                return False
        return True

    def _begin(self, scratch: Exchange, exchange: Exchange) -> tuple[WorkerContext, dict[str, int]]:
        """Take over from earlier processes, place the feed, and make the workers."""
        served = [*self._settings.consumers, *self._settings.in_event_time]
        run = self._opened([consumer.name for consumer in served])
        self._runner = FeedRunner(
            self._spark,
            self._settings,
            self.feed,
            exchange,
            self._connections,
            isolate=run.attempts > ATTEMPTS_IN_DRIVER,
            on_read=self._note_read,
            on_spark=self._nudge_workers,
        )
        self.settler = Settler(
            self._source,
            self._term,
            run.run,
            self._settings.state_dsn,
            self._connections,
            self._runner.figures,
            self._settings.records,
        )
        context = WorkerContext(
            settings=self._settings,
            feed=self.feed,
            settler=self.settler,
            connections=self._connections,
            scratch=scratch.directory,
            spark=self._spark,
            catch_up=Slots(self._settings.catch_up_workers),
        )
        stopped = open_of_kind(self._connected(), self._source, TABLES_STOPPED)
        self._staged.make(context, run.consumers, stopped)
        self._runner.place()
        most = max([run.attempts, *run.consumers.values()])
        if most > ATTEMPTS_IN_DRIVER and self._spark is not None:
            # Something ends the processes that deliver it: only Spark's workers may try it again.
            self._spark.wait(lambda: self._stop.requested)
        return context, run.consumers

    def _opened(self, names: list[str]) -> FeedRun:
        """A state database that does not answer yet is waited for."""
        backoff = Backoff(_BACKOFF_FIRST_S, 1.0)
        while True:
            try:
                return open_feed(self._connected(), self._source, self._term, names)
            except psycopg.OperationalError:
                self._disconnect()
                if self._stop.wait(backoff.next_s()):
                    raise

    def _settle(self) -> None:
        assert self.settler is not None
        self.settler.run()
        if self.settler.failure is not None:
            self._fatal.append(self.settler.failure)

    def _run_feed(self) -> None:
        assert self._runner is not None
        self._runner.run()
        if self._runner.failure is not None:
            self._fatal.append(self._runner.failure)

    def _nudge_workers(self) -> None:
        for worker in [*self.workers.values()]:  # the watching thread may add one meanwhile
            worker.nudge()

    def _note_read(self, read_to: Cursor) -> None:
        """The feed moved: without consumers nothing else would let the restart cursor follow."""
        if self.settler is not None and not self._settings.consumers:
            self.settler.note_read(read_to)

    def _tick(self) -> None:
        self._staged.follow_event_time()
        try:
            state = self._connected()
            self._take(state)
            self._note_recovery()
            notified = heard(state, self._source)
            if notified is not None or time.monotonic() - self._looked >= _LOOK_S:
                self._looked = time.monotonic()
                self._look(state)
            if notified is not None:
                self._try_at_once(notified.resumed)
            assert self._runner is not None
            self._throttle.tick(self._runner.progress, self._runner.running, self._connected)
            self._show(state)
        except psycopg.Error as error:
            if not self._state_away:
                _logger.warning("stage.state_unreachable", source=self._source, error=error)
            self._disconnect()
            self._state_away = True
            self._stop.wait(_LOOK_S)
        except OperatorError as error:
            self._fatal.append(error)
        except WalbrookError as error:
            _logger.warning("stage.look_failed", source=self._source, error=error)

    def _take(self, state: Connection) -> None:
        """Go over to other settings, as far as that is possible now."""
        assert self._runner is not None
        settings = self._next
        if settings is not self._settings and self._runner.widen(settings):
            self._settings = settings
            for name in self._staged.follow(settings):
                self._statuses.forget(state, name)
        if self._staged.are_settled and settings is self._settings:
            self._taken = settings

    def _note_recovery(self) -> None:
        """The state database answers again: end the pauses of workers that it was the cause of."""
        if self._state_away:
            self._state_away = False
            _logger.info("stage.state_reachable", source=self._source)
            for worker in self.workers.values():
                if not worker.current.is_served and not worker.is_deferred:
                    worker.nudge()

    def _look(self, state: Connection) -> None:
        """For cursors that operators moved, consumers that come and go, and due retries."""
        # Asked first: what is settled by then is in the rows that are read next.
        settled = {name: worker.settled(self._source) for name, worker in self.workers.items()}
        active = read_active_consumers(state, self._source)
        for name, worker in self.workers.items():
            if self._must_look(worker, active, settled[name]):
                worker.nudge()
        self._seen = dict(active.served)
        retries = {name: each.inputs[self._source].retries for name, each in self.workers.items()}
        versions = {name: each.version for name, each in retries.items()}
        waiting = {each.consumer: each for each in due(state, self._source)}
        for name, each in retries.items():
            each.note(waiting.get(name), versions[name])
        for name in consumers_with_backfills(state, self._source) & self.workers.keys():
            self.workers[name].backfill()
        for name in consumers_with_verifications(state, self._source) & self.workers.keys():
            self.workers[name].verify()
        if self._context is not None:
            self._context.live.look(state, self._source)
        with closing(open_log(self._settings.log_directory)) as log:
            now = time.monotonic()
            self._ahead = {name: self._ahead.get(name, now) for name in beyond(log, active.cursors)}
        self._report(state)

    def _try_at_once(self, resumed: Set[str]) -> None:
        """An operator says that what kept these from being served is repaired."""
        for name in resumed & self.workers.keys():
            if self.workers[name].current.is_held:
                self.workers[name].nudge()

    def _must_look(
        self, worker: BaseWorker, active: ActiveConsumers, settled: Cursor | None
    ) -> bool:
        """Whether a worker has to read its row again."""
        name, current = worker.name, worker.current
        if current.reason in (Reason.PAUSED, Reason.INACTIVE):
            return name in active.served
        if current.is_served:
            return worker.must_look(active, settled)
        if name not in active.served:
            return True
        was = self._seen.get(name, active.served[name])
        # What it settled itself before it failed is no operator's act.
        moved = active.served[name] not in (was, settled)
        return moved and not worker.is_deferred

    def _report(self, state: Connection) -> None:
        """Health events of the whole source."""
        assert self._runner is not None
        conditions = self._runner.overdue() + self._throttle.conditions()
        if conditions or self._has_reported:
            for scope in ("feed_", "worker_"):
                report_conditions(
                    state,
                    self._source,
                    self._term,
                    [each for each in conditions if each.kind.startswith(scope)],
                    scope=scope,
                )
            self._has_reported = bool(conditions)
        if time.monotonic() - self._reported >= _REPORT_S:
            self._reported = time.monotonic()
            report_dead_letters(state, self._source, self._term)
            report_queues(state, self._source, self._term)
            report_lost_destinations(state, self._source, self._term)
            report_backfills(state, self._source, self._term)

    def _show(self, state: Connection) -> None:
        assert self._runner is not None
        now, deadline_s = time.monotonic(), self._settings.deadline_s
        ahead = [name for name, since in self._ahead.items() if now - since >= _AHEAD_S]
        more = {name: worker.conditions for name, worker in self.workers.items()}
        for name, worker in self.workers.items():
            step = worker.current.step
            if step is not None and (age_s := now - step.since) >= deadline_s:
                more[name] = [*more[name], slow_step(name, step.work, age_s, deadline_s)]
                if age_s >= deadline_s * GIVEN_UP_AFTER:
                    self._runner.cancel(worker.inputs[self._source].job_group)
        statuses = {name: worker.current.status() for name, worker in self.workers.items()}
        self._statuses.show(state, statuses, ahead, more)
        self._ready.look(state, statuses)

    def _drain(self, timeout_s: float) -> None:
        """Let the workers that are served deliver and settle what the log has."""
        deadline = time.monotonic() + timeout_s
        for worker in self.workers.values():
            worker.drain(by_operator=self._stop.by_operator)
        while time.monotonic() < deadline and not self._fatal:
            if self._is_drained():
                return
            time.sleep(_TICK_S / 4)
        if timeout_s:
            _logger.warning("stage.drain_timeout", source=self._source)

    def _is_drained(self) -> bool:
        assert self.settler is not None
        try:
            with closing(open_log(self._settings.log_directory)) as log:
                end = log.next_batch()
        except WalbrookError:
            return True
        served = [worker for worker in self.workers.values() if not worker.is_held]
        drained = all(worker.is_drained(self._source, end) for worker in served)
        return drained and not self.settler.has_unsettled

    def _end(
        self, context: WorkerContext, settler: threading.Thread, feed: threading.Thread
    ) -> None:
        """The body first, then the workers, then the last settlement.

        A worker that hangs in a delivery or in a job is fenced: nothing of it counts any more. What
        else does not end in time is ended by a new process.
        """
        assert self._runner is not None
        self._runner.end()
        feed.join(_END_S)
        if feed.is_alive():
            end_jvm()
        self._staged.end(context)
        assert self.settler is not None
        self.settler.close()
        settler.join(_END_S)
        self.feed.close()
        for thread in (settler, feed):
            if thread.is_alive():
                self._fatal.insert(0, RuntimeError(f"{thread.name} does not end"))

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """A thread of the stage; one that dies of an error ends the stage."""

        def guarded() -> None:
            try:
                run()
            except Exception as error:
                _logger.exception("stage.thread_died", source=self._source, thread=name)
                self._fatal.append(error)

        thread = threading.Thread(target=guarded, name=f"{name}-{self._source}", daemon=True)
        thread.start()
        return thread

    def _disconnect(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            state.close()

    def _connected(self) -> Connection:
        if self._state is None or self._state.closed:
            self._state = listen(connect(self._settings.state_dsn, name=f"{self._source}:stage"))
        return self._state
