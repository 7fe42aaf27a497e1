"""Where a micro-batch is worked on: on the executors, or, when it is small, in the driver.

Starting Spark jobs costs tens of milliseconds, whatever they do. Every plan runs the same two
functions, the source's ``read`` and ``deliver``; order, matching and settling are decided outside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from spark_pipeline.delivery import Share, deliver, deliver_changes
from spark_pipeline.exchange import PlannedRange, SliceMarker, markers_from_arrow, pick_up, runs
from spark_pipeline.options import Options
from spark_pipeline.outcome import Outcome
from spark_pipeline.places import Offset
from spark_pipeline.reading import RangeReader

DRIVER_WORK_MAX = 20_000
"""Rows times consumers up to which the driver is faster than two Spark jobs."""


class Plan(Protocol):
    """How one micro-batch is decoded and delivered."""

    @property
    def driver_bytes(self) -> int:
        """How many decoded bytes a delivery keeps in the memory of the driver."""
        ...

    def decode(self) -> list[SliceMarker]:
        """Decode all of it; the markers come in any order."""
        ...

    def deliver(self, share: Share) -> Outcome:
        """Deliver one consumer's share; called from a thread of its own for each."""
        ...

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        """What was decoded of some slices, here in the driver, in their order."""
        ...

    def close(self) -> None:
        """Let go of what was decoded; called once, when every share has come to its end."""
        ...


class SparkPlan:
    """Decode in the source's partitions, deliver each consumer's share as a job of one task."""

    driver_bytes = 0

    def __init__(self, frame: DataFrame, pool: str) -> None:
        self._frame = frame
        self._pool = pool
        self._context = frame.sparkSession.sparkContext

    def decode(self) -> list[SliceMarker]:
        return markers_from_arrow(self._frame.toArrow())

    def deliver(self, share: Share) -> Outcome:
        # Each thread has its own; without one its jobs would wait behind those of other lanes.
        self._context.setLocalProperty("spark.scheduler.pool", self._pool)
        (outcome,) = self._context.parallelize([share], 1).map(deliver).collect()
        return outcome

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        return pick_up(slices)

    def close(self) -> None:
        """The exchange is emptied by whoever owns it."""


class DriverPlan:
    """Decode and deliver in this process; what was decoded lives as long as the plan."""

    def __init__(self, options: Options, planned: PlannedRange, history: int) -> None:
        self._reader = RangeReader(options)
        self._planned = planned
        self._history = history
        self._decoded: list[pa.RecordBatch] = []
        self.driver_bytes = 0  # until it is decoded

    def decode(self) -> list[SliceMarker]:
        first, last = (
            Offset(batch, self._history) for batch in (self._planned.start, self._planned.end)
        )
        markers: list[SliceMarker] = []
        try:
            (partition,) = self._reader.plan(first, last)
            for found, changes in self._reader.decode(partition):
                markers += found
                self._decoded.append(changes)
        finally:
            self._reader.close()
        self.driver_bytes = sum(changes.nbytes for changes in self._decoded)
        return markers

    def deliver(self, share: Share) -> Outcome:
        return deliver_changes(share, self.changes(share.slices))

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        for _path, position, offset, rows in runs(slices):
            yield self._decoded[position].slice(offset, rows)

    def close(self) -> None:
        """Who still refers to the plan may still read it."""


class PlanUse:
    """Closes a plan when all who use it are done; whoever makes it is the first."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._users = 1
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._plan.close()
