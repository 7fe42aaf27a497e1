"""Where a ``schema_change`` message stands among the changes. Pure.

It needs a cursor of its own that no change has, that is the same however often the log is read,
and that a sink which goes by cursors still takes. Commit LSNs are multiples of eight, so the places
next to one are free: ``lsn - 1``, directly before the transaction of the version's first row, is
where it belongs, and ``lsn + 1``, directly behind it, is where it goes when something of the
transaction came before it or may have been sent already. Numbers count from 1 there: a gap message
may have 0.

What must always hold: the answer depends only on the batch that holds the row, which is the same on
every replay, and on cursors that move in the transaction that records the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cdc.cursor import Cursor
from cdc.log.frame import Frame

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchRows:
    """Of a batch what a decision needs, copied, so that its file need not stay open."""

    lsn: Ints
    idx: Ints
    relation: Ints
    commit_us: Ints
    schemas: Mapping[int, bytes]

    @classmethod
    def of(cls, frame: Frame) -> BatchRows:
        lsn, idx, relation, commit_us = (
            frame.raw.column(name).to_numpy().astype(np.int64)
            for name in ("commit_lsn", "commit_idx", "relation", "commit_ts")
        )
        return cls(lsn, idx, relation, commit_us, dict(frame.schemas))

    def committed_us(self, lsn: int) -> int:
        """When the transaction at ``lsn``, which has rows here, was committed."""
        return int(self.commit_us[np.searchsorted(self.lsn, lsn)])


def place(rows: BatchRows, relation: int, since: Cursor, standing: Collection[Cursor]) -> int:
    """The LSN of the message for a version of ``relation`` whose first row stands at ``since``.

    ``rows`` are the batch with that row; ``standing`` are the cursors of the consumers.
    """
    first = int(np.searchsorted(rows.lsn, since.lsn))
    begins_here = first > 0 or int(rows.idx[first]) == 0
    earlier = (rows.lsn == since.lsn) & (rows.idx < since.idx)
    touched = bool((rows.relation[earlier] == relation).any())
    # A log read again from the slot is cut anew: somebody may stand in what is now one batch.
    inside = any(Cursor(since.lsn, 0) < cursor <= since for cursor in standing)
    return since.lsn - 1 if begins_here and not touched and not inside else since.lsn + 1


def reaches(cursor: Cursor) -> Cursor:
    """A consumer's cursor as seen from the announcements: where its next range of them begins.

    One at the very beginning of a transaction, as an idle source can give it, lies behind the
    announcements before that transaction, which nobody knew of then.
    """
    return cursor if cursor.idx or not cursor.lsn else Cursor(cursor.lsn - 1, 0)
