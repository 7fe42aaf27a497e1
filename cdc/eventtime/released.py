"""Rows that leave the buffer, or were late, with what is known of each.

The rows themselves stay in the batches that they came in until a piece of them is asked for: a
release may be as large as the buffer, and a copy of all of it would cost more than ordering it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.eventtime.times import Codes, Times

Places = NDArray[np.intp]
Sources = NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class Released:
    """Never empty; every column has one entry per row."""

    batches: Sequence[pa.RecordBatch]
    places: Places  # of each row, in all batches one after the other
    times: Times  # NO_TIME for a change that has none
    due: Times
    codes: Codes  # the partition, -1 for none
    sources: Sources  # place in the sources that the buffer was made with

    def __len__(self) -> int:
        return len(self.due)

    @property
    def rows(self) -> pa.RecordBatch:
        """All rows, as one batch."""
        return self.piece(0, len(self))

    def piece(self, start: int, stop: int) -> pa.RecordBatch:
        """The rows ``[start, stop)`` as one batch, without a copy where they lie side by side."""
        places = self.places[start:stop]
        if len(self.batches) == 1:
            return _rows_at(self.batches[0], places)
        ends = np.cumsum([batch.num_rows for batch in self.batches])
        batch_of = np.searchsorted(ends, places, "right")
        found: list[pa.RecordBatch] = []
        order: list[Places] = []
        for number in np.unique(batch_of).tolist():
            batch, at = self.batches[number], np.flatnonzero(batch_of == number)
            found.append(_rows_at(batch, places[at] - int(ends[number]) + batch.num_rows))
            order.append(at)
        if len(found) == 1:
            return found[0]
        rows, now_at = pa.concat_batches(found), np.concatenate(order)
        return rows if _is_run(now_at) else taken(rows, np.argsort(now_at))


@dataclass(frozen=True, eq=False)
class RowSelection:
    """Some rows of one source: those at ``places`` of columns that have more."""

    rows: pa.RecordBatch
    times: Times
    due: Times
    codes: Codes
    source: int
    places: Places


def gathered(parts: Sequence[RowSelection]) -> Released | None:
    """The rows of all parts, one part after the other; None if there are no parts."""
    if not parts:
        return None
    before = np.cumsum([0, *(part.rows.num_rows for part in parts)])
    return Released(
        [part.rows for part in parts],
        np.concatenate([part.places + first for part, first in zip(parts, before, strict=False)]),
        np.concatenate([part.times[part.places] for part in parts]),
        np.concatenate([part.due[part.places] for part in parts]),
        np.concatenate([part.codes[part.places] for part in parts]),
        np.concatenate([np.full(len(part.places), part.source, np.int16) for part in parts]),
    )


def gathered_by_due(parts: Sequence[RowSelection]) -> Released | None:
    """The rows of all parts, each in the order of due already, as one; ties stay in the order of
    parts. None if there are no parts."""
    found = gathered(parts)
    if found is None or len(parts) == 1:
        return found
    order = np.argsort(found.due, kind="stable")
    return Released(
        found.batches,
        found.places[order],
        found.times[order],
        found.due[order],
        found.codes[order],
        found.sources[order],
    )


def both(one: Released | None, other: Released | None) -> Released | None:
    """The rows of the one, then those of the other."""
    if one is None or other is None:
        return one or other
    before = sum(batch.num_rows for batch in one.batches)
    return Released(
        [*one.batches, *other.batches],
        np.concatenate([one.places, other.places + before]),
        np.concatenate([one.times, other.times]),
        np.concatenate([one.due, other.due]),
        np.concatenate([one.codes, other.codes]),
        np.concatenate([one.sources, other.sources]),
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


def _rows_at(rows: pa.RecordBatch, places: Places) -> pa.RecordBatch:
    return rows.slice(places[0], len(places)) if _is_run(places) else taken(rows, places)


def _is_run(places: Places) -> bool:
    """Whether each place is the one behind the last."""
    return bool(places[-1] - places[0] == len(places) - 1 and (np.diff(places) == 1).all())
