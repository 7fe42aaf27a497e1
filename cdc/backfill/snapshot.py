"""Visibility: which transactions a snapshot of Postgres contains. Pure.

A chunk is read in one snapshot. A change of the log whose transaction the snapshot contains is
contained in the chunk's rows; every other change is newer than they are, wherever its LSN lies.
Changes carry the lower 32 bits of their transaction's number, and always that of the top-level
transaction; a snapshot has all 64 bits, and lists subtransactions too, which does no harm.

In recovery ``pg_current_snapshot()`` lists no open transaction, though the snapshot sees nothing of
what they did. There every transaction that is not below its ``xmin`` counts as newer. The rows may
contain some of these; a change of them was delivered before the row all the same.

Invariant: a transaction is taken to be within half a round (2^31) of the snapshot's end, which
Postgres itself guarantees for every transaction that is not frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cdc.errors import ProtocolError

Xids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_ROUND = 1 << 32


@dataclass(frozen=True)
class Snapshot:
    """What ``pg_current_snapshot()`` says; all numbers have 64 bits."""

    xmin: int  # everything below has ended
    xmax: int  # nothing from here on has ended
    in_progress: tuple[int, ...] = ()  # between the two, rising

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read the text form of Postgres: ``xmin:xmax:in_progress,…``."""
        try:
            xmin, xmax, listed = text.split(":")
            progress = tuple(int(xid) for xid in listed.split(",") if xid)
            return cls(int(xmin), int(xmax), progress)
        except ValueError:
            raise ProtocolError(
                f"'{text}' is not a snapshot", fix="report it with this text"
            ) from None

    @property
    def of_standby(self) -> Snapshot:
        """What is certain of a snapshot that a standby gave: which transactions had all ended."""
        return Snapshot(self.xmin, self.xmin)

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.in_progress))}"

    def whole(self, xids: Xids) -> Xids:
        """The 64 bits of transactions of which the lower 32 are known."""
        behind = (self.xmax - xids + _ROUND // 2) % _ROUND - _ROUND // 2
        found: Xids = self.xmax - behind
        return found

    def contains(self, xids: Xids) -> Mask:
        """For each transaction, by its lower 32 bits, whether the snapshot sees what it did."""
        whole = self.whole(xids)
        found: Mask = (whole < self.xmax) & ~np.isin(whole, np.array(self.in_progress, np.int64))
        return found
