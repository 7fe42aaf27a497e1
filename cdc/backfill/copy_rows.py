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
    rows = CopiedRows(text, count)
    return [rows.column(at) for at in range(count)]


class CopiedRows:
    """Whole lines of COPY text, cut into ``count`` columns; a column is copied when asked for."""

    def __init__(self, text: bytes | pa.Buffer, count: int) -> None:
        self._buffer, self._count = pa.py_buffer(text), count
        data = np.frombuffer(text, np.uint8)
        self._stops = np.flatnonzero((data == _LINE_END) | (data == _TAB))
        self._starts = np.empty_like(self._stops)
        self._starts[:1], self._starts[1:] = 0, self._stops[:-1] + 1
        self._null: npt.NDArray[np.bool_] | None = None  # of each cell
        self._escaped: frozenset[int] = frozenset()  # the columns that have backslashes
        # Most texts have none: no null, and nothing to undo. To search them is the fastest way.
        if b"\\" in text if isinstance(text, bytes) else bool((data == _BACKSLASH).any()):
            self._undo(data)

    def __len__(self) -> int:
        # A row without columns is an empty line.
        return len(self._stops) // max(1, self._count)

    def column(self, at: int) -> pa.BinaryArray:
        """The values of a column, null where the row has null."""
        of_column = slice(at, None, self._count)
        starts, stops = self._starts[of_column], self._stops[of_column]
        if self._null is None:
            return gather(self._buffer, starts, stops)
        null = self._null[of_column]
        column = gather(self._buffer, starts, np.where(null, starts, stops))
        if null.any():
            column = only_where(column, ~null)
        return _plain(column) if at in self._escaped else column

    def lines(self) -> pa.BinaryArray:
        """The lines, each with its end, over the text itself."""
        return _over(self._buffer, np.concatenate([np.zeros(1, np.int64), self._line_stops + 1]))

    def texts(self) -> pa.StringArray | None:
        """The lines without their ends; None if they are not UTF-8."""
        stops = self._line_stops
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1] + 1])[: len(stops)]
        try:
            return gather(self._buffer, starts, stops).cast(pa.string())
        except pa.ArrowInvalid:
            return None

    @property
    def _line_stops(self) -> npt.NDArray[np.int64]:
        columns = max(1, self._count)
        return self._stops[columns - 1 :: columns]

    def _undo(self, data: npt.NDArray[np.uint8]) -> None:
        """Find the nulls, and the columns whose values were written with backslashes."""
        backslashes = np.flatnonzero(data == _BACKSLASH)
        cells, starts = np.searchsorted(self._stops, backslashes), self._starts
        null = np.zeros(len(self._stops), bool)
        null[cells] = (self._stops[cells] - starts[cells] == 2) & (data[starts[cells] + 1] == _N)
        escaped = np.unique(cells[~null[cells]] % max(1, self._count))
        self._null, self._escaped = null, frozenset(map(int, escaped))


def _plain(values: pa.BinaryArray) -> pa.BinaryArray:
    """Without the backslashes that COPY added."""
    for written, meant in _ESCAPES:
        values = pc.replace_substring(values, written, meant)
    return values


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


def _over(
    data: pa.Buffer | npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]
) -> pa.BinaryArray:
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
