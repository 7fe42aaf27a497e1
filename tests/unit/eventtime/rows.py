"""Rows to wait, small enough to be looked at one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.eventtime import Codes, Times
from cdc.eventtime.released import Released


class Row(NamedTuple):
    """A change as the tests see it; ``source`` is a place among the sources."""

    source: int
    cursor: Cursor
    time: int
    code: int


def batch(rows: Sequence[Row]) -> tuple[pa.RecordBatch, Times, Codes]:
    """What a source hands over; every row carries its own name, so that a mix-up is seen."""
    columns = {
        "commit_lsn": pa.array([row.cursor.lsn for row in rows], pa.int64()),
        "commit_idx": pa.array([row.cursor.idx for row in rows], pa.int64()),
        "record": pa.array([name(row) for row in rows], pa.string()),
    }
    times = np.array([row.time for row in rows], np.int64)
    return pa.RecordBatch.from_pydict(columns), times, np.array([r.code for r in rows], np.int32)


def name(row: Row) -> str:
    return f"{row.source} {row.cursor} {row.time}"


def rows_in(released: Released | None) -> list[Row]:
    """The rows of a release, whose columns must belong together."""
    if released is None:
        return []
    assert len(released) > 0
    cursors = zip(*(released.rows.column(at).to_pylist() for at in (0, 1)), strict=True)
    columns = (released.sources.tolist(), cursors, released.times.tolist(), released.codes.tolist())
    rows = [Row(of, Cursor(*at), time, code) for of, at, time, code in zip(*columns, strict=True)]
    assert released.rows.column("record").to_pylist() == [name(row) for row in rows]
    assert len(released.due) == len(rows)
    cuts = [0, len(rows) // 3, len(rows) // 2, len(rows)]
    pieces = [released.piece(a, b) for a, b in pairwise(cuts) if a < b]
    assert pa.Table.from_batches(pieces) == pa.Table.from_batches([released.rows])
    return rows
