"""A range of the log as partitions, and a partition as Arrow batches: what streams and reads share.

``plan`` answers from the log's index, on the driver; ``read`` maps, checks and decodes, in a task.
Invariant: both do the same whenever they are asked again, as long as the log holds the
range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from cdc.cursor import Cursor
from cdc.cursor_columns import prefix_below
from cdc.decoding.annotations import (
    carried_bytes,
    cut_runs,
)
from cdc.decoding.isolate import decode_carefully
from cdc.errors import GapError
from cdc.log.open import open_log
from cdc.log.segment import Index
from cdc.log.view import LogReader
from spark_pipeline.slices.exchange import (
    SliceMarker,
    leave,
    markers_to_arrow,
)
from spark_pipeline.slices.raw_rows import JoinedRows, LogSlice
from spark_pipeline.source.marked_rows import marked
from spark_pipeline.source.offsets import Offset, removed
from spark_pipeline.source.options import Options
from spark_pipeline.source.slicing import cut, partitions_for
from spark_pipeline.source.table_reader import TableReader

_TABLES_NAMED_MAX = 1_000


@dataclass
class LogPartition(InputPartition):
    """The slices that one task decodes; of their rows those from ``floor`` to below ``ceiling``."""

    range_start: int
    range_end: int
    history: int
    slices: list[LogSlice]
    floor: Cursor | None = None
    ceiling: Cursor | None = None


class RangeReader:
    """Plans and reads ranges; ``schema`` is what the rows are to have, without it as decoded."""

    def __init__(self, options: Options, schema: pa.Schema | None = None) -> None:
        self._options = options
        self._schema = schema
        self._table: TableReader | None = None
        if options.table is not None and schema is not None:
            self._table = TableReader(options.table, schema)
        self._view: LogReader | None = None
        self._history = 0

    def log(self, history: int | None, where: str = "") -> LogReader:
        """The log, in the history that offsets speak of; None takes the one it is in."""
        if self._view is not None and history and history != self._history:
            self.close()
        if self._view is None:
            self._view = open_log(where or self._options.path, history=history)
            self._history = history or self._view.history()
        return self._view

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def entries(self, history: int, first: int, last: int) -> Index:
        """The index entries of the batches ``[first, last)``."""
        with self._telling(first, last):
            return self.log(history).entries(first, last)

    @contextmanager
    def _telling(self, first: int, last: int) -> Iterator[None]:
        """The service handles a gap by itself; the author of a job gets an error."""
        try:
            yield
        except GapError as error:
            if self._options.for_service or error.kind != "log_gap":
                raise
            raise removed(f"batches {first} to {last} of the log at {self._options.path}") from None

    def plan(self, start: Offset, end: Offset) -> list[LogPartition]:
        """The partitions of the batches between two offsets."""
        first, last = start.batch, end.batch
        if first >= last:
            return []
        entries = self.entries(end.history, first, last)
        rows, sizes = entries["rows"].tolist(), entries["bytes"].tolist()
        count = partitions_for(rows, sizes, self._options.partitions)
        return [
            LogPartition(first, last, end.history, slices, start.cursor, end.cursor)
            for slices in cut(first, rows, count, sizes)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, or with an exchange the markers of what was left there."""
        if not isinstance(partition, LogPartition):
            return  # Spark plans one task for a range without partitions
        if self._options.markers:
            yield from marked(self._with_markers(partition), self._options.wanted.schema)
            return
        if not self._options.exchange:
            with self._telling(partition.range_start, partition.range_end):
                for _, changes in self._decoded(partition):
                    yield self._shown(_bounded(changes, partition))
            return
        markers: list[SliceMarker] = []

        def batches() -> Iterator[pa.RecordBatch]:
            for found, changes in self.decode(partition):
                markers.extend(_with_tables(found, changes))
                yield changes

        exchange = Path(self._options.exchange)
        path = str(leave(exchange, batches(), self._options.wanted.schema))
        yield markers_to_arrow([replace(marker, path=path) for marker in markers])

    def decode(self, partition: LogPartition) -> Iterator[tuple[list[SliceMarker], pa.RecordBatch]]:
        """Decoded slices, several at a time, with their markers: which batch they are part of."""
        for position, (pieces, changes) in enumerate(self._decoded(partition)):
            yield list(_markers(partition, pieces, position, changes)), changes

    def _with_markers(
        self, partition: LogPartition
    ) -> Iterator[tuple[list[SliceMarker], pa.RecordBatch]]:
        """Decoded slices, each with its marker, which says where in its batch it begins."""
        for pieces, changes in self._decoded(partition):
            found = _with_tables(_markers(partition, pieces, 0, changes), changes)
            markers = zip(found, pieces, strict=True)
            yield [replace(marker, offset=piece.slice.start) for marker, piece in markers], changes

    def _shown(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """What Spark compares to its schema to the letter, which columns may be null included."""
        if self._schema is None:
            return changes
        return pa.RecordBatch.from_arrays(changes.columns, schema=self._schema)

    def _decoded(self, partition: LogPartition) -> Iterator[tuple[list[_Piece], pa.RecordBatch]]:
        """Slices, decoded several at a time.

        A decode has a cost of its own, whatever its rows: small batches are joined for it.
        """
        slices = partition.slices
        view = self.log(partition.history, self._options.executor_path)
        frames = view.frames(slices[0].batch_idx, slices[-1].batch_idx + 1)
        joined = _Joined()
        for piece, frame in zip(slices, frames, strict=True):
            raw, runs, size = frame.raw, frame.annotations, frame.marker.body_bytes
            if piece.rows < raw.num_rows:
                raw = raw.slice(piece.start, piece.rows)
                runs = tuple(cut_runs(runs, piece.start, piece.stop))
                size = raw.nbytes
            if self._table is not None:
                raw, runs = self._table.select(raw, frame.schemas), ()
                if not raw.num_rows:
                    continue
            size += carried_bytes(runs)
            if not joined.fits(raw.num_rows, size):
                yield from self._decode(joined)
                joined = _Joined()
            commit_us = raw.column("commit_ts")[-1].as_py() if raw.num_rows else 0
            marker = frame.marker
            joined.pieces.append(_Piece(piece, marker.high, commit_us, marker.logged_us))
            joined.add(raw, frame.schemas, runs, size)
        if joined:
            yield from self._decode(joined)

    def _decode(self, joined: _Joined) -> Iterator[tuple[list[_Piece], pa.RecordBatch]]:
        rows = joined.raw_rows()
        if self._table is not None:
            tables = self._table.decode(rows.raw, rows.schemas)
            yield from ((joined.pieces, table) for table in tables)
            return
        wanted = self._options.wanted
        yield (
            joined.pieces,
            decode_carefully(rows.raw, rows.schemas, annotations=rows.annotations, wanted=wanted),
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_view": None}


@dataclass(frozen=True)
class _Piece:
    """A slice with what its marker must say of its batch."""

    slice: LogSlice
    high: Cursor
    commit_us: int
    logged_us: int


class _Joined(JoinedRows):
    """Slices that are decoded at once, with what their markers need."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[_Piece] = []


def _bounded(changes: pa.RecordBatch, partition: LogPartition) -> pa.RecordBatch:
    """The changes within the partition's bounds, where it has some."""
    if partition.ceiling is not None:
        changes = changes.slice(0, prefix_below(changes, partition.ceiling))
    if partition.floor is not None:
        changes = changes.slice(prefix_below(changes, partition.floor))
    return changes


def _with_tables(markers: Iterable[SliceMarker], changes: pa.RecordBatch) -> Iterator[SliceMarker]:
    """The markers of these changes, which name their tables."""
    tables = _tables(changes)
    return (replace(marker, tables=tables) for marker in markers)


def _tables(changes: pa.RecordBatch) -> tuple[tuple[str, str], ...] | None:
    """Schema and name of the tables that the changes may be of: more than there are, at times."""
    schemas, names = (
        changes.column(name).unique().to_pylist() for name in ("table_schema", "table_name")
    )
    few = len(schemas) * len(names) <= _TABLES_NAMED_MAX
    return tuple(product(schemas, names)) if few else None


def _markers(
    partition: LogPartition, pieces: list[_Piece], position: int, changes: pa.RecordBatch
) -> Iterator[SliceMarker]:
    offset = 0
    errors = changes.column("error")
    for piece in pieces:
        rows = piece.slice.stop - piece.slice.start
        yield SliceMarker(
            range_start=partition.range_start,
            range_end=partition.range_end,
            batch_idx=piece.slice.batch_idx,
            part=piece.slice.part,
            parts=piece.slice.parts,
            rows=rows,
            high=piece.high,
            commit_us=piece.commit_us,
            path="",
            position=position,
            offset=offset,
            errors=rows - errors.slice(offset, rows).null_count,
            logged_us=piece.logged_us,
        )
        offset += rows
