"""Which transactions were open when a chunk was about to be read, and since which LSN. Pure.

A commit may be in the log while no snapshot sees it yet: Postgres writes the commit record, may
wait for a synchronous standby, and only then lets others see it. All that time the transaction
holds the lock on its own number, which ``pg_locks`` shows. A
process that lists the locks first and takes the snapshot second knows every commit that the
snapshot misses: its LSN is above that of the
list, or its number is in the list.

Invariant: of a listed transaction that an earlier list does not have, the number was given after
that list, and so the commit, if there is one, lies above that list's LSN. One that was in the first
list may have committed anywhere: nothing is read before it has ended. On a standby nothing is
listed: there a commit is seen before it can be decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from cdc.backfill.snapshot import Snapshot


@dataclass(frozen=True)
class OpenListing:
    """What ``pg_locks`` had: 32-bit numbers of open transactions, and an LSN from before it."""

    lsn: int
    xids: frozenset[int]


@dataclass(frozen=True)
class OpenTransactions:
    """Since which LSN each open transaction can have committed; 0: that is not known."""

    lsn: int = 0  # of the last listing
    since: dict[int, int] = field(default_factory=dict)

    def after(self, listing: OpenListing) -> OpenTransactions:
        """With one more listing."""
        known = {xid: self.since.get(xid, self.lsn) for xid in listing.xids}
        return replace(self, lsn=listing.lsn, since=known)

    def committed_below(self, lsn: int = 0) -> list[int]:
        """Those that may have committed below an LSN, or were open before the first listing."""
        return sorted(xid for xid, since in self.since.items() if since < max(lsn, 1))

    @property
    def earliest(self) -> int:
        """The LSN below which no snapshot that is taken from now on misses a commit."""
        return min(self.since.values(), default=self.lsn)

    def look_from(self, snapshot: Snapshot) -> int:
        """The LSN from which on the log may have commits that a snapshot taken since misses."""
        xids = np.array(sorted(self.since), np.int64)
        missed = xids[~snapshot.contains(xids)] if len(xids) else xids
        return min((self.since[int(xid)] for xid in missed), default=self.lsn)


def who_is_waited_for(xids: list[int]) -> str:
    """The reason of a backfill that waits for these transactions."""
    few = ", ".join(map(str, xids[:5])) + ("…" if len(xids) > 5 else "")
    return (
        f"transactions that were open before it began have to end first: {few}. pg_locks and "
        "pg_stat_activity (backend_xid), or pg_prepared_xacts, say whose they are"
    )
