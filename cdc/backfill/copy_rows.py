"""Text of COPY as raw rows: what a change would bring of the same rows, byte for byte. Pure.

COPY writes a row per line, a tab between columns, ``\\N`` for null, and a backslash before what
would be mistaken for one of these. pgoutput writes the same texts with their lengths. So a row read
by COPY becomes a message of the kind ``R`` with one new tuple, and everything that reads messages
of the log, decode first of all, reads it like an insert.

Whole columns are worked on; no step loops over rows.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import gather, offsets_of, only_where
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import DecodeError

_TAB, _LINE_END, _BACKSLASH, _N = (ord(each) for each in "\t\n\\N")
# A text of Postgres has no zero byte, so one can stand for a backslash while the rest is undone.
_ESCAPES = (
    ("\\\\", "\0"), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\\b", "\b"), ("\\f", "\f"),
    ("\\v", "\v"), ("\0", "\\"),
)  # fmt: skip


def columns_of(text: bytes | pa.Buffer, count: int) -> list[pa.BinaryArray]:
    """The columns of whole lines of COPY text, null where the row has null."""
    if not len(text) or not count:
        return [pa.array([], pa.binary()) for _ in range(count)]
    buffer, data = pa.py_buffer(text), np.frombuffer(text, np.uint8)
    stops = np.flatnonzero((data == _TAB) | (data == _LINE_END))
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1] + 1])
    backslashes = np.flatnonzero(data == _BACKSLASH)
    if not len(backslashes):  # as most texts have it: no null, and nothing to undo
        return [gather(buffer, starts[at::count], stops[at::count]) for at in range(count)]
    cells = np.searchsorted(stops, backslashes)
    null = np.zeros(len(stops), bool)
    null[cells] = (stops[cells] - starts[cells] == 2) & (data[starts[cells] + 1] == _N)
    escaped = {int(at) for at in np.unique(cells[~null[cells]] % count)}
    stops = np.where(null, starts, stops)
    columns = []
    for at in range(count):
        column = gather(buffer, starts[at::count], stops[at::count])
        if null[at::count].any():
            column = only_where(column, ~null[at::count])
        columns.append(_plain(column) if at in escaped else column)
    return columns


def _plain(values: pa.BinaryArray) -> pa.BinaryArray:
    """Without the backslashes that COPY added."""
    for written, meant in _ESCAPES:
        values = pc.replace_substring(values, written, meant)
    return values


def copied_lines(text: bytes) -> pa.BinaryArray:
    """Whole lines of COPY text, each with its end, over the text itself."""
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == _LINE_END) + 1
    return _over(text, np.concatenate([np.zeros(1, np.int64), ends]))


def lines_of(text: bytes) -> pa.StringArray | None:
    """The lines of whole lines of COPY text; None if they are not UTF-8."""
    stops = np.flatnonzero(np.frombuffer(text, np.uint8) == _LINE_END)
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1] + 1])
    try:
        return gather(pa.py_buffer(text), starts, stops).cast(pa.string())
    except pa.ArrowInvalid:
        return None


def raw_rows(
    columns: list[pa.BinaryArray],
    *,
    oid: int,
    schema_id: int,
    read_us: int,
    kind: bytes = b"R",
    tag: bytes = b"N",
) -> pa.RecordBatch:
    """RAW_SCHEMA rows of one kind with one tuple; they get cursors when they are delivered."""
    count = len(columns[0]) if columns else 0
    zeros = pa.array(np.zeros(count, np.int64))
    head = struct.pack(">cIcH", kind, oid, tag, len(columns))
    arrays = [
        zeros,
        zeros,
        pa.array(np.full(count, read_us, np.int64)),
        zeros,
        pa.array(np.full(count, kind[0], np.uint8)),
        pa.array(np.full(count, oid, np.uint32)),
        pa.array(np.full(count, schema_id, np.uint64)),
        _payloads(head, columns, count),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=RAW_SCHEMA)


def _payloads(head: bytes, columns: list[pa.BinaryArray], count: int) -> pa.BinaryArray:
    """The messages: ``head``, then of each column its kind, its length and its text."""
    parts: list[pa.Array | pa.Scalar] = [pa.scalar(head, pa.binary())]
    for column in columns:
        parts += (_prefixes(column), pc.fill_null(column, b""))
    if sum(part.nbytes for part in parts if isinstance(part, pa.Array)) >= 1 << 31:
        raise DecodeError(
            f"{count} rows do not fit into one Arrow batch", fix="lower the chunk's size"
        )
    return pc.binary_join_element_wise(*parts, b"")


def _prefixes(column: pa.BinaryArray) -> pa.BinaryArray:
    """``t`` and the length of a value in four bytes; ``n`` for null."""
    offsets = offsets_of(column).astype(np.int64)
    texts = column.is_valid().to_numpy(zero_copy_only=False)
    cells = np.zeros((len(column), 5), np.uint8)
    cells[:, 0] = ord("t")
    cells[:, 1:] = (offsets[1:] - offsets[:-1]).astype(">u4").view(np.uint8).reshape(-1, 4)
    if texts.all():
        return _over(cells.reshape(-1), np.arange(0, 5 * len(column) + 1, 5))
    keep = np.ones((len(column), 5), bool)
    keep[~texts, 1:] = False
    cells[~texts, 0] = ord("n")
    ends = np.cumsum(np.where(texts, 5, 1))
    return _over(cells[keep], np.concatenate(([0], ends)))


def _over(data: bytes | npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> pa.BinaryArray:
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
