"""Rows of one source that wait, in cursor order, with an index by when they are due.

Invariants: a chunk that was kept (``kept``) has a copy of its rows, so that no range of
the log stays in memory for a row that waits. Until then its rows lie where they were decoded: most
of them leave at once. The length counts what was not released; of that ``oldest`` is the lowest
cursor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at
from cdc.eventtime.released import Places, RowSelection, taken
from cdc.eventtime.times import Codes, Times

_INDEX_BYTES = 4 * 8 + 2 * 4
"""Of each row: time, due, order and sorted due; code and lowest place."""


class WaitingRows:
    """Its rows leave in the order in which they are due."""

    def __init__(
        self,
        rows: pa.RecordBatch,
        times: Times,
        due: Times,
        codes: Codes,
        *,
        is_copy: bool = False,
    ) -> None:
        self._rows = rows
        self._times = times
        self._due = due
        self._codes = codes
        self._is_copy = is_copy
        self._order = np.argsort(due, kind="stable")
        self._sorted_due = due[self._order]
        # The lowest place among those that are released at or after each point of the order.
        self._lowest = np.minimum.accumulate(self._order[::-1].astype(np.int32))[::-1]
        self._gone = 0
        self._row_bytes = int(rows.nbytes)

    @classmethod
    def of(
        cls, rows: pa.RecordBatch, times: Times, due: Times, codes: Codes, keep: Places | None
    ) -> WaitingRows:
        """Of the rows those at ``keep``, which rise; all of them without."""
        if keep is None:
            return cls(rows, times, due, codes)
        return cls(taken(rows, keep), times[keep], due[keep], codes[keep], is_copy=True)

    @classmethod
    def merged(cls, chunks: Sequence[WaitingRows]) -> WaitingRows:
        """A copy of what is left of neighbours, as one."""
        left = [(chunk, np.sort(chunk._order[chunk._gone :])) for chunk in chunks]
        parts = [taken(chunk._rows, at) for chunk, at in left]
        return cls(
            parts[0] if len(parts) == 1 else pa.concat_batches(parts),
            np.concatenate([chunk._times[at] for chunk, at in left]),
            np.concatenate([chunk._due[at] for chunk, at in left]),
            np.concatenate([chunk._codes[at] for chunk, at in left]),
            is_copy=True,
        )

    def kept(self) -> WaitingRows:
        """What is left, as it waits: in memory of its own, most of which is of rows that wait."""
        if 2 * self._gone > len(self._order):
            return WaitingRows.merged([self])
        if not self._is_copy:
            # Also for one batch the buffers of the result are new ones, and no longer than needed.
            self._rows = pa.concat_batches([self._rows])
            self._times, self._due = self._times.copy(), self._due.copy()
            self._codes, self._is_copy = self._codes.copy(), True
        return self

    def __len__(self) -> int:
        return len(self._order) - self._gone

    @property
    def bytes(self) -> int:
        """Memory that it takes, also by what was released and is still here."""
        return self._row_bytes + len(self._due) * _INDEX_BYTES

    @property
    def oldest(self) -> Cursor:
        """Of a chunk that has rows left."""
        return cursor_at(self._rows, int(self._lowest[self._gone]))

    @property
    def max_due(self) -> int:
        return int(self._sorted_due[-1])

    def left_codes(self) -> Codes:
        return self._codes[self._order[self._gone :]]

    def release(self, watermark: int, source: int) -> RowSelection | None:
        """Take out what is due at or below the watermark, in that order."""
        until = int(np.searchsorted(self._sorted_due, watermark, "right"))
        if until <= self._gone:
            return None
        places = self._order[self._gone : until]
        self._gone = until
        return self._part(places, source)

    def within(self, start: int, end: int, source: int) -> RowSelection | None:
        """Of what is left those with ``start <= time < end``, by due; they stay."""
        left = self._order[self._gone :]
        times = self._times[left]
        places = left[(times >= start) & (times < end)]
        return self._part(places, source) if len(places) else None

    def _part(self, places: Places, source: int) -> RowSelection:
        return RowSelection(self._rows, self._times, self._due, self._codes, source, places)
