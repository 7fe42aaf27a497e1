"""Where a micro-batch is worked on: on the executors, or, when it is small, in the driver.

Starting Spark jobs costs tens of milliseconds, whatever they do. Every plan runs the same two
functions, the source's ``read`` and ``deliver``; order, matching and settling are decided outside.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import DataFrame

from spark_pipeline.delivery.deliver import Share, deliver, deliver_changes
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.slices.exchange import (
    PlannedRange,
    SliceMarker,
    markers_from_arrow,
    pick_up,
    runs,
)
from spark_pipeline.source.offsets import Offset
from spark_pipeline.source.range_reader import RangeReader


class Plan(Protocol):
    """How one range of the log, which was decoded, is delivered."""

    @property
    def name(self) -> str:
        """Where the work is done: ``driver``, ``executors`` or ``cluster``."""
        ...

    @property
    def in_driver(self) -> bool:
        """Whether decoded rows are in the memory of this process."""
        ...

    @property
    def decoded_bytes(self) -> int:
        """How many bytes of decoded rows the memory of this machine holds."""
        ...

    def deliver(self, share: Share) -> Outcome:
        """Deliver one consumer's share; called from a thread of its own for each."""
        ...

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        """What was decoded of some slices, here in the driver, in their order."""
        ...

    def fetch(self, share: Share) -> Iterator[pa.RecordBatch]:
        """All that a share may take, from where it was decoded into the driver, in order."""
        ...

    def close(self) -> None:
        """Let go of what was decoded; called once, when every share has come to its end."""
        ...


class DecodingPlan(Plan, Protocol):
    """How one range of the log is decoded as well."""

    def decode(self) -> list[SliceMarker]:
        """Decode all of it; the markers come in any order."""
        ...


def job_group(run: str, source: str, consumer: str) -> str:
    """The group of the Spark jobs for a consumer of a stage: they are cancelled by it."""
    return f"walbrook-{source}-{consumer}-{run}"


def end_jobs(context: SparkContext, group: str) -> None:
    """Cancel the jobs of a group, and whatever its thread begins later."""
    jvm_context: Any = context._jsc
    jvm_context.sc().cancelJobGroupAndFutureJobs(group)


def set_job_group(context: SparkContext, pool: str, share: Share) -> None:
    """For the jobs of this thread: how they can be cancelled, and whom they must not wait for."""
    group = job_group(share.run, share.origin.name, share.consumer.name)
    context.setJobGroup(group, f"delivery to {share.consumer.name}")
    context.setLocalProperty("spark.scheduler.pool", pool)


class SparkPlan:
    """Decode in the source's partitions, deliver each consumer's share as a job of one task."""

    name = "executors"
    in_driver = False

    def __init__(
        self,
        context: SparkContext,
        pool: str,
        decode: Callable[[], list[SliceMarker]],
        folder: Path | None = None,
    ) -> None:
        """``folder`` is the plan's own, if it has one: all that its tasks leave there goes with it,
        also what those of a job that failed have left."""
        self._folder = folder
        self._files: set[str] = set()
        self.decoded_bytes = 0  # until it is decoded
        self._decode = decode
        self._pool = pool
        self._context = context

    @classmethod
    def of_micro_batch(cls, frame: DataFrame, pool: str) -> SparkPlan:
        """Decode what Spark planned."""
        context = frame.sparkSession.sparkContext
        return cls(context, pool, lambda: markers_from_arrow(frame.toArrow()))

    @classmethod
    def of_range(
        cls,
        context: SparkContext,
        pool: str,
        reader: RangeReader,
        planned: PlannedRange,
        history: int,
        folder: Path,
    ) -> SparkPlan:
        """Decode a range outside any query, into a folder; Spark has nothing to plan then."""

        def decode() -> list[SliceMarker]:
            start, end = (Offset(batch, history) for batch in (planned.start, planned.end))
            with closing(reader):
                partitions = reader.plan(start, end)
            tasks = context.parallelize(partitions, len(partitions))
            found = tasks.flatMap(reader.read).collect()
            return [marker for batch in found for marker in markers_from_arrow(batch)]

        return cls(context, pool, decode, folder)

    def decode(self) -> list[SliceMarker]:
        markers = self._decode()
        self._files = {marker.path for marker in markers}
        self.decoded_bytes = sum(Path(path).stat().st_size for path in self._files)
        return markers

    def deliver(self, share: Share) -> Outcome:
        set_job_group(self._context, self._pool, share)
        (outcome,) = self._context.parallelize([share], 1).map(deliver).collect()
        return outcome

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        return pick_up(slices)

    def fetch(self, share: Share) -> Iterator[pa.RecordBatch]:
        return self.changes(share.slices)

    def close(self) -> None:
        for path in self._files:
            Path(path).unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class DriverPlan:
    """Decode and deliver in this process; what was decoded lives as long as the plan."""

    name = "driver"
    in_driver = True

    def __init__(self, reader: RangeReader, planned: PlannedRange, history: int) -> None:
        self._reader = reader
        self._planned = planned
        self._history = history
        self._decoded: list[pa.RecordBatch] = []
        self.decoded_bytes = 0  # until it is decoded

    def decode(self) -> list[SliceMarker]:
        first, last = (
            Offset(batch, self._history) for batch in (self._planned.start, self._planned.end)
        )
        markers: list[SliceMarker] = []
        (partition,) = self._reader.plan(first, last)
        for found, changes in self._reader.decode(partition):
            markers += found
            self._decoded.append(changes)
        self.decoded_bytes = sum(changes.get_total_buffer_size() for changes in self._decoded)
        return markers

    def deliver(self, share: Share) -> Outcome:
        return deliver_changes(share, self.changes(share.slices))

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        for _path, position, offset, rows in runs(slices):
            yield self._decoded[position].slice(offset, rows)

    def fetch(self, share: Share) -> Iterator[pa.RecordBatch]:
        return self.changes(share.slices)

    def close(self) -> None:
        """Who still refers to the plan may still read it."""


class JoinedPlan:
    """Delivers from several ranges that the driver decoded; ``parts`` are by their first batch."""

    name = "driver"
    in_driver = True

    def __init__(self, parts: Mapping[int, Plan]) -> None:
        self.parts = parts
        self.decoded_bytes = sum(part.decoded_bytes for part in parts.values())

    def deliver(self, share: Share) -> Outcome:
        return deliver_changes(share, self.changes(share.slices))

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        for start, some in groupby(slices, key=attrgetter("range_start")):
            yield from self.parts[start].changes(list(some))

    def fetch(self, share: Share) -> Iterator[pa.RecordBatch]:
        return self.changes(share.slices)

    def close(self) -> None:
        """Each part is closed by its own owner."""
