"""The feed of one source over the life of its stage: one streaming query after the other.

Invariants: what the query cannot do is tried again with backoff, and is a health event meanwhile.
After several failures of Spark in a row, or an unforeseen one, ``failure`` says why a new
process is the remedy. Spark itself is waited for within a bound: a job that hangs is cancelled, and
a JVM that does not answer is ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import psycopg
import structlog
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from cdc.backoff import Backoff
from cdc.connection_pool import ConnectionPool
from cdc.cursor import Cursor
from cdc.errors import CorruptionError, GapError, OperatorError, WalbrookError
from cdc.log.damage_note import report_damage
from cdc.log.open import open_log
from cdc.state.active_consumers import read_active_consumers
from cdc.state.feeds import FeedFigures, report_feed
from cdc.state.health import Condition
from cdc.state.positions import restart_cursor
from spark_pipeline.capacity.backlog import high_before, lowest_near
from spark_pipeline.feed.body import FeedBody
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.planner import Planner
from spark_pipeline.feed.progress import StageProgress
from spark_pipeline.feed.query import RunningQuery, is_of_spark, named
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.jvm.jvm import end_jvm
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.slices.exchange import Exchange
from spark_pipeline.stage.status import GIVEN_UP_AFTER, silent_spark, slow_feed, stopped_feed

_logger = structlog.get_logger("walbrook.stage")
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_SPARK_FAILURES_MAX = 5  # in a row, after which a new driver process is the remedy
_SERVING_AFTER_S = 10.0  # a query that runs this long is not failing
_SILENT_S = 60.0  # a JVM that is silent for less is not ended, whatever the deadline is


class FeedRunner:
    """Runs the feed; ``run`` is its thread, everything else may be called from any."""

    def __init__(
        self,
        spark: LateSession | None,
        settings: StageSettings,
        feed: Feed,
        exchange: Exchange,
        connections: ConnectionPool,
        *,
        isolate: bool,
        on_read: Callable[[Cursor], None],
        on_spark: Callable[[], None],
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._source = settings.source
        self._feed = feed
        self._exchange = exchange
        self._connections = connections
        self._isolate = isolate
        self._on_read = on_read
        self._on_spark = on_spark
        self._query: RunningQuery | None = None
        self._answered: float | None = None  # when (monotonic) Spark did last, while a query runs
        self._error: WalbrookError | None = None  # while the query cannot run
        self._cancelling: dict[str, threading.Thread] = {}  # by job group
        self.progress = StageProgress(settings.source)
        self.ended = threading.Event()
        self.query_over = threading.Event()
        """The query that runs is to end."""
        self._next: StageSettings | None = None  # of the next query
        self.failure: Exception | None = None

    @property
    def running(self) -> Exchange | None:
        """The exchange of the query, if there is one."""
        return self._exchange if self._query is not None else None

    def place(self) -> None:
        """The feed begins at the lowest cursor that is near the highest: they go together."""
        with (
            closing(open_log(self._settings.log_directory)) as log,
            self._connections.connection() as state,
        ):
            served = read_active_consumers(state, self._source).served
            first = lowest_near(log, served.values(), self._settings.near)
            if first is None:
                first = log.seek(restart_cursor(state, self._source))
            self._feed.begin(log.history(), first, high_before(log, first))

    def run(self) -> None:
        """Query after query, with a pause after a failure, until the body has to end."""
        backoff, spark_failures = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S), 0
        while not self.ended.is_set():
            started = time.monotonic()
            try:
                if not self._run_query():
                    return
                continue
            except Exception as error:
                self._error = named(error)
                if self.ended.is_set() or self._is_fatal(error):
                    return
                if time.monotonic() - started > _BACKOFF_MAX_S:
                    backoff.reset()
                    spark_failures = 0
                spark_failures = spark_failures + 1 if is_of_spark(error) else 0
                if spark_failures >= _SPARK_FAILURES_MAX:
                    self.failure = error
                    return
            self.ended.wait(backoff.next_s())

    def end(self) -> None:
        """Let the query end, and begin no other."""
        self.ended.set()
        self.query_over.set()

    def widen(self, settings: StageSettings) -> bool:
        """Have all that these settings ask for decoded; returns whether it is by now.

        What was decoded for less is dropped: workers read that part of the log themselves.
        """
        if self._settings.wanted.widened(settings.wanted) == self._settings.wanted:
            return True
        self._next = settings
        self.query_over.set()
        return False

    def figures(self) -> FeedFigures:
        """What SQL is to say of it."""
        last, depth = self.progress.last, self._feed.depth
        if last is None:
            return FeedFigures(self._feed.high, ranges=depth.ranges, bytes=depth.bytes)
        return FeedFigures(
            self._feed.high, last.plan, last.rows, last.decode_ms, depth.ranges, depth.bytes
        )

    def overdue(self) -> list[Condition]:
        """What the feed is late with; a Spark job that hangs is cancelled, a JVM is ended."""
        found: list[Condition] = []
        step, deadline_s = self.progress.step, self._settings.deadline_s
        answered = self._answered
        silent_s = time.monotonic() - answered if answered is not None else 0.0
        if silent_s >= deadline_s:
            given_up_s = max(deadline_s * GIVEN_UP_AFTER, _SILENT_S)
            found.append(silent_spark(silent_s, deadline_s, given_up_s))
            if silent_s >= given_up_s:
                end_jvm()
        if step is not None and step.name == "decode":
            age_s = time.monotonic() - step.since
            if age_s >= deadline_s:
                found.append(slow_feed(step, age_s, deadline_s))
            query = self._query
            if age_s >= deadline_s * GIVEN_UP_AFTER and query is not None:
                self.cancel(query.job_group)
        if self._error is not None and step is None:
            found.append(stopped_feed(self._source, self._error))
        return found

    def take_settings(self) -> None:
        """Before a query: what it decodes may be more than what the one before has decoded."""
        self.query_over.clear()
        if self.ended.is_set():
            self.query_over.set()
        following, self._next = self._next, None
        if following is not None:
            self._feed.skip(self._feed.position, self._feed.high)
            self._settings = following

    def cancel(self, job_group: str) -> None:
        """End Spark jobs that hang, in a thread: a JVM may not answer."""
        before = self._cancelling.get(job_group)
        session = None if self._spark is None else self._spark.current
        if session is None or (before is not None and before.is_alive()):
            return
        cancel = session.sparkContext.cancelJobGroup
        thread = threading.Thread(target=_try, args=(cancel, job_group), daemon=True)
        self._cancelling[job_group] = thread
        thread.start()

    def _run_query(self) -> bool:
        """One query; returns whether another may follow."""
        if self._spark is None:
            raise RuntimeError("a stage without Spark has no query")
        if (session := self._spark.wait(self.ended.is_set, self._on_spark)) is None:
            return False
        self.take_settings()
        with closing(open_log(self._settings.log_directory)) as log:
            if log.history() != self._feed.history or self._feed.position < log.first_batch():
                self.place()
        exchange = self._exchange
        exchange.clear(keep=self._feed.files)
        planner = Planner(self._settings, self._feed.history, exchange.directory, spark=session)
        body = FeedBody(
            self._feed,
            planner,
            exchange,
            self.progress,
            self.query_over,
            little=self._settings.little,
            isolate=self._isolate,
            on_read=self._note_read,
        )
        try:
            self._skip_unneeded(body)
            self._answered = time.monotonic()
            self._query = RunningQuery(session, self._settings, body, exchange)
            self._query.watch(self.query_over, self._note_running)
        finally:
            self._feed.is_filled = False
            query, self._query = self._query, None
            try:
                if query is not None:
                    query.stop()
            finally:
                self._answered = None
                body.close()
                planner.close()
        return True

    def _skip_unneeded(self, body: FeedBody) -> None:
        """What failed may no longer be needed by a worker in the feed."""
        demand = self._feed.demand()
        if demand is not None and demand > self._feed.position:
            body.skip_to(demand)

    def _note_running(self, since: float) -> None:
        self._answered = time.monotonic()
        if time.monotonic() - since > _SERVING_AFTER_S:
            self._error = None

    def _note_read(self, read_to: Cursor) -> None:
        self._isolate = False
        self._error = None
        self._on_read(read_to)

    def _is_fatal(self, error: Exception) -> bool:
        """Say in the log and in SQL what keeps the feed, and whether trying again is no use."""
        what = named(error)
        _logger.warning("feed.failed", source=self._source, error=what)
        try:
            with self._connections.connection() as state:
                report_feed(state, self._source, self._settings.term, what)
        except psycopg.Error as problem:
            _logger.debug("feed.state_unreachable", error=problem)
        if isinstance(error, CorruptionError):
            # The reader looks, and reads again from the slot what is damaged if it can.
            report_damage(self._settings.log_directory)
        # A log that was cut or evicted is no reason to stop: what that means for each consumer is
        # decided by its worker. An unforeseen error, such as a JVM that is gone, is repaired by a
        # new process.
        foreseen = isinstance(
            error, WalbrookError | psycopg.Error | PySparkException | Py4JJavaError
        )
        if not foreseen or (isinstance(error, OperatorError) and not isinstance(error, GapError)):
            self.failure = error
            return True
        return False


def _try(cancel: Callable[[str], None], job_group: str) -> None:
    """A JVM that is gone has no jobs any more."""
    try:
        cancel(job_group)
    except (Py4JError, OSError) as error:
        _logger.debug("feed.not_cancelled", error=error)
