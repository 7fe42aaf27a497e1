"""Choosing where the work of a lane is done: the cheapest plan for the size of each micro-batch."""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession

from spark_pipeline.cluster import ClusterPlan
from spark_pipeline.delivery import Share
from spark_pipeline.errands import Leg
from spark_pipeline.exchange import Exchange, PlannedRange
from spark_pipeline.expressions.shares import DRIVER_ROWS_MAX, judge
from spark_pipeline.options import driver_options
from spark_pipeline.plan import DRIVER_WORK_MAX, DriverPlan, Plan, SparkPlan
from spark_pipeline.reorder import Reorder
from spark_pipeline.settings import LaneSettings

ATTEMPTS_IN_DRIVER = 3
"""Starts of a lane in a row, none of which settled anything, before it is suspicious."""


class Planner:
    """The plans of one lane, within one history of the log."""

    def __init__(
        self,
        settings: LaneSettings,
        exchange: Exchange,
        history: int,
        pool: str,
        spark: SparkSession | None,
    ) -> None:
        self._settings = settings
        self._exchange = exchange
        self._history = history
        self._pool = pool
        self._spark = spark
        self._in_driver = driver_options(settings.log_directory, settings.wanted)

    def plan(
        self, frame: DataFrame | None, planned: PlannedRange, consumers: int, suspicious: bool
    ) -> Plan:
        """For a micro-batch as Spark planned it; a few rows are not worth a Spark job.

        A lane that was started again and again in vain may hold something that ends this process;
        a Python worker can be lost without harm.
        """
        small = planned.rows * max(1, consumers) <= DRIVER_WORK_MAX
        if frame is None or (small and not suspicious):
            return self.in_driver(planned)
        if self._settings.cluster_options is not None:
            log, wanted = self._settings.log_directory, self._settings.wanted
            return ClusterPlan(frame, self._pool, log, self._history, wanted)
        return SparkPlan(frame, self._pool)

    def in_driver(self, planned: PlannedRange) -> DriverPlan:
        return DriverPlan(self._in_driver, planned, self._history)

    def bridge(self, share: Share, first: int, end: int, size: int = 0) -> Leg:
        """What a consumer lacks of the batches ``[first, end)``, decoded when its turn comes.

        ``size`` is how many bytes they have in the log: they count as decoded ones until then.
        """
        plan = self.in_driver(PlannedRange(first, end, 0))
        plan.driver_bytes = size

        def decode(lacking: Share) -> Share:
            slices = Reorder(first).micro_batch(plan.decode())
            return self.judge(replace(lacking, slices=[piece for piece in slices if piece.rows]))

        return Leg(share, plan, decode)

    def judge(self, share: Share) -> Share:
        """The share with what its consumer's expressions, if it has any, say of it."""
        rows = sum(piece.rows for piece in share.slices)
        elsewhere = (self._settings.cluster_options or {}).get("executorPath")
        log = elsewhere if elsewhere and rows > DRIVER_ROWS_MAX else self._settings.log_directory
        judged = judge(self._spark, share, log, self._history, self._exchange.directory)
        self._exchange.hold([judged.verdicts] if judged.verdicts else [])
        return judged
