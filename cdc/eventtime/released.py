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
_COPIED_MAX = 4_096
"""Rows that are copied in the time that picking any number of them takes to begin."""
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
    """The rows of all parts, one part after the other; None if there are no parts.

    Of a single part that is taken whole the rows are not copied.
    """
    if not parts:
        return None
    batches = [
        part.rows if len(part.places) == part.rows.num_rows else taken(part.rows, part.places)
        for part in parts
    ]
    return _with(_one(batches), parts, None)


def gathered_by_due(parts: Sequence[Part]) -> Released | None:
    """The rows of all parts, each in the order of due already, as one; ties stay in the order of
    parts. None if there are no parts."""
    if not parts:
        return None
    if len(parts) == 1:
        return _with(taken(parts[0].rows, parts[0].places), parts, None)
    batches: list[pa.RecordBatch] = []
    places: list[Places] = []
    before = 0
    for part in parts:
        # To copy a batch whole is cheaper than to pick many of its rows twice, or a few at all.
        whole = part.rows.num_rows <= _COPIED_MAX + 2 * len(part.places)
        batches.append(part.rows if whole else taken(part.rows, part.places))
        places.append((part.places if whole else np.arange(len(part.places))) + before)
        before += batches[-1].num_rows
    order = np.argsort(np.concatenate([part.due[part.places] for part in parts]), kind="stable")
    return _with(taken(_one(batches), np.concatenate(places)[order]), parts, order)


def _with(rows: pa.RecordBatch, parts: Sequence[Part], order: Places | None) -> Released:
    def column(values: list[NDArray[_Number]]) -> NDArray[_Number]:
        joined = values[0] if len(values) == 1 else np.concatenate(values)
        return joined if order is None else joined[order]

    return Released(
        rows,
        column([part.times[part.places] for part in parts]),
        column([part.due[part.places] for part in parts]),
        column([part.codes[part.places] for part in parts]),
        column([np.full(len(part.places), part.source, np.int16) for part in parts]),
    )


def _one(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def taken(rows: pa.RecordBatch, places: Places) -> pa.RecordBatch:
    """A copy of the rows at ``places``. Columns without a value, of which changes have several,
    are not looked at row by row."""
    at = pa.array(places)
    columns = [
        pa.nulls(len(places), column.type) if column.null_count == len(column) else column.take(at)
        for column in rows.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)
