"""The changes of one table between two places of the log.

Invariants: a scan is bounded in bytes of the log, and refuses what is longer. What the log does not
have, or has no longer, is an error, never taken for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from cdc.backfill.overtaken import NewerChanges, row_keys
from cdc.backfill.snapshot import Snapshot
from cdc.cursor import Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.decoding.rows import RowKeys
from cdc.errors import TransientError
from cdc.log.view import LogReader

SCAN_BYTES_MAX = 1 << 30
_KINDS = np.frombuffer(b"IUDT", np.uint8)
_UPDATE = ord("U")


class TooFarError(TransientError):
    """The log between two places is longer than a scan may be, or does not reach that far back."""


def changes_between(
    log: LogReader, oid: int, since: Cursor, until: Cursor, bytes_max: int = SCAN_BYTES_MAX
) -> NewerChanges:
    """The changes of a table's rows at or above ``since`` and below ``until``, truncates included.

    The log must reach beyond ``until``.
    """
    earliest, _ = log.floors()
    if since < earliest:
        raise TooFarError(
            f"the log begins at {earliest}, behind the snapshot of a chunk",
            fix="the chunk is read again",
            kind="look_back",
        )
    first, last = log.seek(since), min(log.seek(until) + 1, log.next_batch())
    if first >= last:
        return NewerChanges.none(RAW_SCHEMA)
    size = int(log.entries(first, last)["bytes"].sum())
    if size > bytes_max:
        raise TooFarError(
            f"{size} bytes of the log lie behind a chunk's snapshot, more than {bytes_max}",
            fix="the chunk is read again",
            kind="look_back",
        )
    found: list[pa.RecordBatch] = []
    schemas: dict[int, bytes] = {}
    for frame in log.frames(first, last):
        raw = frame.raw
        mine = np.isin(raw.column("kind").to_numpy(), _KINDS)
        mine &= raw.column("relation").to_numpy() == oid
        if not mine.any():
            continue
        lsn, idx = (raw.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
        mine &= ~_below(lsn, idx, since) & _below(lsn, idx, until)
        if mine.any():
            found.append(raw.filter(pa.array(mine)).replace_schema_metadata(None))
            schemas |= frame.schemas
    if not found:
        return NewerChanges.none(RAW_SCHEMA)
    return NewerChanges(pa.concat_batches(found), schemas)


def _below(
    lsn: np.ndarray[tuple[int], np.dtype[np.int64]],
    idx: np.ndarray[tuple[int], np.dtype[np.int64]],
    cursor: Cursor,
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (lsn < cursor.lsn) | (
        (lsn == cursor.lsn) & (idx < cursor.idx)
    )
    return found


@dataclass
class NewerScan:
    """The changes that a chunk's snapshot does not contain, gathered as its place moves on."""

    oid: int
    snapshot: Snapshot
    reached: Cursor  # everything below was looked at
    changes: NewerChanges = field(default_factory=lambda: NewerChanges.none(RAW_SCHEMA))

    def up_to(self, log: LogReader, place: Cursor) -> NewerChanges:
        """All of them below ``place``, which never goes back."""
        if place > self.reached:
            found = changes_between(log, self.oid, self.reached, place)
            newer = ~self.snapshot.contains(found.raw.column("xid").to_numpy())
            if newer.any():
                raw = found.raw.filter(pa.array(newer))
                self.changes = NewerChanges(
                    pa.concat_batches([self.changes.raw, raw]),
                    {**self.changes.schemas, **found.schemas},
                )
            self.reached = place
        return self.changes


def lacking_values(log: LogReader, oid: int, since: Cursor, until: Cursor) -> RowKeys | None:
    """The keys of updates that may have left out values; None without any update."""
    found = changes_between(log, oid, since, until)
    updates = found.raw.column("kind").to_numpy() == _UPDATE
    if not updates.any():
        return None
    return row_keys(found.raw.filter(pa.array(updates)), found.schemas)
