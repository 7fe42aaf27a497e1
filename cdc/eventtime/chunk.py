"""Rows of one source that wait, in cursor order, with an index by when they are due.

What must always hold: the rows are a copy of their own, so that no file of the log stays mapped for
a row that waits. The length counts what was not released; of that ``oldest`` is the lowest cursor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.eventtime.released import Part, Places, gathered, taken
from cdc.eventtime.times import Codes, Times

_INDEX_BYTES = 4 * 8 + 2 * 4
"""Of each row: time, due, order and sorted due; code and lowest place."""


class Chunk:
    """Its rows leave in the order in which they are due."""

    def __init__(self, rows: pa.RecordBatch, times: Times, due: Times, codes: Codes) -> None:
        self._rows = rows
        self._times = times
        self._due = due
        self._codes = codes
        self._order = np.argsort(due, kind="stable")
        self._sorted_due = due[self._order]
        # The lowest place among those that are released at or after each point of the order.
        self._lowest = np.minimum.accumulate(self._order[::-1].astype(np.int32))[::-1]
        self._gone = 0
        self._row_bytes = int(rows.nbytes)

    @classmethod
    def copied(
        cls, rows: pa.RecordBatch, times: Times, due: Times, codes: Codes, keep: Places | None
    ) -> Chunk:
        """Of the rows those at ``keep``, which rise; all of them without."""
        if keep is None:
            # Also for one batch the buffers of the result are new ones, and no longer than needed.
            return cls(pa.concat_batches([rows]), times.copy(), due.copy(), codes.copy())
        return cls(taken(rows, keep), times[keep], due[keep], codes[keep])

    @classmethod
    def merged(cls, chunks: Sequence[Chunk]) -> Chunk:
        """What is left of neighbours, as one."""
        rest = gathered([chunk._part(np.sort(chunk._order[chunk._gone :]), 0) for chunk in chunks])
        assert rest is not None
        return cls(rest.rows, rest.times, rest.due, rest.codes)

    def __len__(self) -> int:
        return len(self._order) - self._gone

    @property
    def bytes(self) -> int:
        """Memory that it takes, also by what was released and is still here."""
        return self._row_bytes + len(self._due) * _INDEX_BYTES

    @property
    def wasteful(self) -> bool:
        """Whether more than half of it was released."""
        return 2 * self._gone > len(self._order)

    @property
    def oldest(self) -> Cursor:
        """Of a chunk that has rows left."""
        at = int(self._lowest[self._gone])
        lsn, idx = self._rows.column("commit_lsn"), self._rows.column("commit_idx")
        return Cursor(lsn[at].as_py(), idx[at].as_py())

    @property
    def max_due(self) -> int:
        return int(self._sorted_due[-1])

    def left_codes(self) -> Codes:
        return self._codes[self._order[self._gone :]]

    def release(self, watermark: int, source: int) -> Part | None:
        """Take out what is due at or below the watermark, in that order."""
        until = int(np.searchsorted(self._sorted_due, watermark, "right"))
        if until <= self._gone:
            return None
        places = self._order[self._gone : until]
        self._gone = until
        return self._part(places, source)

    def within(self, start: int, end: int, source: int) -> Part | None:
        """Of what is left those with ``start <= time < end``, by due; they stay."""
        left = self._order[self._gone :]
        times = self._times[left]
        places = left[(times >= start) & (times < end)]
        return self._part(places, source) if len(places) else None

    def _part(self, places: Places, source: int) -> Part:
        return Part(self._rows, self._times, self._due, self._codes, source, places)
