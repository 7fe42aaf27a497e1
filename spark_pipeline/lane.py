"""A lane: the streaming query that takes some of a source's consumers along the log.

What must always hold: a lane always starts at the cursors in Postgres, never at Spark's checkpoint.
One that catches up on little does without Spark: its micro-batches are served here, one by one.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol

import structlog
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cdc.connection import connect
from cdc.errors import TransientError, WalbrookError
from cdc.log.open import open_log
from cdc.log.view import LogReader
from cdc.replication.stop import StopSignal
from spark_pipeline.backlog import fits, fitting
from spark_pipeline.exchange import Exchange, PlannedRange
from spark_pipeline.passage import Passage
from spark_pipeline.planner import ATTEMPTS_IN_DRIVER
from spark_pipeline.poison import told
from spark_pipeline.post import Post
from spark_pipeline.settings import LaneSettings
from spark_pipeline.tail import Tail

_logger = structlog.get_logger("walbrook.lane")
_POLL_S = 0.2
RUN = uuid.uuid4().hex
"""This process: executors close the sinks of earlier ones."""

# The checkpoint is never read again, so its writes need not be waited for. Spark asks to be told
# twice, because a sink that trusted batch ids would see some of them again; ours go by cursor.
_ASYNC_PROGRESS = {
    "asyncProgressTrackingEnabled": "true",
    "asyncProgressTrackingCheckpointIntervalMs": "60000",
    "_asyncProgressTrackingOverrideSinkSupportCheck": "true",
}

Begun = Callable[[Passage], None]


class Taker(Protocol):
    """Where a query begins in the log, and what is called with each of its micro-batches."""

    @property
    def next_batch(self) -> int: ...

    @property
    def history(self) -> int: ...

    def take(self, markers: DataFrame | None, batch_id: int, /) -> None: ...


class Lane:
    """One query of a lane, from the cursors in Postgres on."""

    def __init__(
        self, spark: SparkSession, settings: LaneSettings, stop: StopSignal, post: Post
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._stop = stop
        self._post = post
        self._scratch = settings.checkpoint_directory / post.name

    def serve(self, begun: Begun, drain_timeout_s: float = 0.0) -> None:
        """Until a stop, or until nobody is left to be served; raises on failure.

        ``begun`` is told of the passage before its first micro-batch.
        """
        source, name = self._settings.source, self._post.name
        shutil.rmtree(self._scratch / "checkpoint", ignore_errors=True)
        exchange = Exchange.create(self._scratch / "exchange")
        with (
            connect(self._settings.state_dsn, name=f"{source}:{name}") as state,
            closing(open_log(self._settings.log_directory)) as view,
        ):
            try:
                passage = Passage(
                    self._settings, state, view, exchange, RUN, self._post, self._spark
                )
                begun(passage)
                try:
                    here = self._post.catches_up and passage.lane.attempts <= ATTEMPTS_IN_DRIVER
                    if here and not self._serve_here(passage, view):
                        return
                    self._serve_by_query(passage, view, exchange, drain_timeout_s)
                finally:
                    passage.close()
            finally:
                exchange.remove()

    def _serve_here(self, passage: Passage, view: LogReader) -> bool:
        """A few rows at a time, without a query; says whether a query is needed all the same.

        Starting one takes longer than a few rows do. And a sink that is down is tried again and
        again: each try must cost little.
        """
        most = self._settings.little
        while not self._is_over(passage):
            first = passage.next_batch
            end = view.wait(first, _POLL_S)
            if end > first:
                batches, rows = fitting(view, first, end, most)
                if not batches:  # one alone is more than that
                    batches, rows = 1, int(view.entries(first, first + 1)["rows"].sum())
                passage.take_range(PlannedRange(first, first + batches, rows))
                if not self._is_over(passage) and not fits(view, passage.next_batch, end, most):
                    return True
        if passage.failure is not None:
            raise passage.failure
        return False

    def _is_over(self, passage: Passage) -> bool:
        nobody = self._post.catches_up and not passage.members.cursors
        return self._stop.requested or passage.ended.is_set() or nobody

    def _serve_by_query(
        self, passage: Passage, view: LogReader, exchange: Exchange, drain_timeout_s: float
    ) -> None:
        checkpoint = self._scratch / "checkpoint" / uuid.uuid4().hex
        with closing(Tail(passage, exchange, self._settings)) as tail:
            query = self.start(tail, exchange, checkpoint)
            try:
                self._watch(query, passage, view, drain_timeout_s)
            finally:
                passage.ended.set()  # whoever is still waited for comes to an end alone
                _stop(query)
                shutil.rmtree(checkpoint, ignore_errors=True)

    def start(self, taker: Taker, exchange: Exchange, checkpoint: Path) -> StreamingQuery:
        """The query alone: every micro-batch goes to ``taker``, and nobody watches it."""
        settings, context = self._settings, self._spark.sparkContext
        context.setLocalProperty("spark.scheduler.pool", self._post.pool)
        return (
            self._spark.readStream.format("walbrook")
            .option("path", str(settings.log_directory))
            .option("exchange", str(exchange.directory))
            .option("startingBatch", taker.next_batch)
            .option("startingHistory", taker.history)
            .option("maxRows", settings.micro_batch_rows)
            .option("maxBytes", settings.micro_batch_bytes)
            .option("targetMs", settings.micro_batch_target_ms)
            .option("partitions", context.defaultParallelism)
            .option("wanted", settings.wanted.to_text())
            .options(**(settings.cluster_options or {}))
            .load()
            # A name that is never used twice: Spark may still hold the query of a failed start.
            .writeStream.queryName(f"{self._post.name}-{settings.source}-{uuid.uuid4().hex[:8]}")
            .option("checkpointLocation", str(checkpoint))
            .options(**_ASYNC_PROGRESS)
            .foreachBatch(taker.take)
            .start()
        )

    def _watch(
        self, query: StreamingQuery, passage: Passage, view: LogReader, drain_timeout_s: float
    ) -> None:
        """Wait for an end or a stop; after a stop, for everything in the log to be settled."""
        while query.isActive and not self._is_over(passage):
            passage.ended.wait(_POLL_S)
        deadline = time.monotonic() + drain_timeout_s
        while query.isActive and not passage.ended.is_set():
            if passage.next_batch >= view.next_batch():
                break
            if time.monotonic() >= deadline:
                if drain_timeout_s:
                    _logger.warning("lane.drain_timeout", source=self._settings.source)
                return
            passage.ended.wait(_POLL_S / 4)
        if passage.failure is not None:
            raise passage.failure
        if not query.isActive and not self._is_over(passage):
            raise _query_failure(query)


def _stop(query: StreamingQuery) -> None:
    """End a query; one that does not end is left to the end of this process."""
    try:
        query.stop()
    except Py4JJavaError as error:
        if query.isActive:
            raise RuntimeError("a query hangs and cannot be stopped") from error
        raise


def _query_failure(query: StreamingQuery) -> WalbrookError:
    reason: PySparkException | None = query.exception()
    return told(reason) if reason else TransientError("the streaming query stopped by itself")
