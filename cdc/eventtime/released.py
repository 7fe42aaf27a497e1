"""Rows that leave the buffer, or were late, with what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.eventtime.times import Codes, Times

Places = NDArray[np.intp]
Sources = NDArray[np.int16]
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True)
class Released:
    """Never empty; every column has one entry a row."""

    rows: pa.RecordBatch
    times: Times  # NO_TIME for a change that has none
    due: Times
    codes: Codes  # the partition, -1 for none
    sources: Sources  # place in the sources that the buffer was made with

    def __len__(self) -> int:
        return len(self.due)


@dataclass(frozen=True)
class Part:
    """Some rows of one source: those at ``places`` of columns that have more."""

    rows: pa.RecordBatch
    times: Times
    due: Times
    codes: Codes
    source: int
    places: Places


def gathered(parts: Sequence[Part]) -> Released | None:
    """The rows of all parts, one part after the other; None if there are no parts."""
    return _gathered(parts, None)


def gathered_by_due(parts: Sequence[Part]) -> Released | None:
    """The rows of all parts by due; ties stay in the order of parts and of places."""
    if len(parts) <= 1:
        # A merge of one is a sort, and mostly there is nothing left to sort.
        due = parts[0].due[parts[0].places] if parts else np.empty(0, np.int64)
        if not (due[1:] < due[:-1]).any():
            return _gathered(parts, None)
    due = np.concatenate([part.due[part.places] for part in parts])
    return _gathered(parts, np.argsort(due, kind="stable"))


def _gathered(parts: Sequence[Part], order: Places | None) -> Released | None:
    if not parts:
        return None

    def whole(columns: Sequence[NDArray[_Number]]) -> NDArray[_Number]:
        joined = columns[0] if len(columns) == 1 else np.concatenate(columns)
        return joined if order is None else joined[order]

    places: list[Places] = []
    batches: list[pa.RecordBatch] = []
    before = 0
    for part in parts:
        # To copy a whole batch is cheaper than to pick most of its rows twice.
        dense = len(parts) == 1 or 2 * len(part.places) >= part.rows.num_rows
        batches.append(part.rows if dense else taken(part.rows, part.places))
        places.append((part.places if dense else np.arange(len(part.places))) + before)
        before += batches[-1].num_rows
    rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    return Released(
        taken(rows, whole(places)),
        whole([part.times[part.places] for part in parts]),
        whole([part.due[part.places] for part in parts]),
        whole([part.codes[part.places] for part in parts]),
        whole([np.full(len(part.places), part.source, np.int16) for part in parts]),
    )


def taken(rows: pa.RecordBatch, places: Places) -> pa.RecordBatch:
    """A copy of the rows at ``places``. Columns without a value, of which changes have several,
    are not looked at row by row."""
    at = pa.array(places)
    columns = [
        pa.nulls(len(places), column.type) if column.null_count == len(column) else column.take(at)
        for column in rows.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)
