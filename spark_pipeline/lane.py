"""A lane: the streaming query that takes one source's consumers along the log.

For each micro-batch: decode in partitions, restore order by markers, deliver each consumer's share
on the executors, settle in one transaction. What must always hold: a consumer's cursor moves only
over what its sink said is safe; a lane always starts at the cursors in Postgres, never at Spark's
checkpoint; when a consumer fails, the others' progress is settled, and the lane starts again at the
lowest cursor, where those that are ahead skip what they have.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cdc.config import Config, Database
from cdc.config import Sink as SinkConfig
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.log.view import LogView
from cdc.replication.stop import StopSignal
from cdc.state.positions import (
    Settlement,
    consumer_cursors,
    report_lane,
    restart_cursor,
    settle,
)
from spark_pipeline.delivery import Origin, Outcome, Share
from spark_pipeline.exchange import Exchange
from spark_pipeline.plan import DRIVER_WORK_MAX, DriverPlan, Plan, SparkPlan
from spark_pipeline.reorder import Reorder

_logger = structlog.get_logger("walbrook.lane")
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_POLL_S = 0.2
# The checkpoint is never read again, so its writes need not be waited for. Spark asks to be told
# twice, because a sink that trusted batch ids would see some of them again; ours go by cursor.
_ASYNC_PROGRESS = {
    "asyncProgressTrackingEnabled": "true",
    "asyncProgressTrackingCheckpointIntervalMs": "60000",
    "_asyncProgressTrackingOverrideSinkSupportCheck": "true",
}


@dataclass(frozen=True)
class LaneSettings:
    """What a lane needs to know; ``term`` is this start of the service."""

    source: str
    term: int
    origin: Origin
    consumers: list[SinkConfig]
    state_dsn: str
    log_directory: Path
    checkpoint_directory: Path
    micro_batch_rows: int
    micro_batch_bytes: int

    @classmethod
    def of(cls, config: Config, database: Database, term: int) -> LaneSettings:
        parameters = conninfo_to_dict(database.dsn())
        return cls(
            source=database.name,
            term=term,
            origin=Origin(
                database.name, str(parameters.get("host", "")), str(parameters.get("dbname", ""))
            ),
            consumers=[s for s in config.sinks_of(database.name) if s.status == "active"],
            state_dsn=config.state_dsn(),
            log_directory=config.log.directory / database.name,
            checkpoint_directory=config.spark.checkpoint_directory / database.name,
            micro_batch_rows=config.spark.micro_batch_rows,
            micro_batch_bytes=config.spark.micro_batch_bytes,
        )


class Lane:
    """Serves a source's consumers until told to stop."""

    def __init__(self, spark: SparkSession, settings: LaneSettings, stop: StopSignal) -> None:
        self._spark = spark
        self._settings = settings
        self._stop = stop
        self._view = LogView(settings.log_directory)
        self._consumers = {consumer.name: consumer for consumer in settings.consumers}
        self._run = uuid.uuid4().hex
        self._failed: WalbrookError | None = None

    def run(self, drain_timeout_s: float) -> None:
        """Start the query, again after transient failures, until a stop; then drain."""
        backoff_s = _BACKOFF_FIRST_S
        while not self._stop.requested:
            started = time.monotonic()
            try:
                self._serve(drain_timeout_s)
            except OperatorError:
                raise
            except (WalbrookError, psycopg.Error) as error:
                # Whatever it was, nothing was settled that is not safe: trying again is safe too.
                self._tell(error)
                if time.monotonic() - started > _BACKOFF_MAX_S:
                    backoff_s = _BACKOFF_FIRST_S
                self._stop.wait(backoff_s)
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    def _tell(self, error: Exception) -> None:
        """Say in the log and in SQL what keeps the lane from moving."""
        what = str(error).strip()
        _logger.warning("lane.failed", source=self._settings.source, error=what)
        try:
            with _connect_state(self._settings) as state:
                report_lane(state, self._settings.source, self._settings.term, what)
        except psycopg.Error as problem:
            _logger.warning("lane.state_unreachable", error=str(problem).strip())

    def _serve(self, drain_timeout_s: float) -> None:
        """One query from the cursors in Postgres on; returns after a stop, raises on failure."""
        state = _connect_state(self._settings)
        exchange = Exchange.create(self._settings.checkpoint_directory)
        checkpoint = self._settings.checkpoint_directory / uuid.uuid4().hex
        try:
            passage = _Passage(self._settings, state, self._view, exchange, self._run)
            query = self._start(passage, exchange, checkpoint)
            try:
                self._watch(query, passage, drain_timeout_s)
            finally:
                query.stop()
        finally:
            exchange.remove()
            shutil.rmtree(checkpoint, ignore_errors=True)
            state.close()

    def _start(self, passage: _Passage, exchange: Exchange, checkpoint: Path) -> StreamingQuery:
        settings = self._settings
        parallelism = self._spark.sparkContext.defaultParallelism
        return (
            self._spark.readStream.format("walbrook")
            .option("path", str(settings.log_directory))
            .option("exchange", str(exchange.directory))
            .option("startingBatch", passage.next_batch)
            .option("maxRows", settings.micro_batch_rows)
            .option("maxBytes", settings.micro_batch_bytes)
            .option("partitions", parallelism)
            .load()
            .writeStream.queryName(f"lane-{settings.source}")
            .option("checkpointLocation", str(checkpoint))
            .options(**_ASYNC_PROGRESS)
            .foreachBatch(passage.take)
            .start()
        )

    def _watch(self, query: StreamingQuery, passage: _Passage, drain_timeout_s: float) -> None:
        """Wait for a failure or a stop; after a stop, for everything in the log to be settled."""
        while query.isActive and not self._stop.wait(_POLL_S):
            pass
        deadline = time.monotonic() + drain_timeout_s
        while query.isActive and passage.next_batch < self._view.next_batch():
            if time.monotonic() >= deadline:
                _logger.warning("lane.drain_timeout", source=self._settings.source)
                return
            time.sleep(_POLL_S / 4)
        if not query.isActive:
            raise passage.failure or _query_failure(query)


def _connect_state(settings: LaneSettings) -> psycopg.Connection[tuple[object, ...]]:
    """A connection on which nothing waits for ever: neither a lock, nor a peer that is gone."""
    return psycopg.connect(
        settings.state_dsn,
        autocommit=True,
        connect_timeout=10,
        application_name=f"walbrook:{settings.source}:lane",
        options="-c statement_timeout=30s -c idle_in_transaction_session_timeout=60s",
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=3,
        tcp_user_timeout=30_000,
    )


class _Passage:
    """One query's way along the log: what is next, who has got how far, what went wrong."""

    def __init__(
        self,
        settings: LaneSettings,
        state: psycopg.Connection[tuple[object, ...]],
        view: LogView,
        exchange: Exchange,
        run: str,
    ) -> None:
        self._settings = settings
        self._state = state
        self._exchange = exchange
        self._run = run
        self.failure: WalbrookError | None = None
        self._cursors = consumer_cursors(state, settings.source)
        lowest = min([restart_cursor(state, settings.source), *self._cursors.values()])
        self._reorder = Reorder(view.seek(lowest))
        self.next_batch = self._reorder.next_batch

    def take(self, markers: DataFrame, _batch_id: int) -> None:
        """One micro-batch, called by Spark; what it raises stops the query."""
        try:
            self._take(markers)
        except WalbrookError as error:
            # Spark hands on only the text of an error; the lane wants to know its kind.
            self.failure = error
            raise

    def _take(self, frame: DataFrame) -> None:
        plan = self._plan(frame)
        slices = self._reorder.micro_batch(plan.decode())
        end = slices[-1].high
        outcomes = plan.deliver(
            [
                Share(
                    consumer=consumer,
                    origin=self._settings.origin,
                    run=self._run,
                    start=self._cursors[consumer.name],
                    end=end,
                    slices=[piece for piece in slices if piece.rows],
                )
                for consumer in self._settings.consumers
                if self._cursors[consumer.name] < end
            ]
        )
        settle(
            self._state,
            source=self._settings.source,
            term=self._settings.term,
            read_to=end,
            consumers={outcome.consumer: _settlement(outcome) for outcome in outcomes},
        )
        self._exchange.clear()
        for outcome in outcomes:
            self._cursors[outcome.consumer] = outcome.cursor
            if outcome.error is not None:
                raise TransientError(
                    f"consumer {outcome.consumer} stands at {outcome.cursor}: {outcome.error}"
                ) from outcome.error
        self.next_batch = self._reorder.next_batch

    def _plan(self, frame: DataFrame) -> Plan:
        """The cheapest plan for the size: a few rows are not worth a Spark job."""
        planned = self._exchange.planned()
        if planned.rows * max(1, len(self._settings.consumers)) <= DRIVER_WORK_MAX:
            return DriverPlan(self._settings.log_directory, self._exchange.directory, planned)
        return SparkPlan(frame)


def _settlement(outcome: Outcome) -> Settlement:
    return Settlement(
        outcome.cursor,
        outcome.delivered,
        outcome.absorbed,
        outcome.last_commit,
        None if outcome.error is None else str(outcome.error),
    )


def _query_failure(query: StreamingQuery) -> TransientError:
    reason: PySparkException | None = query.exception()
    return TransientError(f"the streaming query stopped: {reason or 'without saying why'}")


def run_lanes(lanes: list[Lane], drain_timeout_s: float, stop: StopSignal) -> list[Exception]:
    """Run every lane in a thread of its own; the first that fails for good stops all."""
    failures: list[Exception] = []

    def run(lane: Lane) -> None:
        try:
            lane.run(drain_timeout_s)
        except Exception as error:
            failures.append(error)
            stop.request()

    threads = [threading.Thread(target=run, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
