"""Where a micro-batch is worked on: on the executors, or, when it is small, in the driver.

Starting Spark jobs costs tens of milliseconds, whatever they do. Both plans run the same two
functions, the source's ``read`` and ``deliver``; order, matching and settling are decided outside.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from cdc.decoding.format import Wanted
from spark_pipeline.delivery import Outcome, Share, deliver
from spark_pipeline.exchange import PlannedRange, SliceMarker, markers_from_arrow
from spark_pipeline.source import LogStreamReader

DRIVER_WORK_MAX = 20_000
"""Rows times consumers up to which the driver is faster than two Spark jobs."""

_THREADS_MAX = 8


class Plan(Protocol):
    """How one micro-batch is decoded and delivered."""

    def decode(self) -> list[SliceMarker]: ...
    def deliver(self, shares: list[Share]) -> list[Outcome]: ...


class SparkPlan:
    """Decode in the source's partitions, deliver each consumer's share as a task."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame

    def decode(self) -> list[SliceMarker]:
        return markers_from_arrow(self._frame.toArrow())

    def deliver(self, shares: list[Share]) -> list[Outcome]:
        if not shares:
            return []
        context = self._frame.sparkSession.sparkContext
        return list(context.parallelize(shares, len(shares)).map(deliver).collect())


class DriverPlan:
    """Decode in this process, deliver each consumer's share in a thread."""

    def __init__(
        self, log: Path, exchange: Path, planned: PlannedRange, history: int, wanted: Wanted
    ) -> None:
        self._reader = LogStreamReader.for_lane(log, exchange, wanted)
        self._planned = planned
        self._history = history

    def decode(self) -> list[SliceMarker]:
        first = {"batch": self._planned.start, "history": self._history}
        last = {"batch": self._planned.end, "history": self._history}
        batches = [
            batch
            for partition in self._reader.partitions(first, last)
            for batch in self._reader.read(partition)
        ]
        return markers_from_arrow(pa.Table.from_batches(batches))

    def deliver(self, shares: list[Share]) -> list[Outcome]:
        if len(shares) <= 1:
            return [deliver(share) for share in shares]
        with ThreadPoolExecutor(min(_THREADS_MAX, len(shares))) as threads:
            return list(threads.map(deliver, shares))
