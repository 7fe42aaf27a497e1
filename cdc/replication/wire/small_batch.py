"""A few messages of usual transactions, one by one: NumPy costs as much for ten as for a thousand.

Invariant: the rows are those that ``Sealer.seal_wire`` gives for the same messages, to the byte.
Whatever is not usual (a description of a table, a truncate, a logical message, a schema that the
log does not know yet, a message that breaks the protocol) is not read here at all: the way of whole
columns knows what to do with it. Nothing that a later batch depends on is changed before it is
sure that all messages are usual.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from cdc.cursor import Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.replication.protocol import POSTGRES_EPOCH_US, XLOG_HEADER_BYTES
from cdc.replication.wire.numbering import OpenTransaction
from cdc.replication.wire.relations import Relations
from cdc.replication.wire.table_versions import TableVersions

MESSAGES_MAX = 96
"""From about so many messages on whole columns cost less."""

_BYTES_MAX = 64 << 10
_BEGIN, _COMMIT = b"BC"
_ROWS = b"IUD"
_BEGUN = struct.Struct(">QqI")
_OID = struct.Struct(">I")
_AT = XLOG_HEADER_BYTES
_LSN_MAX = (1 << 63) - 1
*_NUMBERS_OF_RAW, _PAYLOAD = RAW_SCHEMA.types
_CODES = {pa.int64(): "q", pa.uint8(): "B", pa.uint32(): "I", pa.uint64(): "Q"}
_NUMBERS = [(kind, _CODES[kind]) for kind in _NUMBERS_OF_RAW]
"""The columns of numbers, with what ``array`` calls their types."""


class _UnusualMessageError(Exception):
    """Something that only the way of whole columns knows; never leaves this module."""


@dataclass
class FewRows:
    """The columns of the rows, and what the next batch must know of the transaction they end in."""

    open: OpenTransaction
    last_rows: dict[int, tuple[int, int]] = field(default_factory=dict)  # as Openings has them
    schemas: dict[int, bytes] = field(default_factory=dict)
    columns: list[list[int]] = field(default_factory=lambda: [[] for _ in range(7)])
    payloads: list[bytes] = field(default_factory=list)

    def batch(self) -> pa.RecordBatch:
        count = len(self.payloads)
        arrays = [
            pa.Array.from_buffers(kind, count, [None, pa.py_buffer(array(code, values))])
            for (kind, code), values in zip(_NUMBERS, self.columns, strict=True)
        ]
        arrays.append(pa.array(self.payloads, _PAYLOAD))
        return pa.RecordBatch.from_arrays(arrays, schema=RAW_SCHEMA)

    @property
    def first(self) -> Cursor:
        return Cursor(self.columns[0][0], self.columns[1][0])

    @property
    def high(self) -> Cursor:
        return Cursor(self.columns[0][-1], self.columns[1][-1] + 1)


def few_rows(
    messages: Sequence[bytes],
    carried: OpenTransaction,
    resume: Cursor,
    relations: Relations,
    openings: dict[int, tuple[int, int]],
    versions: TableVersions | None,
) -> FewRows | None:
    """The rows of a few usual messages, all of them above ``resume``; None if they are not."""
    if sum(map(len, messages)) > _BYTES_MAX or (versions is not None and versions.is_pending):
        return None
    rows = FewRows(replace(carried))
    try:
        for message in messages:
            kind = message[_AT]
            if kind == _BEGIN:
                _begin(rows.open, message)
            elif kind == _COMMIT:
                rows.open.in_progress = False
            elif kind in _ROWS and rows.open.in_progress and rows.open.lsn > resume.lsn:
                _add(rows, message, relations, openings, versions)
            else:
                return None
    except (_UnusualMessageError, IndexError, struct.error):
        return None
    return rows if rows.payloads else None


def _begin(open_: OpenTransaction, message: bytes) -> None:
    lsn, time, open_.xid = _BEGUN.unpack_from(message, _AT + 1)
    if lsn > _LSN_MAX:
        raise _UnusualMessageError
    open_.lsn, open_.commit_ts = lsn, time + POSTGRES_EPOCH_US
    open_.next_idx = open_.left_free = 0
    open_.in_progress = True


def _add(
    rows: FewRows,
    message: bytes,
    relations: Relations,
    openings: dict[int, tuple[int, int]],
    versions: TableVersions | None,
) -> None:
    (oid,) = _OID.unpack_from(message, _AT + 1)
    known = relations.known(oid)
    if known is None or known.own or known.noted is None:
        raise _UnusualMessageError
    schema = known.noted
    if versions is not None and not versions.is_newest(oid, schema.schema_id):
        raise _UnusualMessageError
    now, place = rows.open, (rows.open.lsn, known.bare.schema_id)
    opens = rows.last_rows.get(oid, openings.get(oid)) != place
    rows.last_rows[oid] = place
    now.left_free += opens and now.next_idx > 0
    values = (
        now.lsn, now.next_idx + now.left_free, now.commit_ts, now.xid, message[_AT], oid,
        schema.schema_id,
    )  # fmt: skip
    for column, value in zip(rows.columns, values, strict=True):
        column.append(value)
    rows.payloads.append(message[_AT:])
    rows.schemas[schema.schema_id] = schema.message
    now.next_idx += 1
