"""When changes without an event time are due: a delete, a truncate, a null.

Such a change follows its partition: it is due with the latest of the partition's rows before it,
or of the whole source's if it belongs to no partition. Invariant: only rows with a time
count, so what it follows does not depend on how the rows were cut into pieces.
"""

from __future__ import annotations

import numpy as np

from cdc.eventtime.times import NO_TIME, Codes, Times


class HighestDue:
    """The highest due of each partition and of all rows so far, for one source."""

    def __init__(self) -> None:
        self._highest: Times = np.empty(0, np.int64)  # by code
        self._highest_of_all = NO_TIME

    def due(self, codes: Codes, due: Times) -> Times:
        """``due`` with what each row without one (``NO_TIME``) follows; rows in cursor order.

        Still ``NO_TIME`` where nothing stands before it.
        """
        self._grow(int(codes.max(initial=-1)) + 1)
        followers = due == NO_TIME
        filled = self._filled(codes, due, followers) if followers.any() else due
        timed = ~followers & (codes >= 0)
        np.maximum.at(self._highest, codes[timed].astype(np.intp), due[timed])
        self._highest_of_all = max(self._highest_of_all, int(due.max(initial=NO_TIME)))
        return filled

    def _filled(self, codes: Codes, due: Times, followers: np.typing.NDArray[np.bool_]) -> Times:
        of_all = np.maximum(np.maximum.accumulate(due), self._highest_of_all)
        own = np.maximum(_highest_before(codes, due), self._highest[np.maximum(codes, 0)])
        return np.where(followers, np.where(codes >= 0, own, of_all), due)

    def _grow(self, codes: int) -> None:
        more = max(1, codes) - len(self._highest)
        if more > 0:
            none: Times = np.full(max(more, len(self._highest)), NO_TIME, np.int64)
            self._highest = np.append(self._highest, none)


def _highest_before(codes: Codes, due: Times) -> Times:
    """For each row the highest due of the rows of its code up to it.

    The rows are laid out by code; a number made of the code and the rank of the due then rises from
    code to code, so one running maximum serves all of them.
    """
    # For 16 bits NumPy counts instead of comparing.
    small = codes.astype(np.int16) if codes.max() <= np.iinfo(np.int16).max else codes
    by_code = np.argsort(small, kind="stable")
    by_due = np.argsort(due, kind="stable")
    rank = np.empty(len(due), np.int64)
    rank[by_due] = np.arange(len(due))
    keys = (codes[by_code].astype(np.int64) + 1) * len(due) + rank[by_code]
    highest: Times = np.empty(len(due), np.int64)
    highest[by_code] = due[by_due[np.maximum.accumulate(keys) % len(due)]]
    return highest
