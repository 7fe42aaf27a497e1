"""The Python data source ``walbrook``: the change log as a stream of rows, or a range of it.

Offsets are batch numbers of the log, within one history of it. With the option ``exchange`` (the
product's own query) a partition leaves its decoded slices in that directory and yields their
markers; without it (anyone's own Spark job) it yields the decoded rows; with ``markers`` (that
query on a cluster) it yields both. ``wanted`` says in which forms values are written; without it
there is one, the default. With ``table`` the rows are those of one table, with typed columns.

``path`` is a log's directory or, where the log is served over the network, its address;
``executorPath`` is what partitions read in its place, from machines that cannot see it. Spark runs
the constructor in two processes, so it does no I/O; every range that was handed out can be read
again until its changes are settled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from cdc.decoding.format import PLAIN, Wanted
from cdc.errors import ConfigError, GapError
from cdc.log.open import open_log
from spark_pipeline.slices.exchange import (
    MARKER_SCHEMA,
    PlannedRange,
    followed,
    note_planned,
    widened_by,
)
from spark_pipeline.source.batch_size import Admission
from spark_pipeline.source.marked_rows import marked_schema
from spark_pipeline.source.offsets import Offset, ending, starting
from spark_pipeline.source.options import Options, in_process_options
from spark_pipeline.source.range_reader import RangeReader
from spark_pipeline.source.table_reader import check_schema, newest_version, spark_schema

_LONG_POLL_S = 1.0  # a new batch ends it at once, and so does stop()
_now_s = time.monotonic


class WalbrookDataSource(DataSource):
    """``spark.readStream.format("walbrook").option("path", <log directory of a source>)``."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)

    @classmethod
    def name(cls) -> str:
        return "walbrook"

    def schema(self) -> StructType:
        options = Options.read(self._given)
        if options.table is None:
            return from_arrow_schema(_own_columns(options))
        with closing(open_log(options.path)) as view:
            return spark_schema(newest_version(view, options.path, options.table))

    def streamReader(self, schema: StructType) -> LogStreamReader:  # noqa: N802
        options = Options.read(self._given)
        if options.ending != "latest":
            raise ConfigError(
                "a stream has no end, but the option endingCursor is given",
                fix="leave it out, or read a range with spark.read",
            )
        return LogStreamReader(options, self._target(options, schema))

    def reader(self, schema: StructType) -> LogRangeReader:
        options = Options.read(self._given)
        return LogRangeReader(options, self._target(options, schema))

    def _target(self, options: Options, schema: StructType) -> pa.Schema:
        """The columns that Spark expects, its own finding or what the user said; checked."""
        target = to_arrow_schema(schema, timezone="UTC")
        if options.table is not None:
            check_schema(target)
            return target
        own = _own_columns(options)
        if (target.names, target.types) != (own.names, own.types):
            raise ConfigError(
                f"the schema given does not have the columns of the source: {', '.join(own.names)}",
                fix="leave .schema(...) out; it is for the option table",
            )
        return target


def _own_columns(options: Options) -> pa.Schema:
    """The columns without ``table``."""
    if options.markers:
        return marked_schema(options.wanted.schema)
    return MARKER_SCHEMA if options.exchange else options.wanted.schema


class LogRangeReader(DataSourceReader):
    """``spark.read``: from one cursor to another, or to the end that the log has at planning."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self._options = options
        self._range = RangeReader(options, None if options.for_service else schema)

    def partitions(self) -> list[InputPartition]:
        options = self._options
        if options.starting_batch is not None and options.ending_batch is not None:
            history = self._range.log(options.starting_history).history()
            first, last = (
                Offset(batch, history) for batch in (options.starting_batch, options.ending_batch)
            )
            return [*self._range.plan(first, last)]
        view = self._range.log(None)
        start = starting(view, self._options)
        return [*self._range.plan(start, ending(view, self._options))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._range.read(partition)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver side answers from the log's index; the executor side maps and decodes."""

    def __init__(self, options: Options, schema: pa.Schema | None = None) -> None:
        self._options = options
        self._range = RangeReader(options, None if options.for_service else schema)
        self._admission = Admission(options.rows_max, options.target_s)
        self._last: int | None = None  # the batch at which the query is to end

    @classmethod
    def in_process(cls, log: Path, exchange: Path, wanted: Wanted = PLAIN) -> LogStreamReader:
        """A reader for use outside Spark: one partition, decoded slices by reference."""
        return cls(in_process_options(log, exchange, wanted))

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        view = self._range.log(self._options.starting_history)
        if self._options.starting_batch is not None:
            return Offset(self._options.starting_batch, view.history()).to_json()
        return starting(view, self._options).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        # Spark hands a Python source one limit; ``maxBytes`` is kept beside it.
        return ReadMaxRows(self._options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = self._range.log(None).next_batch()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of what one micro-batch may take; waits a little when there is nothing."""
        offset = Offset.from_json(start)
        done = followed(self._options.exchange)
        now_s = _now_s() - done.spent_s
        self._admission.asked(offset.batch, now_s, widened_by(self._options.exchange))
        beyond = done.batch > offset.batch
        if beyond:
            offset = Offset(done.batch, offset.history)
        end = self._end(offset, _LONG_POLL_S if not beyond else 0.0)
        if end <= offset.batch:
            return offset.to_json() if beyond else start
        taken, limited = self._fitting(offset, end, limit)
        self._admission.handed_out(offset.batch + taken, _now_s(), limited=limited)
        return Offset(offset.batch + taken, offset.history).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last = Offset.from_json(start), Offset.from_json(end)
        if (done := followed(self._options.exchange)).batch > first.batch:
            first = Offset(done.batch, first.history)
        planned = self._range.plan(first, last)
        if planned and self._options.exchange:
            rows = sum(piece.rows for partition in planned for piece in partition.slices)
            directory = Path(self._options.exchange)
            note_planned(directory, PlannedRange(first.batch, last.batch, rows))
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._range.read(partition)

    def stop(self) -> None:
        self._range.close()

    def _end(self, start: Offset, wait_s: float) -> int:
        """The end of what there is to read."""
        view, last = self._range.log(start.history), self._last
        end = view.wait(start.batch, wait_s) if last is None else view.next_batch()
        if end < start.batch:
            # Batches would be numbered again from there, and those below never be read.
            raise GapError(
                f"the log at {self._options.path} ends at batch {end}, before batch {start.batch}",
                fix="the stream must start again from a cursor; the service does so by itself",
            )
        return end if last is None else min(end, last)

    def _fitting(self, start: Offset, end: int, limit: ReadLimit) -> tuple[int, bool]:
        """How many batches one micro-batch takes, at least one; whether rows were the limit."""
        available = end - start.batch
        if isinstance(limit, ReadAllAvailable):
            return available, False
        rows_max, bytes_max = self._admission.rows, self._options.bytes_max
        if isinstance(limit, ReadMaxRows):
            rows_max = min(rows_max, limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            bytes_max = min(bytes_max, limit.max_bytes)
        # At most as many batches as fit can have the rows: no need to look at all of a backlog.
        looked_at = min(available, max(1, rows_max))
        entries = self._range.entries(start.history, start.batch, start.batch + looked_at)
        fit = np.cumsum(entries["rows"]) <= rows_max
        taken = max(1, int((fit & (np.cumsum(entries["bytes"]) <= bytes_max)).sum()))
        return taken, taken < available and (taken == looked_at or not fit[taken])
