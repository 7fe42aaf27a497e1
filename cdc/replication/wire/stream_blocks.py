"""Transactions that come in pieces: the control messages, and whose each message of a batch is.

A block is what stands between Stream Start and Stream Stop, or between Begin Prepare and Prepare.
Invariants: blocks never nest, and nothing that ends a transaction stands inside one;
anything else is a protocol error. No I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from cdc.errors import ProtocolError
from cdc.replication.protocol import POSTGRES_EPOCH_US
from cdc.replication.wire.wire import BEGIN, COMMIT, CONTROLS, Ints, Mask, Wire, kinds

_START, _STOP, _ABORT, _BEGIN_PREPARE, _PREPARE = (ord(letter) for letter in "SEAbP")
_OPENS: Final = kinds("Sb")
_CLOSES: Final = kinds("EP")
_ENDS: Final = kinds("cpPKr")
_OUTSIDE_ONLY: Final = kinds("BCcApKr")
WITH_XID: Final = kinds("IUDTRYM")
"""By kind, whether a message of a stream carries its subtransaction's xid."""

_LONGEST_TIME: Final = 2**63 - 1 - POSTGRES_EPOCH_US

# What follows the kind; a name, where there is one, comes last.
_STREAM_START = struct.Struct(">IB")
_STREAM_ABORT = struct.Struct(">II")
_STREAM_ABORT_PARALLEL = struct.Struct(">IIQq")
_STREAM_COMMIT = struct.Struct(">IBQQq")
_BEGIN_OF_PREPARED = struct.Struct(">QQqI")
_END_OF_PREPARED = struct.Struct(">BQQqI")
_ROLLBACK_PREPARED = struct.Struct(">BQQqqI")


@dataclass(frozen=True)
class StreamCommitted:
    """A streamed transaction is committed; ``commit_ts`` in Unix microseconds."""

    xid: int
    commit_lsn: int
    commit_ts: int


@dataclass(frozen=True)
class Prepared:
    """A transaction, streamed or not, is prepared."""

    xid: int


@dataclass(frozen=True)
class PreparedCommitted:
    """One that was prepared, perhaps on an earlier connection, is committed.

    Its ``gid`` is for people: on a connection with another encoding it has other bytes.
    """

    xid: int
    gid: str
    commit_lsn: int
    commit_ts: int


@dataclass(frozen=True)
class PreparedRolledBack:
    """One that was prepared is not to be."""

    xid: int


End = StreamCommitted | Prepared | PreparedCommitted | PreparedRolledBack


@dataclass(frozen=True)
class Block:
    """Of which transaction the messages of a block are."""

    xid: int
    streamed: bool
    continues: bool = False  # earlier blocks of the same stream came before


@dataclass(frozen=True)
class Blocks:
    """By message of a batch: the xid of the transaction whose block it is in, or 0."""

    owner: Ints
    streamed: Mask
    opened: dict[int, Block]  # by position
    left_open: Block | None


def find_blocks(wire: Wire, carried: Block | None, in_transaction: bool) -> Blocks:
    """Where the blocks of a batch are.

    ``carried`` is the one that the last batch ended in, ``in_transaction`` is True if it
    ended inside a transaction that comes whole.
    """
    _refuse_inside_whole(wire, in_transaction)
    opens, closes = _OPENS[wire.kind], _CLOSES[wire.kind]
    inside = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8)) + (carried is not None)
    if ((inside < 0) | (inside > 1)).any():
        raise _broken("blocks of streamed transactions nest or end twice")
    opened = {int(at): _block(wire.message(int(at))) for at in np.flatnonzero(opens)}
    known = [carried or Block(0, False), *opened.values()]
    nth = np.cumsum(opens)
    xid = np.array([block.xid for block in known], dtype=np.int64)[nth]
    streamed = np.array([block.streamed for block in known])[nth]
    if (streamed[closes] != (wire.kind[closes] == _STOP)).any():
        raise _broken("a block ends as another kind of block does")
    within = inside.astype(bool)
    if (_OUTSIDE_ONLY[wire.kind] & within).any():
        raise _broken("a transaction begins or ends inside another one's block")
    left_open = known[-1] if len(wire) and within[-1] else None
    return Blocks(np.where(within & ~opens, xid, 0), streamed & within & ~opens, opened, left_open)


def _refuse_inside_whole(wire: Wire, in_transaction: bool) -> None:
    marks = np.flatnonzero((wire.kind == BEGIN) | (wire.kind == COMMIT))
    inside = np.concatenate([[in_transaction], wire.kind[marks] == BEGIN])
    controls = np.flatnonzero(CONTROLS[wire.kind])
    if inside[np.searchsorted(marks, controls)].any():
        raise _broken("a piece of one transaction stands inside a whole one")


def ends_of(wire: Wire) -> Iterator[tuple[int, End]]:
    """The messages that decide over a transaction's rows, with their positions."""
    for at in np.flatnonzero(_ENDS[wire.kind]).tolist():
        yield at, _end(wire.message(at))


def aborts_of(wire: Wire, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Position, xid and subtransaction's xid of the Stream Aborts between two positions."""
    for at in (start + np.flatnonzero(wire.kind[start:end] == _ABORT)).tolist():
        message = wire.message(at)
        layout = _STREAM_ABORT
        if len(message) == 1 + _STREAM_ABORT_PARALLEL.size:
            layout = _STREAM_ABORT_PARALLEL
        xid, subxid, *_when = _fields(message, layout)
        yield at, xid, subxid


def _block(message: bytes) -> Block:
    if message[0] == _START:
        xid, first = _fields(message, _STREAM_START)
        return Block(_valid(xid), True, continues=first == 0)
    _prepare_lsn, _end_lsn, _time, xid = _fields(_named(message)[0], _BEGIN_OF_PREPARED)
    return Block(_valid(xid), False)


def _end(message: bytes) -> End:
    kind = chr(message[0])
    if kind == "c":
        xid, _flags, commit_lsn, _end_lsn, time = _fields(message, _STREAM_COMMIT)
        return StreamCommitted(_valid(xid), _lsn(commit_lsn), _time(time))
    head, gid = _named(message)
    if kind == "r":
        *_skipped, xid = _fields(head, _ROLLBACK_PREPARED)
        return PreparedRolledBack(_valid(xid))
    _flags, lsn, _end_lsn, time, xid = _fields(head, _END_OF_PREPARED)
    if kind == "K":
        return PreparedCommitted(_valid(xid), gid, _lsn(lsn), _time(time))
    return Prepared(_valid(xid))


def _fields(message: bytes, layout: struct.Struct) -> tuple[int, ...]:
    if len(message) != 1 + layout.size:
        raise _broken(f"a message of kind {message[:1]!r} has {len(message)} bytes")
    return layout.unpack_from(message, 1)


def _named(message: bytes) -> tuple[bytes, str]:
    """A message without the name at its end, and the name."""
    layout = {"b": _BEGIN_OF_PREPARED, "r": _ROLLBACK_PREPARED}.get(
        chr(message[0]), _END_OF_PREPARED
    )
    name = message[1 + layout.size :]
    if not name or name.find(b"\0") != len(name) - 1:
        raise _broken(f"a message of kind {message[:1]!r} does not end with a name")
    # A database need not be in UTF-8.
    return message[: 1 + layout.size], name[:-1].decode(errors="backslashreplace")


def _valid(xid: int) -> int:
    if xid == 0:
        raise _broken("a transaction has no xid")
    return xid


def _lsn(lsn: int) -> int:
    if lsn >= 2**63:
        raise _broken("a message names an LSN that no server reaches")
    return lsn


def _time(time: int) -> int:
    if time > _LONGEST_TIME:
        raise _broken("a transaction ends at a time that no clock shows")
    return time + POSTGRES_EPOCH_US


def _broken(why: str) -> ProtocolError:
    return ProtocolError(why, fix="reconnect; if it stays, set stream_transactions to false")
