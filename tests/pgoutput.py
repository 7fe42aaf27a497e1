"""A small writer of pgoutput messages (protocol 1 to 4), for tests and benchmarks.

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


def streamed(xid: int, message: bytes) -> bytes:
    """A message as it stands in a stream: with its subtransaction's xid behind the kind."""
    return message[:1] + struct.pack(">I", xid) + message[1:]


def stream_start(xid: int, *, first: bool) -> bytes:
    """S: a block of a streamed transaction begins."""
    return b"S" + struct.pack(">IB", xid, first)


def stream_stop() -> bytes:
    """E: a block ends."""
    return b"E"


def stream_commit(xid: int, commit_lsn: int, end_lsn: int, commit_ts_us: int) -> bytes:
    """c: a streamed transaction is committed."""
    time = commit_ts_us - POSTGRES_EPOCH_US
    return b"c" + struct.pack(">IBQQq", xid, 0, commit_lsn, end_lsn, time)


def stream_abort(xid: int, subxid: int, *, parallel: bool = False) -> bytes:
    """A: a streamed transaction, or a subtransaction of it, is rolled back."""
    message = b"A" + struct.pack(">II", xid, subxid)
    return message + struct.pack(">Qq", 1, 1) if parallel else message


def stream_prepare(prepare_lsn: int, xid: int, gid: str) -> bytes:
    """p: a streamed transaction is prepared."""
    return b"p" + _prepared(prepare_lsn, 0, xid, gid)


def begin_prepare(prepare_lsn: int, xid: int, gid: str) -> bytes:
    """b: a prepared transaction comes whole."""
    return b"b" + struct.pack(">QQqI", prepare_lsn, prepare_lsn + 8, 0, xid) + _text(gid)


def prepare(prepare_lsn: int, xid: int, gid: str) -> bytes:
    """P: all of it is there."""
    return b"P" + _prepared(prepare_lsn, 0, xid, gid)


def commit_prepared(commit_lsn: int, commit_ts_us: int, xid: int, gid: str) -> bytes:
    """K: a prepared transaction is committed."""
    return b"K" + _prepared(commit_lsn, commit_ts_us - POSTGRES_EPOCH_US, xid, gid)


def rollback_prepared(prepare_lsn: int, rollback_lsn: int, xid: int, gid: str) -> bytes:
    """r: a prepared transaction is rolled back."""
    return b"r" + struct.pack(">BQQqqI", 0, prepare_lsn, rollback_lsn, 0, 0, xid) + _text(gid)


def _prepared(lsn: int, time: int, xid: int, gid: str) -> bytes:
    return struct.pack(">BQQqI", 0, lsn, lsn + 8, time, xid) + _text(gid)


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
