"""A lane: the streaming query that takes one source's consumers along the log.

What must always hold: a lane always starts at the cursors in Postgres, never at Spark's checkpoint;
when a consumer fails, the others' progress is settled, and the lane starts again at the lowest
cursor, where those that are ahead skip what they have.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from contextlib import closing
from pathlib import Path

import psycopg
import structlog
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cdc.connection import connect
from cdc.errors import CorruptionError, GapError, OperatorError, TransientError, WalbrookError
from cdc.log.damage import report_damage
from cdc.log.manifest import read_manifest
from cdc.log.open import open_log
from cdc.log.view import LogReader
from cdc.replication.stop import StopSignal
from cdc.state.positions import report_lane, restart_cursor
from spark_pipeline.exchange import Exchange
from spark_pipeline.passage import LaneSettings, Passage, told

_logger = structlog.get_logger("walbrook.lane")
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_POLL_S = 0.2
_RUN = uuid.uuid4().hex  # this process: executors close the sinks of earlier ones
# The checkpoint is never read again, so its writes need not be waited for. Spark asks to be told
# twice, because a sink that trusted batch ids would see some of them again; ours go by cursor.
_ASYNC_PROGRESS = {
    "asyncProgressTrackingEnabled": "true",
    "asyncProgressTrackingCheckpointIntervalMs": "60000",
    "_asyncProgressTrackingOverrideSinkSupportCheck": "true",
}


class Lane:
    """Serves a source's consumers until told to stop."""

    def __init__(self, spark: SparkSession, settings: LaneSettings, stop: StopSignal) -> None:
        self._spark = spark
        self._settings = settings
        self._stop = stop
        self._name = f"{settings.source}:lane"

    def run(self, drain_timeout_s: float) -> None:
        """Start the query, again after transient failures, until a stop; then drain."""
        backoff_s = _BACKOFF_FIRST_S
        # A stop may come before Spark is up; what the log holds is delivered all the same.
        while not self._stop.requested or (drain_timeout_s and self._behind()):
            started = time.monotonic()
            try:
                self._serve(drain_timeout_s)
                return
            except GapError as error:
                # The log was cut or evicted below us. What that means for each consumer is
                # decided at the start, where cursors and floors are compared.
                self._tell(error)
            except CorruptionError as error:
                # The reader looks, and reads again from the slot what is damaged if it can.
                self._tell(error)
                report_damage(self._settings.log_directory)
            except OperatorError as error:
                self._tell(error)
                raise
            except (WalbrookError, psycopg.Error) as error:
                # Whatever it was, nothing was settled that is not safe: trying again is safe too.
                self._tell(error)
            if time.monotonic() - started > _BACKOFF_MAX_S:
                backoff_s = _BACKOFF_FIRST_S
            if self._stop.wait(backoff_s):
                return
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    def _behind(self) -> bool:
        """Whether the log holds something that is not settled; not if nobody can say."""
        try:
            with connect(self._settings.state_dsn, name=self._name) as state:
                lowest = restart_cursor(state, self._settings.source)
            with closing(open_log(self._settings.log_directory)) as view:
                return view.seek(lowest) < view.next_batch()
        except (WalbrookError, psycopg.Error):
            return False

    def _tell(self, error: Exception) -> None:
        """Say in the log and in SQL what keeps the lane from moving."""
        what = str(error).strip()
        _logger.warning("lane.failed", source=self._settings.source, error=what)
        try:
            with connect(self._settings.state_dsn, name=self._name) as state:
                report_lane(state, self._settings.source, self._settings.term, what)
        except psycopg.Error as problem:
            _logger.warning("lane.state_unreachable", error=str(problem).strip())

    def _serve(self, drain_timeout_s: float) -> None:
        """One query from the cursors in Postgres on; returns after a stop, raises on failure."""
        state = connect(self._settings.state_dsn, name=self._name)
        scratch = self._settings.checkpoint_directory
        shutil.rmtree(scratch / "checkpoint", ignore_errors=True)
        exchange = Exchange.create(scratch / "exchange")
        checkpoint = scratch / "checkpoint" / uuid.uuid4().hex
        view = self._view()
        try:
            passage = Passage(self._settings, state, view, exchange, _RUN)
            query = self._start(passage, exchange, checkpoint)
            try:
                self._watch(query, passage, view, drain_timeout_s)
            finally:
                query.stop()
        finally:
            view.close()
            exchange.remove()
            shutil.rmtree(checkpoint, ignore_errors=True)
            state.close()

    def _view(self) -> LogReader:
        """The log, once its reader has begun it: until then there is no history to follow."""
        while read_manifest(self._settings.log_directory) is None:
            if self._stop.wait(_POLL_S):
                break
        return open_log(self._settings.log_directory)

    def _start(self, passage: Passage, exchange: Exchange, checkpoint: Path) -> StreamingQuery:
        settings = self._settings
        parallelism = self._spark.sparkContext.defaultParallelism
        return (
            self._spark.readStream.format("walbrook")
            .option("path", str(settings.log_directory))
            .option("exchange", str(exchange.directory))
            .option("startingBatch", passage.next_batch)
            .option("startingHistory", passage.history)
            .option("maxRows", settings.micro_batch_rows)
            .option("maxBytes", settings.micro_batch_bytes)
            .option("partitions", parallelism)
            .option("wanted", settings.wanted.to_text())
            .load()
            .writeStream.queryName(f"lane-{settings.source}")
            .option("checkpointLocation", str(checkpoint))
            .options(**_ASYNC_PROGRESS)
            .foreachBatch(passage.take)
            .start()
        )

    def _watch(
        self, query: StreamingQuery, passage: Passage, view: LogReader, drain_timeout_s: float
    ) -> None:
        """Wait for a failure or a stop; after a stop, for everything in the log to be settled."""
        while query.isActive and not passage.failed.wait(_POLL_S) and not self._stop.requested:
            pass
        deadline = time.monotonic() + drain_timeout_s
        while query.isActive and passage.failure is None and passage.next_batch < view.next_batch():
            if time.monotonic() >= deadline:
                _logger.warning("lane.drain_timeout", source=self._settings.source)
                return
            passage.failed.wait(_POLL_S / 4)
        if passage.failure is not None or not query.isActive:
            raise passage.failure or _query_failure(query)


def _query_failure(query: StreamingQuery) -> WalbrookError:
    reason: PySparkException | None = query.exception()
    return told(reason) if reason else TransientError("the streaming query stopped by itself")


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
