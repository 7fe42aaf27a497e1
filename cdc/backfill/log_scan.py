"""The changes of one table between two places of the log.

Invariants: the changes that a scan keeps are bounded: it refuses a longer log, or keeps of each
change no more than its key. What the log does not have, or has no longer, is an error, never taken
for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.backfill.overtaken import NewerChanges, row_keys
from cdc.backfill.snapshot import Snapshot
from cdc.cursor import Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import GapError, OperatorError, TransientError
from cdc.log.view import LogReader

SCAN_BYTES_MAX = 1 << 30
_KINDS = np.frombuffer(b"IUDT", np.uint8)
_UPDATES = np.frombuffer(b"U", np.uint8)
_AT_ONCE_BYTES = 64 << 20  # of updates, whose keys are read together


class TooFarError(TransientError):
    """The log between two places is longer than a scan may be, or does not reach that far back."""


def changes_between(
    log: LogReader, oid: int, since: Cursor, until: Cursor, bytes_max: int = SCAN_BYTES_MAX
) -> NewerChanges:
    """The changes of a table's rows at or above ``since`` and below ``until``, truncates included.

    The log must reach beyond ``until``.
    """
    first, last = _batches(log, since, until)
    size = int(log.entries(first, last)["bytes"].sum())
    if size > bytes_max:
        raise TooFarError(
            f"{size} bytes of the log lie behind a chunk's snapshot, more than {bytes_max}",
            fix="the chunk is read again",
            kind="look_back",
        )
    found: list[pa.RecordBatch] = []
    schemas: dict[int, bytes] = {}
    for raw, described in _of_table(log, oid, since, until, _KINDS):
        found.append(raw)
        schemas |= described
    if not found:
        return NewerChanges.none(RAW_SCHEMA)
    return NewerChanges(pa.concat_batches(found), schemas)


def _batches(log: LogReader, since: Cursor, until: Cursor) -> tuple[int, int]:
    """The batches ``[first, last)`` that may hold changes between two places."""
    earliest, _ = log.floors()
    if since < earliest:
        raise TooFarError(
            f"the log begins at {earliest}, behind the place {since} that it is searched from",
            fix="the chunk is read again",
            kind="look_back",
        )
    first, last = log.seek(since), min(log.seek(until) + 1, log.next_batch())
    return first, max(first, last)


def _of_table(
    log: LogReader, oid: int, since: Cursor, until: Cursor, kinds: npt.NDArray[np.uint8]
) -> Iterator[tuple[pa.RecordBatch, Mapping[int, bytes]]]:
    """The changes of some kinds, frame by frame, with the schemas of the frame."""
    for frame in log.frames(*_batches(log, since, until)):
        raw = frame.raw
        mine = np.isin(raw.column("kind").to_numpy(), kinds)
        mine &= raw.column("relation").to_numpy() == oid
        if not mine.any():
            continue
        lsn, idx = (raw.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
        mine &= ~_below(lsn, idx, since) & _below(lsn, idx, until)
        if mine.any():
            yield raw.filter(pa.array(mine)).replace_schema_metadata(None), frame.schemas


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


def incomplete_keys(log: LogReader, oid: int, since: Cursor, until: Cursor) -> list[list[str]]:
    """The keys of rows of which an update between two places left out values, however far apart.

    The log must reach beyond ``until``. Raises OperatorError if it has not all of it any more: what
    changes left out there is not known.
    """
    with _whole_log():
        return [orjson.loads(key) for key in sorted(_all_incomplete(log, oid, since, until))]


def moved_keys(
    log: LogReader, oid: int, since: Cursor, until: Cursor, keys: Collection[Sequence[str]]
) -> list[list[str]]:
    """The keys that rows with these keys got between two places by updates that left out values.

    The log must reach beyond ``until``. Raises OperatorError if it has not all of it any more.
    """
    followed = {orjson.dumps(key).decode() for key in keys}
    found = []
    with _whole_log():
        for raw, schemas in _of_table(log, oid, since, until, _UPDATES):
            changed = row_keys(raw, schemas)
            moved = pc.and_(changed.old_record_pks.is_valid(), changed.unchanged.is_valid())
            for before, after in zip(
                changed.old_record_pks.filter(moved).to_pylist(),
                changed.record_pks.filter(moved).to_pylist(),
                strict=True,
            ):
                if before in followed:
                    followed.add(after)
                    found.append(orjson.loads(after))
    return found


@contextmanager
def _whole_log() -> Iterator[None]:
    """OperatorError where the log has not all that is searched: what it had is unknown."""
    try:
        yield
    except (GapError, TooFarError) as error:
        raise OperatorError(
            f"the log was to be searched for changes that left out values: {error.what}",
            fix="cancel this backfill and start it again; let the log keep more (log.retain_s)",
            kind="log_gap",
        ) from error


def _all_incomplete(log: LogReader, oid: int, since: Cursor, until: Cursor) -> set[str]:
    found: set[str] = set()
    waiting: list[pa.RecordBatch] = []
    schemas: dict[int, bytes] = {}
    size = 0
    for raw, described in _of_table(log, oid, since, until, _UPDATES):
        waiting.append(raw)
        schemas |= described
        size += raw.nbytes
        if size >= _AT_ONCE_BYTES:
            found |= _incomplete(waiting, schemas)
            waiting, schemas, size = [], {}, 0
    return found | _incomplete(waiting, schemas)


def _incomplete(updates: Sequence[pa.RecordBatch], schemas: Mapping[int, bytes]) -> set[str]:
    if not updates:
        return set()
    keys = row_keys(pa.concat_batches(updates), schemas)
    return set(pc.unique(keys.record_pks.filter(keys.unchanged.is_valid())).to_pylist())
