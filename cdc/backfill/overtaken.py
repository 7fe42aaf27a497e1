"""Which rows of a chunk newer changes have overtaken, and what is left of these. Pure.

A newer change of a row was delivered before the row is: delivering the row as it was read would
take it back in time. So it is dropped, except where the change did not send all of it: an update
that left a TOAST value alone does not carry it, and the chunk has the only copy. Then the row goes
out as it is now: what the changes said, and the chunk's values for the rest.

Invariant: of a row with a key, what goes out is never older than a change that went out before it,
and no value that a change left out is lost. Rows without a key cannot be matched: nothing is
dropped of them but by a truncate.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.groups import FrameColumns, Group, frame_of, groups_of, naming, read_group
from cdc.decoding.plan import plan_for
from cdc.decoding.rows import RowKeys, keys_of

Mask = npt.NDArray[np.bool_]

_TRUNCATE, _DELETE = ord("T"), ord("D")
_COUNT_AT = 6  # behind kind, oid and tag
_TEXT, _UNCHANGED = ord("t"), ord("u")
Cells = list[bytes]
"""The values of a tuple, each with its kind and length as pgoutput writes it."""


@dataclass(frozen=True)
class NewerChanges:
    """Changes of one table that a chunk's snapshot does not contain, in the order of the log."""

    raw: pa.RecordBatch  # RAW_SCHEMA
    schemas: Mapping[int, bytes]

    @classmethod
    def none(cls, schema: pa.Schema) -> NewerChanges:
        return cls(pa.RecordBatch.from_pylist([], schema), {})


class Rows(Protocol):
    """Rows of a chunk."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def raw(self) -> pa.RecordBatch:
        """Their messages (RAW_SCHEMA), which may have to be made first."""
        ...


@dataclass(frozen=True)
class Remains:
    """What of a chunk's rows goes out: those at ``ordinals``, some of them as other messages."""

    read: Rows
    ordinals: npt.NDArray[np.int64]
    merged: Mapping[int, bytes] = field(default_factory=dict)  # messages by ordinal

    @property
    def dropped(self) -> int:
        return len(self.read) - len(self.ordinals)

    @cached_property
    def rows(self) -> pa.RecordBatch:
        """The messages of the rows that go out."""
        rows = self.read.raw
        if self.merged:
            mask = np.zeros(rows.num_rows, bool)
            mask[[*self.merged]] = True
            written = pa.array([self.merged[at] for at in sorted(self.merged)], pa.binary())
            payloads = pc.replace_with_mask(rows.column("payload"), pa.array(mask), written)
            at = rows.schema.get_field_index("payload")
            rows = rows.set_column(at, rows.schema.field(at), payloads)
        return rows if not self.dropped else rows.take(pa.array(self.ordinals))


def remaining(
    rows: Rows,
    schemas: Mapping[int, bytes],
    newer: NewerChanges,
    keys: pa.StringArray | None = None,
) -> Remains:
    """The rows of a chunk as they may go out behind these changes; ``keys`` if they are known."""
    every = np.arange(len(rows))
    if not newer.raw.num_rows or not len(rows):
        return Remains(rows, every)
    if np.any(newer.raw.column("kind").to_numpy() == _TRUNCATE):
        # Whatever was inserted since comes as a change.
        return Remains(rows, every[:0])
    if keys is None:
        keys = row_keys(rows.raw, schemas).record_pks
    if _has_no_key(keys):
        return Remains(rows, every)
    changed = row_keys(newer.raw, newer.schemas)
    touched = pa.concat_arrays([changed.record_pks, changed.old_record_pks.drop_null()])
    overtaken: Mask = pc.is_in(keys, value_set=touched).to_numpy(zero_copy_only=False)
    if not overtaken.any():
        return Remains(rows, every)
    merged = {}
    if changed.unchanged.null_count < len(changed.unchanged):
        merged = _merged(rows.raw, schemas, keys, overtaken, newer, changed)
    kept = ~overtaken
    kept[[*merged]] = True
    return Remains(rows, np.flatnonzero(kept), merged)


def row_keys(raw: pa.RecordBatch, schemas: Mapping[int, bytes]) -> RowKeys:
    """The keys of messages with tuples, in their order."""
    frame = frame_of(raw)
    groups = list(groups_of(frame, schemas))
    found = [_keys(frame, group) for group in groups]
    if len(found) == 1:
        return found[0]
    order = np.concatenate([group.rows for group in groups])
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    names = ("record_pks", "old_record_pks", "unchanged")
    return RowKeys(
        *(
            pa.concat_arrays([getattr(keys, name) for keys in found]).take(pa.array(inverse))
            for name in names
        )
    )


def _keys(frame: FrameColumns, group: Group) -> RowKeys:
    assert group.plan is not None  # only rows of tables are handed in
    with naming(frame, group):
        tuples = read_group(frame, group, group.plan)
        return keys_of(group.plan, tuples, len(group.rows), kind=group.kind, tag=group.tag)


def _has_no_key(keys: pa.StringArray) -> bool:
    return bool(len(keys)) and keys[0].as_py() == "[]"


def _merged(
    rows: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    keys: pa.StringArray,
    overtaken: Mask,
    newer: NewerChanges,
    changed: RowKeys,
) -> dict[int, bytes]:
    """The messages of overtaken rows whose last change lacks values, by their ordinal.

    Rows are followed through their changes one by one: only those that such a change touched.
    """
    if rows.column("kind")[0].as_py() == _DELETE:
        return {}  # a row that is gone has nothing to merge
    columns = _columns(schemas, rows.column("schema_id")[0].as_py())
    ordinals = np.flatnonzero(overtaken)
    followed = dict(zip(keys.take(pa.array(ordinals)).to_pylist(), ordinals.tolist(), strict=True))
    known: dict[str, tuple[int, Cells, bool]] = {}  # ordinal, values, whether some were not sent
    for at in _touching(changed, followed):
        key = changed.record_pks[at].as_py()
        # A row that has the new key already contains the change, as rows from a standby may.
        before = key if key in followed else changed.old_record_pks[at].as_py() or key
        held = known.pop(before, None)
        if held is None and before in followed:
            ordinal = followed.pop(before)
            held = (ordinal, cells_of(rows.column("payload")[ordinal].as_py()), False)
        if newer.raw.column("kind")[at].as_py() == _DELETE:
            continue
        payload = newer.raw.column("payload")[at].as_py()
        same = _columns(newer.schemas, newer.raw.column("schema_id")[at].as_py()) == columns
        if held is None or not same:
            continue
        ordinal, base, _ = held
        cells = cells_of(payload)
        filled = [
            old if new[0] == _UNCHANGED else new for old, new in zip(base, cells, strict=True)
        ]
        known[key] = (ordinal, filled, changed.unchanged[at].is_valid)
    head = rows.column("payload")[0].as_py()[: _COUNT_AT + 2]  # the same in every row
    return {
        ordinal: head + b"".join(cells) for ordinal, cells, lacking in known.values() if lacking
    }


def _touching(changed: RowKeys, followed: Mapping[str, int]) -> Sequence[int]:
    """The changes of rows that are followed, in order; a row may change its key on the way."""
    moved = changed.old_record_pks.is_valid()
    names = pa.concat_arrays([pa.array([*followed], pa.string()), changed.record_pks.filter(moved)])
    mine = pc.or_(pc.is_in(changed.record_pks, value_set=names), moved)
    found: list[int] = np.flatnonzero(mine.to_numpy(zero_copy_only=False)).tolist()
    return found


def _columns(schemas: Mapping[int, bytes], schema_id: int) -> tuple[str, ...]:
    return plan_for(schemas[schema_id]).names


def cells_of(payload: bytes) -> Cells:
    """The values of a message's last tuple: of an update its new one."""
    at = _COUNT_AT
    if payload[5] != ord("N") and payload[0] == ord("U"):
        at = _skip(payload, at) + 1
    (count,) = struct.unpack_from(">H", payload, at)
    at += 2
    cells: Cells = []
    for _ in range(count):
        end = _end_of_cell(payload, at)
        cells.append(payload[at:end])
        at = end
    return cells


def _skip(payload: bytes, at: int) -> int:
    """Behind the tuple whose column count stands at ``at``."""
    (count,) = struct.unpack_from(">H", payload, at)
    at += 2
    for _ in range(count):
        at = _end_of_cell(payload, at)
    return at


def _end_of_cell(payload: bytes, at: int) -> int:
    if payload[at] != _TEXT:
        return at + 1
    (size,) = struct.unpack_from(">I", payload, at + 1)
    return at + 5 + int(size)
