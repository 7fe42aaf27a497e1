"""Whole-column work that several sinks share: cutting a batch, taking its text.

Nothing here loops over messages, and nothing builds a Python object per message.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROUTE, MessageBatch
from cdc.decoding.shapes import Parts


def message_bytes(rows: pa.RecordBatch, parts: Parts) -> npt.NDArray[np.int64]:
    """About how many bytes each message takes once it is made of its ``parts``."""
    total = np.full(rows.num_rows, parts.fixed_bytes, dtype=np.int64)
    for name in parts.columns:
        lengths = pc.fill_null(pc.binary_length(rows.column(name)), 0)
        total += lengths.to_numpy(zero_copy_only=False)
    return total


def bytes_bound(rows: pa.RecordBatch, parts: Parts) -> int:
    """No fewer bytes than all messages of these parts take together, without looking at any."""
    texts = sum(rows.column(name).nbytes for name in parts.columns)
    return int(texts + rows.num_rows * parts.fixed_bytes)


def pieces(
    batch: MessageBatch, parts: Parts, *, messages_max: int, bytes_max: int
) -> Iterator[tuple[MessageBatch, int]]:
    """Cut a batch, in order, within both bounds; with each piece, about how many bytes it holds.

    A message larger than ``bytes_max`` comes as a piece of its own.
    """
    if not len(batch):
        return
    if len(batch) <= messages_max and (bound := bytes_bound(batch.rows, parts)) <= bytes_max:
        yield batch, bound
        return
    ends = np.cumsum(message_bytes(batch.rows, parts))
    start, before = 0, 0
    while start < len(batch):
        fits = int(np.searchsorted(ends, before + bytes_max, side="right"))
        end = max(start + 1, min(fits, start + messages_max))
        after = int(ends[end - 1])
        yield batch.slice(start, end - start), after - before
        start, before = end, after


def by_route(batch: MessageBatch) -> Iterator[tuple[str | None, MessageBatch]]:
    """Cut a batch, in order, where the route changes; None is the sink's own place."""
    if ROUTE not in batch.rows.schema.names:
        yield None, batch
        return
    runs = pc.run_end_encode(batch.rows.column(ROUTE))
    start = 0
    for route, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        yield route, batch.slice(start, end - start)
        start = end


def text_bytes(column: pa.StringArray) -> pa.Buffer:
    """The texts of a freshly computed column, one after another, without a copy."""
    count = len(column)
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)
    first, last = int(offsets[column.offset]), int(offsets[column.offset + count])
    return column.buffers()[2].slice(first, last - first)
