"""A piece of a chunk as a worker delivers it: like a range of the log that is decoded here.

Invariant: the row at ordinal n of a piece has the number ``place.idx + n``, whatever rows before it
were dropped. So the same piece gives the same cursors whenever it is delivered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from cdc.backfill.overtaken import Remains
from cdc.cursor import Cursor
from cdc.decoding.careful import decode_carefully
from cdc.decoding.format import Wanted
from cdc.decoding.raw import SCHEMAS_KEY, decode_schemas
from cdc.log.frame import Frame, Marker
from cdc.state.backfill_chunks import Chunk, PieceDone
from spark_pipeline.delivery.deliver import Share, deliver_changes
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.expressions.evaluate import verdicts
from spark_pipeline.expressions.seen import RawRows
from spark_pipeline.expressions.verdicts import leave_verdicts
from spark_pipeline.feed.exchange import SliceMarker


class ChunkFile:
    """The rows of a chunk, mapped."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as file:
            self._reader = pa.ipc.open_file(file.read_buffer())
        self.schemas = decode_schemas(self._reader.schema.metadata[SCHEMAS_KEY])
        sizes = [
            self._reader.get_batch(at).num_rows for at in range(self._reader.num_record_batches)
        ]
        self._ends = np.cumsum(sizes)

    @property
    def oid(self) -> int:
        """Of the table as its changes name it."""
        (message,) = self.schemas.values()
        return int.from_bytes(message[1:5], "big")

    def rows(self, start: int, count: int) -> pa.RecordBatch:
        """The rows ``[start, start + count)``."""
        parts = []
        at = int(np.searchsorted(self._ends, start, side="right"))
        while count > 0 and at < len(self._ends):
            batch = self._reader.get_batch(at)
            within = start - (int(self._ends[at]) - batch.num_rows)
            part = batch.slice(within, count)
            parts.append(part)
            start, count, at = start + part.num_rows, count - part.num_rows, at + 1
        whole = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        return whole.replace_schema_metadata(None)


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of a chunk at their place; it stands in for a ``DecodedRange``."""

    chunk: Chunk
    place: Cursor
    count: int  # of numbers that it takes, dropped rows included
    remains: Remains
    schemas: Mapping[int, bytes]
    wanted: Wanted
    history: int

    @cached_property
    def raw(self) -> pa.RecordBatch:
        """What goes out, with its cursors."""
        rows = self.remains.rows
        numbers = self.place.idx + self.remains.ordinals
        cursors = {
            "commit_lsn": pa.array(np.full(rows.num_rows, self.place.lsn, np.int64)),
            "commit_idx": pa.array(numbers),
        }
        for name, column in cursors.items():
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(at, rows.schema.field(at), column)
        return rows

    @cached_property
    def changes(self) -> pa.RecordBatch:
        return decode_carefully(self.raw, self.schemas, wanted=self.wanted)

    @property
    def high(self) -> Cursor:
        return Cursor(self.place.lsn, self.place.idx + self.count)

    @property
    def rows(self) -> int:
        return int(self.remains.rows.num_rows)

    @cached_property
    def slices(self) -> Sequence[SliceMarker]:
        errors = self.changes.column("error")
        return [
            SliceMarker(
                range_start=0, range_end=1, batch_idx=0, part=0, parts=1, rows=self.rows,
                high=self.high, commit_us=0, path="", position=0, offset=0,
                errors=len(errors) - errors.null_count,
            )
        ]  # fmt: skip

    @property
    def done(self) -> PieceDone:
        chunk, left = self.chunk, self.remains
        return PieceDone(chunk.backfill, chunk.number, left.dropped, left.merged)

    @property
    def plan(self) -> PiecePlan:
        return PiecePlan(self)

    def judge(self, spark: SparkSession | None, share: Share, scratch: Path) -> Share:
        """The share with what its consumer's expressions, if it has any, say of it."""
        if not share.consumer.expressions:
            return share
        rows = RawRows(self.raw, self.schemas)
        found = verdicts(spark, share.consumer, share.origin, rows, since=share.start)
        path, failed = leave_verdicts(scratch, found)
        return replace(share, verdicts=path, failed=failed)

    def log(self) -> PieceLog:
        return PieceLog(self)


class PiecePlan:
    """Delivers a piece in this process."""

    name = "driver"
    in_driver = True

    def __init__(self, piece: Piece) -> None:
        self._piece = piece

    @property
    def decoded_bytes(self) -> int:
        return int(self._piece.changes.nbytes)

    def deliver(self, share: Share) -> Outcome:
        return deliver_changes(share, self.changes(share.slices))

    def changes(self, _slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        yield self._piece.changes


class PieceLog:
    """A piece where dead letters look for the messages of changes: as one frame of a log."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece

    def seek(self, _cursor: Cursor) -> int:
        return 0

    def frames(self, _start: int, _end: int) -> Iterator[Frame]:
        piece = self._piece
        yield Frame(Marker(0, piece.rows, piece.place, piece.high, 0), piece.raw, piece.schemas, ())
