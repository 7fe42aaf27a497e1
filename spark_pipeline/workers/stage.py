"""The stage of one source: its query, its feed, one worker per consumer, and one settler.

Threads: the caller of ``run`` watches (operators, pressure, deadlines, status); ``feed`` starts the
streaming query again and again, whose body runs in a thread of Spark's; one thread per worker; one
for the settler.

Invariants: a consumer has one worker. What a worker cannot do concerns nobody else. What the query
cannot do is tried again with backoff. A stop first lets the workers deliver what the log has, up to
the drain limit; then the body ends, then the workers, then the last settlement is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import psycopg
import structlog
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.backoff import Backoff
from cdc.connection import Connection, connect
from cdc.connection_pool import ConnectionPool
from cdc.cursor import Cursor
from cdc.errors import CorruptionError, GapError, OperatorError, WalbrookError
from cdc.log.damage import report_damage
from cdc.log.manifest import read_manifest
from cdc.log.open import open_log
from cdc.log.segment import high_of
from cdc.log.view import LogReader
from cdc.queue.claims import due
from cdc.queue.report import report_queues
from cdc.replication.stop import StopSignal
from cdc.state.backfills import consumers_with_backfills, report_backfills
from cdc.state.dead_letters import report_dead_letters
from cdc.state.feeds import FeedFigures, FeedRun, open_feed, report_feed
from cdc.state.health import Condition, report_conditions
from cdc.state.lost_destinations import report_lost_destinations
from cdc.state.positions import restart_cursor
from cdc.state.roll import Roll, call_roll
from spark_pipeline.capacity.slots import Slots
from spark_pipeline.capacity.throttle import Throttle
from spark_pipeline.feed.backlog import beyond, fits
from spark_pipeline.feed.body import FeedBody
from spark_pipeline.feed.exchange import Exchange
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.plan import job_group
from spark_pipeline.feed.planner import Planner
from spark_pipeline.feed.progress import StageProgress
from spark_pipeline.feed.query import RunningQuery, is_of_spark, named
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.notifications import heard, listen
from spark_pipeline.workers.settings import StageSettings
from spark_pipeline.workers.settler import Settler
from spark_pipeline.workers.state import Reason
from spark_pipeline.workers.status import (
    GIVEN_UP_AFTER,
    StatusWriter,
    slow_delivery,
    slow_feed,
    stopped_feed,
)
from spark_pipeline.workers.worker import ATTEMPTS_IN_DRIVER, Worker

_logger = structlog.get_logger("walbrook.stage")
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_TICK_S = 0.1
_LOOK_S = 1.0  # how often rows are looked at for somebody else's acts, if none is heard of
_REPORT_S = 5.0
_AHEAD_S = 5.0  # how long a cursor may stand beyond the end of the log before health says so
_JOIN_S = 5.0  # for threads that end; those in a delivery that hangs are left to the process
_SPARK_FAILURES_MAX = 5  # in a row, after which a new driver process is the remedy
_SERVING_AFTER_S = 10.0  # a query that runs this long is not failing
_FEED_BYTES_MAX = 64 << 20


class SourceStage:
    """Serves a source's consumers until told to stop."""

    def __init__(
        self, spark: SparkSession | None, settings: StageSettings, stop: StopSignal
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._stop = stop
        self._source, self._term = settings.source, settings.term
        self.feed = Feed(_FEED_BYTES_MAX, patience_s=settings.patience_s)
        self._progress = StageProgress()
        self._connections = ConnectionPool(settings.state_dsn, name=f"{self._source}:worker")
        self.workers: dict[str, Worker] = {}
        self.settler: Settler | None = None
        self._throttle = Throttle(settings, self.feed, self.workers)
        self._statuses = StatusWriter(self._source, self._term)
        self._body_ended = threading.Event()
        self._query: RunningQuery | None = None
        self._exchange: Exchange | None = None
        self._isolate = False
        self._fatal: list[Exception] = []
        self._feed_error: WalbrookError | None = None  # while the query cannot run
        self._state: Connection | None = None
        self._state_away = False
        self._looked = self._reported = float("-inf")
        self._ahead: dict[str, float] = {}  # since when (monotonic) beyond the end of the log
        self._seen: dict[str, Cursor] = {}
        self._told_conditions = True  # an earlier process may have told something

    def run(self, drain_timeout_s: float) -> None:
        """Until a stop, then drain; raises what only a person or a new process can mend."""
        if not self._wait_for_log():
            return
        scratch, self._exchange = (
            Exchange.create(self._settings.checkpoint_directory / name)
            for name in ("scratch", "exchange")
        )
        try:
            context = self._begin(scratch)
            threads = [
                _thread(f"settler-{self._source}", self._settle),
                _thread(f"feed-{self._source}", self._run_feed),
                *(_thread(f"worker-{n}", worker.run) for n, worker in self.workers.items()),
            ]
            while not self._stop.wait(_TICK_S) and not self._fatal:
                self._tick()
            if not self._fatal:
                self._drain(drain_timeout_s)
            self._end(context, threads)
        finally:
            scratch.remove()
            self._exchange.remove()
            self._connections.close()
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

    def _begin(self, scratch: Exchange) -> WorkerContext:
        """Take over from earlier processes, place the feed, and make the workers."""
        names = [consumer.name for consumer in self._settings.consumers]
        run = self._opened(names)
        self._isolate = run.attempts > ATTEMPTS_IN_DRIVER
        self.settler = Settler(
            self._source,
            self._term,
            run.run,
            self._settings.state_dsn,
            self._connections,
            self._figures,
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
        for consumer in self._settings.consumers:
            attempts = run.consumers.get(consumer.name, 0)
            self.workers[consumer.name] = Worker(consumer, context, attempts=attempts)
        self._place_feed()
        return context

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

    def _place_feed(self) -> None:
        """The feed begins at the lowest cursor that is near the highest: they go together."""
        with (
            closing(open_log(self._settings.log_directory)) as log,
            self._connections.connection() as state,
        ):
            served = call_roll(state, self._source).served
            end = log.next_batch()
            places: list[int] = []
            for cursor in served.values():
                try:
                    places.append(log.seek(cursor))
                except WalbrookError:
                    continue  # its worker says why
            top = max(places, default=None)
            if top is None:
                top = log.seek(restart_cursor(state, self._source))
            near = [at for at in places if at >= log.first_batch() and self._near(log, at, top)]
            first = min(near, default=top)
            self.feed.begin(log.history(), first, _high_before(log, first, end))

    def _near(self, log: LogReader, first: int, top: int) -> bool:
        try:
            return fits(log, first, top, self._settings.near)
        except WalbrookError:
            return False

    def _settle(self) -> None:
        assert self.settler is not None
        self.settler.run()
        if self.settler.failure is not None:
            self._fatal.append(self.settler.failure)

    def _run_feed(self) -> None:
        """Query after query, with a pause after a failure, until the body has to end."""
        backoff, spark_failures = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S), 0
        while not self._body_ended.is_set():
            started = time.monotonic()
            try:
                self._run_query()
                return
            except Exception as error:
                self._feed_error = named(error)
                if self._body_ended.is_set() or self._is_fatal(error):
                    return
                if time.monotonic() - started > _BACKOFF_MAX_S:
                    backoff.reset()
                    spark_failures = 0
                spark_failures = spark_failures + 1 if is_of_spark(error) else 0
                if spark_failures >= _SPARK_FAILURES_MAX:
                    self._fatal.append(error)
                    return
            self._body_ended.wait(backoff.next_s())

    def _run_query(self) -> None:
        if self._spark is None:
            raise RuntimeError("a stage without Spark has no query")
        with closing(open_log(self._settings.log_directory)) as log:
            if log.history() != self.feed.history or self.feed.position < log.first_batch():
                self._place_feed()
        exchange = self._exchange
        assert exchange is not None
        exchange.clear(keep=self.feed.files)
        planner = Planner(self._settings, self.feed.history, exchange.directory, spark=self._spark)
        body = FeedBody(
            self.feed,
            planner,
            exchange,
            self._progress,
            self._body_ended,
            little=self._settings.little,
            isolate=self._isolate,
            on_read=self._note_read,
        )
        try:
            self._skip_unneeded(body)
            self._query = RunningQuery(self._spark, self._settings, body, exchange)
            self._query.watch(self._body_ended, self._note_running)
        finally:
            query, self._query = self._query, None
            if query is not None:
                query.stop()
            body.close()
            planner.close()

    def _skip_unneeded(self, body: FeedBody) -> None:
        """What failed may be needed by nobody in the feed any more."""
        demand = self.feed.demand()
        if demand is not None and demand > self.feed.position:
            body.skip_to(demand)

    def _note_running(self, since: float) -> None:
        if time.monotonic() - since > _SERVING_AFTER_S:
            self._feed_error = None

    def _note_read(self, read_to: Cursor) -> None:
        """The feed moved: without consumers nobody else would let the restart cursor follow."""
        self._isolate = False
        self._feed_error = None
        if self.settler is not None and not self.workers:
            self.settler.note_read(read_to)

    def _figures(self) -> FeedFigures:
        last, depth = self._progress.last, self.feed.depth
        if last is None:
            return FeedFigures(self.feed.high, ranges=depth.ranges, bytes=depth.bytes)
        return FeedFigures(
            self.feed.high, last.plan, last.rows, last.decode_ms, depth.ranges, depth.bytes
        )

    def _is_fatal(self, error: Exception) -> bool:
        """Say in the log and in SQL what keeps the feed, and whether trying again is no use."""
        what = named(error)
        _logger.warning("feed.failed", source=self._source, error=what)
        try:
            with self._connections.connection() as state:
                report_feed(state, self._source, self._term, what)
        except psycopg.Error as problem:
            _logger.debug("feed.state_unreachable", error=problem)
        if isinstance(error, CorruptionError):
            # The reader looks, and reads again from the slot what is damaged if it can.
            report_damage(self._settings.log_directory)
        # A log that was cut or evicted is no reason to stop: what that means for each consumer is
        # decided by its worker. What nobody foresaw, such as a JVM that is gone, is mended by a
        # new process.
        foreseen = isinstance(
            error, WalbrookError | psycopg.Error | PySparkException | Py4JJavaError
        )
        if not foreseen or (isinstance(error, OperatorError) and not isinstance(error, GapError)):
            self._fatal.append(error)
            return True
        return False

    def _tick(self) -> None:
        try:
            state = self._connected()
            self._note_recovery()
            told = heard(state, self._source)
            if told or time.monotonic() - self._looked >= _LOOK_S:
                self._looked = time.monotonic()
                self._look(state)
            running = self._exchange if self._query is not None else None
            self._throttle.tick(self._progress, running, self._connected)
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

    def _note_recovery(self) -> None:
        """The state database answers again: nobody waits out a pause that it was the cause of."""
        if self._state_away:
            self._state_away = False
            _logger.info("stage.state_reachable", source=self._source)
            for worker in self.workers.values():
                if not worker.current.is_served and not worker.is_deferred:
                    worker.nudge()

    def _look(self, state: Connection) -> None:
        """For cursors that somebody else moved, consumers that come and go, and due retries."""
        assert self.settler is not None
        # Asked first: what is settled by then is in the rows that are read next.
        settled = {name: self.settler.settled(name) for name in self.workers}
        roll = call_roll(state, self._source)
        for name, worker in self.workers.items():
            if self._must_look(worker, roll, settled[name]):
                worker.nudge()
        self._seen = dict(roll.served)
        versions = {name: worker.retries.version for name, worker in self.workers.items()}
        waiting = {each.consumer: each for each in due(state, self._source)}
        for name, worker in self.workers.items():
            worker.retries.note(waiting.get(name), versions[name])
        for name in consumers_with_backfills(state, self._source) & self.workers.keys():
            self.workers[name].backfill()
        with closing(open_log(self._settings.log_directory)) as log:
            now = time.monotonic()
            self._ahead = {name: self._ahead.get(name, now) for name in beyond(log, roll.standing)}
        self._report(state)

    def _must_look(self, worker: Worker, roll: Roll, settled: Cursor | None) -> bool:
        """Whether a worker has to read its row again."""
        name, current = worker.name, worker.current
        if current.reason in (Reason.PAUSED, Reason.INACTIVE):
            return name in roll.served
        if name not in roll.served:
            return True
        if current.is_served:
            moved = settled is not None and roll.served[name] < settled
            return moved or name in roll.untold
        was = self._seen.get(name, roll.served[name])
        # What it settled itself before it failed is nobody's act.
        moved = roll.served[name] not in (was, settled)
        return moved and not worker.is_deferred

    def _report(self, state: Connection) -> None:
        """Health events of the whole source."""
        conditions = list(self._overdue()) + self._throttle.conditions()
        if conditions or self._told_conditions:
            for scope in ("feed_", "worker_"):
                report_conditions(
                    state,
                    self._source,
                    self._term,
                    [each for each in conditions if each.kind.startswith(scope)],
                    scope=scope,
                )
            self._told_conditions = bool(conditions)
        if time.monotonic() - self._reported >= _REPORT_S:
            self._reported = time.monotonic()
            report_dead_letters(state, self._source, self._term)
            report_queues(state, self._source, self._term)
            report_lost_destinations(state, self._source, self._term)
            report_backfills(state, self._source, self._term)

    def _overdue(self) -> list[Condition]:
        """What the feed is late with; a Spark job that hangs is cancelled."""
        found: list[Condition] = []
        step, deadline_s = self._progress.step, self._settings.deadline_s
        if step is not None and step.name == "decode":
            age_s = time.monotonic() - step.since
            if age_s >= deadline_s:
                found.append(slow_feed(step, age_s, deadline_s))
            query = self._query
            if age_s >= deadline_s * GIVEN_UP_AFTER and query is not None:
                query.cancel_jobs()
        if self._feed_error is not None and step is None:
            found.append(stopped_feed(self._source, self._feed_error))
        return found

    def _show(self, state: Connection) -> None:
        now, deadline_s = time.monotonic(), self._settings.deadline_s
        ahead = [name for name, since in self._ahead.items() if now - since >= _AHEAD_S]
        overdue = {}
        for name, worker in self.workers.items():
            since = worker.current.delivering_since
            if since is not None and now - since >= deadline_s:
                overdue[name] = slow_delivery(name, now - since, deadline_s)
                if now - since >= deadline_s * GIVEN_UP_AFTER and self._spark is not None:
                    self._spark.sparkContext.cancelJobGroup(job_group(self._source, name))
        statuses = {name: worker.current.status() for name, worker in self.workers.items()}
        self._statuses.show(state, statuses, ahead, overdue)

    def _drain(self, timeout_s: float) -> None:
        """Let the workers that are served deliver and settle what the log has."""
        deadline = time.monotonic() + timeout_s
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
        behind = any(worker.batch < end for worker in served)
        return not behind and not self.settler.has_unsettled

    def _end(self, context: WorkerContext, threads: list[threading.Thread]) -> None:
        """The body first, then the workers, then the last settlement."""
        settler, feed_thread, *workers = threads
        self._body_ended.set()
        feed_thread.join()
        context.ended.set()
        for worker in self.workers.values():
            worker.nudge()
        deadline = time.monotonic() + _JOIN_S
        for thread in workers:
            thread.join(max(0.0, deadline - time.monotonic()))
        context.over.set()
        assert self.settler is not None
        self.settler.close()
        settler.join()
        self.feed.close()

    def _disconnect(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            state.close()

    def _connected(self) -> Connection:
        if self._state is None or self._state.closed:
            self._state = listen(connect(self._settings.state_dsn, name=f"{self._source}:stage"))
        return self._state


def _high_before(log: LogReader, first: int, end: int) -> Cursor:
    """The high watermark of the batch before ``first``; the log's floor without one."""
    if log.first_batch() < first <= end:
        return high_of(log.entries(first - 1, first)[0])
    return log.floors()[0]


def _thread(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
