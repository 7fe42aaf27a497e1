"""Cursors as two columns of numbers, ``commit_lsn`` and ``commit_idx``, in Arrow and in NumPy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.cursor import Cursor

Ints = NDArray[np.int64]


def cursor_columns(rows: pa.RecordBatch) -> tuple[Ints, Ints]:
    """The LSNs and the numbers of the rows."""
    return rows.column("commit_lsn").to_numpy(), rows.column("commit_idx").to_numpy()


def cursor_at(rows: pa.RecordBatch, at: int) -> Cursor:
    """The cursor of the row at a position; negative counts from the end."""
    return Cursor(rows.column("commit_lsn")[at].as_py(), rows.column("commit_idx")[at].as_py())


def at_or_above(lsn: Ints, idx: Ints, cursor: Cursor) -> NDArray[np.bool_]:
    """Which rows, in any order, are not below a cursor."""
    found: NDArray[np.bool_] = (lsn > cursor.lsn) | ((lsn == cursor.lsn) & (idx >= cursor.idx))
    return found


def count_below(lsn: Ints, idx: Ints, cursor: Cursor) -> int:
    """How many rows, which are in cursor order, are below a cursor."""
    first, last = (int(np.searchsorted(lsn, cursor.lsn, side)) for side in ("left", "right"))
    return first + int(np.searchsorted(idx[first:last], cursor.idx, "left"))


def prefix_below(rows: pa.RecordBatch, cursor: Cursor) -> int:
    """How many rows, which are in cursor order, are below a cursor."""
    return count_below(*cursor_columns(rows), cursor)


def prefix_at_or_below(rows: pa.RecordBatch, cursor: Cursor) -> int:
    """How many rows, which are in cursor order, are at or below a cursor."""
    return prefix_below(rows, Cursor(cursor.lsn, cursor.idx + 1))


def in_cursor_order(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows sorted by cursor."""
    lsn, idx = cursor_columns(rows)
    if bool(np.all((lsn[1:] > lsn[:-1]) | ((lsn[1:] == lsn[:-1]) & (idx[1:] >= idx[:-1])))):
        return rows
    return rows.take(pa.array(np.lexsort((idx, lsn))))
