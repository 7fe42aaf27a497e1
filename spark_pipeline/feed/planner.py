"""Choosing where a range of the log is decoded and delivered: the cheapest plan for its size.

A planner is for one thread: it keeps its view of the log open between ranges.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from cdc.log.view import LogReader
from spark_pipeline.delivery.deliver import Share
from spark_pipeline.expressions.for_share import DRIVER_ROWS_MAX, judge
from spark_pipeline.feed.cluster import ClusterPlan
from spark_pipeline.feed.plan import DecodingPlan, DriverPlan, SparkPlan
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.slices.exchange import PlannedRange
from spark_pipeline.source.options import Options, driver_options
from spark_pipeline.source.range_reader import RangeReader


class Planner:
    """The plans of one thread, within one history of the log.

    ``job_group`` is what the jobs of that thread are cancelled by.
    """

    def __init__(
        self,
        settings: StageSettings,
        history: int,
        scratch: Path,
        *,
        pool: str = "shared",
        spark: SparkSession | None = None,
        job_group: str = "",
    ) -> None:
        self._settings = settings
        self._history = history
        self._scratch = scratch
        self._pool = pool
        self._spark = spark
        self._job_group = job_group
        self._reader = RangeReader(driver_options(settings.log_directory, settings.wanted))

    @property
    def log_directory(self) -> Path:
        return self._settings.log_directory

    @property
    def has_spark(self) -> bool:
        """Whether ``as_job`` leaves the driver."""
        return self._spark is not None

    def log(self) -> LogReader:
        """The planner's view of the log, for its own thread."""
        return self._reader.log(self._history)

    def plan(
        self, frame: DataFrame | None, planned: PlannedRange, consumers: int, isolate: bool
    ) -> DecodingPlan:
        """For a micro-batch as Spark planned it; a few rows are not worth a Spark job.

        ``isolate``: something in it may end this process. A Python worker can be lost without
        harm.
        """
        small = planned.rows * max(1, consumers) <= self._settings.driver_rows
        if frame is None or (small and not isolate):
            return self.in_driver(planned)
        return self._on_executors(frame)

    def in_driver(self, planned: PlannedRange) -> DriverPlan:
        return DriverPlan(self._reader, planned, self._history)

    def as_job(self, planned: PlannedRange) -> DecodingPlan:
        """A Spark job of its own that reads the range, outside any query."""
        if self._spark is None:
            return self.in_driver(planned)
        settings, context = self._settings, self._spark.sparkContext
        context.setJobGroup(self._job_group, f"batches {planned.start} to {planned.end}")
        context.setLocalProperty("spark.scheduler.pool", self._pool)
        folder = self._scratch / uuid.uuid4().hex
        options = {
            "path": str(settings.log_directory),
            "exchange": str(folder),
            "partitions": str(context.defaultParallelism),
            "wanted": settings.wanted.to_text(),
        }
        if settings.cluster_options is None:
            folder.mkdir(mode=0o700)
            reader = RangeReader(Options.read(options))
            return SparkPlan.of_range(context, self._pool, reader, planned, self._history, folder)
        place = {
            "startingBatch": str(planned.start),
            "endingBatch": str(planned.end),
            "startingHistory": str(self._history),
        }
        frame = self._spark.read.format("walbrook").options(
            **options, **place, **settings.cluster_options
        )
        return self._on_executors(frame.load())

    def judge(self, share: Share) -> Share:
        """The share with what its consumer's expressions, if it has any, say of it.

        The verdicts lie in a file of the scratch directory; the delivery of the share removes it.
        """
        rows = sum(piece.rows for piece in share.slices)
        elsewhere = (self._settings.cluster_options or {}).get("executorPath")
        log = elsewhere if elsewhere and rows > DRIVER_ROWS_MAX else self._settings.log_directory
        return judge(self._spark, share, log, self._history, self._scratch)

    def close(self) -> None:
        self._reader.close()

    def _on_executors(self, frame: DataFrame) -> DecodingPlan:
        if self._settings.cluster_options is not None:
            log, wanted = self._settings.log_directory, self._settings.wanted
            return ClusterPlan(frame, self._pool, log, self._history, wanted)
        return SparkPlan.of_micro_batch(frame, self._pool)
