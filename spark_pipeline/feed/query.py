"""The streaming query of a source: Spark plans ranges of the log, the body takes them.

Invariants: a query always starts where the feed ends, never at Spark's checkpoint. A query that
fails is started again with backoff; several consecutive failures of Spark are answered with a new
driver process.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog
from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cdc.errors import TransientError, WalbrookError
from spark_pipeline.delivery.isolate import as_walbrook_error
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.slices.exchange import Exchange

_logger = structlog.get_logger("walbrook.feed")
_POLL_S = 0.5

# The checkpoint is never read again, so its writes need not be waited for. Spark wants
# the setting twice, because a sink that trusted batch ids would see some of them again;
# ours go by cursor.
_ASYNC_PROGRESS = {
    "asyncProgressTrackingEnabled": "true",
    "asyncProgressTrackingCheckpointIntervalMs": "60000",
    "_asyncProgressTrackingOverrideSinkSupportCheck": "true",
}


class Body(Protocol):
    """Where a query begins in the log, and what is called with each of its micro-batches."""

    @property
    def next_batch(self) -> int: ...

    @property
    def history(self) -> int: ...

    @property
    def failure(self) -> WalbrookError | None: ...

    def take(self, frame: DataFrame | None, batch_id: int, /) -> None: ...


def start_query(
    spark: SparkSession, settings: StageSettings, body: Body, exchange: Exchange, checkpoint: Path
) -> StreamingQuery:
    """The query alone: every micro-batch goes to ``body``, and it is not watched."""
    context = spark.sparkContext
    context.setLocalProperty("spark.scheduler.pool", "shared")
    return (
        spark.readStream.format("walbrook")
        .option("path", str(settings.log_directory))
        .option("exchange", str(exchange.directory))
        .option("startingBatch", body.next_batch)
        .option("startingHistory", body.history)
        .option("maxRows", settings.micro_batch_rows)
        .option("maxBytes", settings.micro_batch_bytes)
        .option("targetMs", settings.micro_batch_target_ms)
        .option("partitions", context.defaultParallelism)
        .option("wanted", settings.wanted.to_text())
        .options(**(settings.cluster_options or {}))
        .load()
        # A name that is never used twice: Spark may still hold the query of a failed start.
        .writeStream.queryName(f"feed-{settings.source}-{uuid.uuid4().hex[:8]}")
        .option("checkpointLocation", str(checkpoint))
        .options(**_ASYNC_PROGRESS)
        .foreachBatch(body.take)
        .start()
    )


class RunningQuery:
    """One query from its start to its end."""

    def __init__(
        self, spark: SparkSession, settings: StageSettings, body: Body, exchange: Exchange
    ) -> None:
        self._body = body
        self._checkpoint = settings.checkpoint_directory / "checkpoint" / uuid.uuid4().hex
        self._query = start_query(spark, settings, body, exchange, self._checkpoint)
        self._job_group = str(self._query.runId)

    def watch(self, ended: threading.Event, running: Callable[[float], None]) -> None:
        """Wait until ``ended``; raises what ended the query before.

        ``running`` is called now and then with the time (monotonic) of the start.
        """
        started = time.monotonic()
        while not ended.wait(_POLL_S):
            running(started)
            if self._body.failure is not None:
                raise self._body.failure
            if not self._query.isActive:
                raise _failure(self._query)

    @property
    def job_group(self) -> str:
        """What its jobs are cancelled by; the body then fails, and the query is started again."""
        return self._job_group

    def stop(self) -> None:
        """End the query; one that does not end is left to the end of this process."""
        try:
            self._query.stop()
        except Py4JJavaError as error:
            if self._query.isActive:
                raise RuntimeError("a query hangs and cannot be stopped") from error
            raise
        finally:
            shutil.rmtree(self._checkpoint, ignore_errors=True)


def is_of_spark(error: Exception) -> bool:
    """Whether Spark itself failed, not our code in it."""
    return isinstance(error, PySparkException | Py4JJavaError)


def named(error: Exception) -> WalbrookError:
    """The error as health shows it."""
    what = as_walbrook_error(error)
    if isinstance(error, OSError | Py4JNetworkError):
        return TransientError(f"Spark does not answer, its JVM may be gone: {what.what}")
    return what


def _failure(query: StreamingQuery) -> WalbrookError:
    reason: PySparkException | None = query.exception()
    return (
        as_walbrook_error(reason)
        if reason
        else TransientError("the streaming query stopped by itself")
    )
