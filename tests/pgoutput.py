"""A small writer of pgoutput messages (protocol 1), for tests and benchmarks.

A tuple is a sequence of values: a str or bytes is sent as text, None as null, UNCHANGED as an
unchanged TOAST value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import Final

POSTGRES_EPOCH_US = 946_684_800_000_000
"""2000-01-01 in unix microseconds: pgoutput counts from there."""


class Unchanged(Enum):
    """The type of UNCHANGED."""

    VALUE = "unchanged"


UNCHANGED: Final = Unchanged.VALUE

Value = str | bytes | None | Unchanged
Values = Sequence[Value]
ColumnSpec = tuple[str, int] | tuple[str, int, bool]
"""Name, type oid, and whether it is part of the replica identity (no, if left out)."""


def relation(
    oid: int,
    namespace: str,
    name: str,
    columns: Sequence[ColumnSpec],
    *,
    identity: str = "d",
    typmod: int = -1,
) -> bytes:
    """R: a table version."""
    parts = [b"R", struct.pack(">I", oid), _text(namespace), _text(name), identity.encode()]
    parts.append(struct.pack(">H", len(columns)))
    for column in columns:
        is_key = len(column) > 2 and bool(column[2])
        parts += (bytes([is_key]), _text(column[0]), struct.pack(">Ii", column[1], typmod))
    return b"".join(parts)


def insert(oid: int, new: Values) -> bytes:
    """I: a new row."""
    return b"I" + struct.pack(">I", oid) + b"N" + _tuple(new)


def update(oid: int, new: Values, *, key: Values | None = None, old: Values | None = None) -> bytes:
    """U: with the old key (``key``), with the whole old row (``old``), or with neither."""
    before = (
        b"K" + _tuple(key) if key is not None else b"O" + _tuple(old) if old is not None else b""
    )
    return b"U" + struct.pack(">I", oid) + before + b"N" + _tuple(new)


def delete(oid: int, *, key: Values | None = None, old: Values | None = None) -> bytes:
    """D: with the old key or with the whole old row."""
    before = b"K" + _tuple(key) if key is not None else b"O" + _tuple(old or ())
    return b"D" + struct.pack(">I", oid) + before


def truncate(
    oids: Sequence[int], *, cascade: bool = False, restart_identity: bool = False
) -> bytes:
    """T: one or more tables emptied at once."""
    options = int(cascade) | int(restart_identity) << 1
    return b"T" + struct.pack(f">IB{len(oids)}I", len(oids), options, *oids)


def begin(final_lsn: int, commit_ts_us: int, xid: int) -> bytes:
    """B: a transaction starts; ``commit_ts_us`` in unix microseconds."""
    return b"B" + struct.pack(">QqI", final_lsn, commit_ts_us - POSTGRES_EPOCH_US, xid)


def commit(commit_lsn: int, end_lsn: int, commit_ts_us: int) -> bytes:
    """C: a transaction ends; ``commit_ts_us`` in unix microseconds."""
    return b"C" + struct.pack(">BQQq", 0, commit_lsn, end_lsn, commit_ts_us - POSTGRES_EPOCH_US)


def logical_message(
    prefix: str, content: bytes, *, transactional: bool = True, lsn: int = 0
) -> bytes:
    """M: what ``pg_logical_emit_message`` writes."""
    head = b"M" + struct.pack(">BQ", transactional, lsn) + _text(prefix)
    return head + struct.pack(">I", len(content)) + content


def _text(value: str) -> bytes:
    return value.encode() + b"\0"


def _tuple(values: Values) -> bytes:
    return struct.pack(">H", len(values)) + b"".join(_value(value) for value in values)


def _value(value: Value) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, Unchanged):
        return b"u"
    text = value.encode() if isinstance(value, str) else value
    return b"t" + struct.pack(">I", len(text)) + text
