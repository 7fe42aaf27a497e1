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
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import SparkSession

from cdc.backfill.overtaken import Remains
from cdc.cursor import Cursor
from cdc.decoding.format import Wanted
from cdc.decoding.isolate import decode_carefully
from cdc.log.frame import Frame, Marker
from cdc.state.backfill_chunks import Chunk, PieceDone
from cdc.trace.records import DeliveryTiming
from spark_pipeline.delivery.deliver import Share, deliver_changes
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.delivery.verdicts import leave_verdicts
from spark_pipeline.expressions.evaluate import verdicts
from spark_pipeline.slices.exchange import SliceMarker
from spark_pipeline.slices.raw_rows import RawRows


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of a chunk at their place; it stands in for a ``DecodedRange``."""

    chunk: Chunk
    place: Cursor
    count: int  # of numbers that it takes, dropped rows included
    remains: Remains
    decoded: Sequence[pa.RecordBatch] | None  # all its rows, dropped ones included; None: not yet
    schemas: Mapping[int, bytes]
    wanted: Wanted
    history: int
    reload: int | None = None  # whose shadow its rows are for
    repeated: bool = False  # whether some of it may have been sent before

    @cached_property
    def raw(self) -> pa.RecordBatch:
        """What goes out, with its cursors."""
        return self._placed(self.remains.rows, self.remains.ordinals)

    @cached_property
    def _decoded_here(self) -> pa.RecordBatch | None:
        """What goes out, if it was not decoded: also a merged row is not what was read."""
        if self.decoded is not None and not self.remains.merged:
            return None
        return decode_carefully(self.raw, self.schemas, wanted=self.wanted)

    def changes(self, start: Cursor, end: Cursor) -> Iterator[pa.RecordBatch]:
        """What goes out between two cursors, and maybe more, in parts."""
        if (rows := self._decoded_here) is not None:
            yield rows
            return
        assert self.decoded is not None
        first = 0
        for part in self.decoded:
            last = first + part.num_rows
            if start < self._at(last) and self._at(first) < end:
                bounds = np.searchsorted(self.remains.ordinals, (first, last))
                ordinals = self.remains.ordinals[slice(*bounds)]
                left = part
                if len(ordinals) < part.num_rows:
                    left = part.take(pa.array(ordinals - first))
                yield self._placed(left, ordinals)
            first = last

    def _at(self, ordinal: int) -> Cursor:
        return Cursor(self.place.lsn, self.place.idx + ordinal)

    def _placed(self, rows: pa.RecordBatch, ordinals: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Rows with their cursors."""
        cursors = {
            "commit_lsn": pa.array(np.full(rows.num_rows, self.place.lsn, np.int64)),
            "commit_idx": pa.array(self.place.idx + ordinals),
        }
        for name, column in cursors.items():
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(at, rows.schema.field(at), column)
        return rows

    @property
    def high(self) -> Cursor:
        return self._at(self.count)

    @property
    def rows(self) -> int:
        return len(self.remains.ordinals)

    @property
    def timing(self) -> DeliveryTiming:
        """Rows that exist already were committed and logged at no time that is known."""
        return DeliveryTiming()

    @cached_property
    def slices(self) -> Sequence[SliceMarker]:
        rows = self._decoded_here
        return [
            SliceMarker(
                range_start=0, range_end=1, batch_idx=0, part=0, parts=1, rows=self.rows,
                high=self.high, commit_us=0, path="", position=0, offset=0,
                errors=0 if rows is None else rows.num_rows - rows.column("error").null_count,
            )
        ]  # fmt: skip

    def done_at(self, cursor: Cursor) -> PieceDone:
        """What is done of its chunk if the piece ends at a cursor within it, or at its end."""
        chunk, left, rows = self.chunk, self.remains, cursor.idx - self.place.idx
        return PieceDone(
            chunk.backfill,
            chunk.number,
            rows=rows,
            dropped=rows - int(np.searchsorted(left.ordinals, rows)),
            merged=sum(at < rows for at in left.merged),
        )

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
        return self._piece.remains.read.nbytes

    def deliver(self, share: Share) -> Outcome:
        return deliver_changes(share, self._piece.changes(share.start, share.end))

    def changes(self, _slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        yield from self._piece.changes(self._piece.place, self._piece.high)


class PieceLog:
    """A piece where dead letters look for the messages of changes: as one frame of a log."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece

    def seek(self, _cursor: Cursor) -> int:
        return 0

    def frames(self, _start: int, _end: int) -> Iterator[Frame]:
        piece = self._piece
        yield Frame(Marker(0, piece.rows, piece.place, piece.high, 0), piece.raw, piece.schemas, ())
