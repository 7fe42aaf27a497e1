"""Decoded rows that pass through Spark, with the markers of their slices among them.

Executors on other machines share no memory with each other, so there rows go by value. A partition
yields its rows and behind them one more, whose column ``marker`` holds the markers of all its
slices: a partition that came without that row is missed by ``Reorder``, whatever it brought.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import pyarrow as pa

from spark_pipeline.slices.exchange import SliceMarker, markers_from_arrow, markers_to_arrow

MARKER = "marker"


def marked_schema(rows: pa.Schema) -> pa.Schema:
    """What a partition yields whose rows are of this schema."""
    return rows.append(pa.field(MARKER, pa.binary()))


def marked(
    decoded: Iterable[tuple[Iterable[SliceMarker], pa.RecordBatch]], rows: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The decoded rows as they come, then the row with all their markers."""
    schema = marked_schema(rows)
    markers: list[SliceMarker] = []
    for own, changes in decoded:
        markers += own
        nothing = pa.nulls(changes.num_rows, pa.binary())
        yield pa.RecordBatch.from_arrays([*changes.columns, nothing], schema=schema)
    neutral = [_neutral(field) for field in rows]
    packed = pa.array([_pack(markers)], pa.binary())
    yield pa.RecordBatch.from_arrays([*neutral, packed], schema=schema)


def markers_in(packed: pa.Table) -> list[SliceMarker]:
    """The markers of a micro-batch, from the only column of ``packed``."""
    return list(chain.from_iterable(map(_unpack, packed.column(0))))


def _pack(markers: Sequence[SliceMarker]) -> bytes:
    batch = markers_to_arrow(markers)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(stream.getvalue().to_pybytes())


def _unpack(packed: pa.Scalar) -> list[SliceMarker]:
    return markers_from_arrow(pa.ipc.open_stream(packed.as_buffer()).read_all())


def _neutral(field: pa.Field) -> pa.Array:
    """One value that is no change's: null, or where that may not be, zero or no text."""
    if field.nullable:
        return pa.nulls(1, field.type)
    return pa.array(["" if pa.types.is_string(field.type) else 0]).cast(field.type)
