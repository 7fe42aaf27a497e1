"""Turning what came off the wire into a batch: cursors, kinds and schemas by column. No I/O.

The reader only collects XLogData messages; here NumPy works out for all of them at once which
transaction each belongs to and which number it has in it. What must always hold: the same WAL
gives the same cursors, however it is cut into batches, on whatever connection it comes. So only
what the transaction itself contains is counted: rows, truncated tables and logical messages, never
Relation or Type messages, which depend on the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from cdc.cursor import ORIGIN, Cursor, format_lsn
from cdc.decode.raw import RAW_SCHEMA
from cdc.decode.relation import Relation, parse_relation, with_key
from cdc.errors import ProtocolError
from cdc.replication.protocol import POSTGRES_EPOCH_US, XLOG_HEADER_BYTES

OWN_SCHEMA = "walbrook"
"""Our own tables never enter the stream: settling a change would otherwise make a new one."""

_BEGIN, _COMMIT, _RELATION, _TYPE, _ORIGIN = (ord(c) for c in "BCRYO")
_INSERT, _UPDATE, _DELETE, _TRUNCATE, _MESSAGE = (ord(c) for c in "IUDTM")
_KNOWN = np.zeros(256, dtype=bool)
_KNOWN[[_BEGIN, _COMMIT, _RELATION, _TYPE, _ORIGIN]] = True
_ROWS = np.zeros(256, dtype=bool)
_ROWS[[_INSERT, _UPDATE, _DELETE, _TRUNCATE, _MESSAGE]] = True

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sealed:
    """A batch ready for the log."""

    raw: pa.RecordBatch
    schemas: Mapping[int, bytes]
    first: Cursor
    high: Cursor


@dataclass
class _Open:
    """The transaction that the last batch ended in, or the one it ended with."""

    lsn: int = 0
    commit_ts: int = 0
    xid: int = 0
    next_idx: int = 0
    in_progress: bool = False


@dataclass(frozen=True)
class _Schema:
    schema_id: int
    message: bytes
    own: bool


def _no_key(_relation: Relation) -> Sequence[str]:
    return ()


@dataclass
class Sealer:
    """Carries what one batch must know of those before it, for one connection."""

    resume: Cursor = ORIGIN  # what is below was taken by an earlier connection
    key_of: Callable[[Relation], Sequence[str]] = _no_key  # asks the source's catalog
    _open: _Open = field(default_factory=_Open)
    _relations: dict[int, _Schema] = field(default_factory=dict)

    @property
    def in_transaction(self) -> bool:
        return self._open.in_progress

    def seal(self, messages: Sequence[bytes]) -> Sealed | None:
        """One batch of all ``messages``; None when nothing of them is for the log."""
        wire = _Wire(messages)
        cursors = self._number(wire)
        rows = np.flatnonzero(_ROWS[wire.kind])
        # A truncate of several tables is one change a table, each with a cursor of its own.
        repeats = np.where(wire.kind[rows] == _TRUNCATE, wire.truncated(rows), 1)
        row = np.repeat(rows, repeats)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        lsn, idx = cursors.lsn[row], cursors.idx[row] + nth
        relation = wire.relation(row, nth)
        schema_id, own, schemas = self._schemas_of(wire, row, relation)
        keep = ~own & (
            (lsn > self.resume.lsn) | ((lsn == self.resume.lsn) & (idx >= self.resume.idx))
        )
        if not keep.any():
            return None
        row, lsn, idx = row[keep], lsn[keep], idx[keep]
        raw = pa.RecordBatch.from_arrays(
            [
                pa.array(lsn),
                pa.array(idx),
                pa.array(cursors.commit_ts[row]),
                pa.array(cursors.xid[row]),
                pa.array(wire.kind[row]),
                pa.array(relation[keep].astype(np.uint32)),
                pa.array(schema_id[keep]),
                wire.payload(row),
            ],
            schema=RAW_SCHEMA,
        )
        used = set(np.unique(schema_id[keep]).tolist())
        return Sealed(
            raw,
            {key: message for key, message in schemas.items() if key in used},
            Cursor(int(lsn[0]), int(idx[0])),
            Cursor(int(lsn[-1]), int(idx[-1]) + 1),
        )

    def _number(self, wire: _Wire) -> _Cursors:
        """Give every message its transaction and its number in it; remember how the batch ends."""
        is_begin = wire.kind == _BEGIN
        begins = np.flatnonzero(is_begin)
        carried = self._open
        begin_lsn, begin_ts, begin_xid = wire.begins(begins)
        tx = np.cumsum(is_begin)
        tx_lsn = np.concatenate([[carried.lsn], begin_lsn])
        tx_ts = np.concatenate([[carried.commit_ts], begin_ts])
        tx_xid = np.concatenate([[carried.xid], begin_xid])

        weight = _ROWS[wire.kind].astype(np.int64)
        truncates = np.flatnonzero(wire.kind == _TRUNCATE)
        weight[truncates] = wire.truncated(truncates)
        loose = wire.outside_transactions()
        weight[loose] = 0
        before = np.cumsum(weight) - weight
        tx_start = np.concatenate([[-carried.next_idx], before[begins]])
        cursors = _Cursors(tx_lsn[tx], before - tx_start[tx], tx_ts[tx], tx_xid[tx])
        cursors.lsn[loose], cursors.commit_ts[loose] = wire.loose(loose)
        cursors.idx[loose] = 0
        cursors.xid[loose] = 0

        ends = np.flatnonzero(is_begin | (wire.kind == _COMMIT))
        self._open = _Open(
            int(tx_lsn[-1]),
            int(tx_ts[-1]),
            int(tx_xid[-1]),
            int(weight.sum() - tx_start[-1]),
            bool(is_begin[ends[-1]]) if len(ends) else carried.in_progress,
        )
        return cursors

    def _schemas_of(
        self, wire: _Wire, row: Ints, relation: Ints
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_], dict[int, bytes]]:
        """For each row the schema in force when it was sent, and which rows are our own tables'."""
        schema_id = np.zeros(len(row), dtype=np.uint64)
        own = np.zeros(len(row), dtype=bool)
        schemas: dict[int, bytes] = {}
        announced = np.flatnonzero(wire.kind == _RELATION)
        cuts = np.searchsorted(row, announced)
        for start, end, message in zip(
            [0, *cuts], [*cuts, len(row)], [None, *announced], strict=True
        ):
            if message is not None:
                self._announce(wire.message(int(message)))
            for oid in np.unique(relation[start:end]).tolist():
                if oid == 0:
                    continue
                schema = self._relations.get(oid)
                if schema is None:
                    raise ProtocolError(
                        f"a change names relation {oid}, which the server never described",
                        fix="reconnect; if it stays, report it with the server's version",
                    )
                of_oid = start + np.flatnonzero(relation[start:end] == oid)
                schema_id[of_oid] = schema.schema_id
                own[of_oid] = schema.own
                schemas[schema.schema_id] = schema.message
        return schema_id, own, schemas

    def _announce(self, message: bytes) -> None:
        relation = parse_relation(message)
        own = relation.namespace == OWN_SCHEMA
        schema = message if own else with_key(message, self.key_of(relation))
        self._relations[relation.oid] = _Schema(xxhash.xxh3_64_intdigest(schema), schema, own)


@dataclass(frozen=True)
class _Cursors:
    lsn: Ints
    idx: Ints
    commit_ts: Ints
    xid: Ints


class _Wire:
    """Messages as one buffer, with the fields that numbering needs read by column."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._buffer = b"".join(messages)
        self._bytes = np.frombuffer(self._buffer, dtype=np.uint8)
        lengths = np.fromiter(map(len, messages), dtype=np.int64, count=len(messages))
        if (lengths <= XLOG_HEADER_BYTES).any():
            raise ProtocolError("a replication message is empty", fix="reconnect")
        self._end = np.cumsum(lengths)
        self._start = self._end - lengths
        self._body = self._start + XLOG_HEADER_BYTES
        self.kind = self._bytes[self._body]
        unknown = np.flatnonzero(~(_ROWS | _KNOWN)[self.kind])
        if len(unknown):
            start = int(self._body[unknown[0]])
            raise ProtocolError(
                f"unknown pgoutput message {self._buffer[start : start + 1]!r} "
                f"at {format_lsn(int(self._int64(unknown[:1], 1 - XLOG_HEADER_BYTES)[0]))}",
                fix="check that the slot's plugin is pgoutput and the server is version 14 to 18",
            )

    def message(self, position: int) -> bytes:
        return self._buffer[self._body[position] : self._end[position]]

    def payload(self, row: Ints) -> pa.Array:
        """The messages of ``row`` without their envelopes, copied in native code."""
        is_new = np.diff(row, prepend=-1) != 0
        unique, inverse = row[is_new], np.cumsum(is_new) - 1
        # Taken together, starts and ends are the offsets of an array in which every other value
        # is a wanted message and those between are what lies between.
        offsets = np.empty(2 * len(unique), dtype=np.int32)
        offsets[0::2], offsets[1::2] = self._body[unique], self._end[unique]
        spans = pa.Array.from_buffers(
            pa.binary(),
            len(offsets) - 1,
            [None, pa.py_buffer(offsets), pa.py_buffer(self._buffer)],
        )
        return spans.take(pa.array(2 * inverse))

    def begins(self, at: Ints) -> tuple[Ints, Ints, Ints]:
        """Commit LSN, commit time (Unix microseconds) and xid of Begin messages."""
        self._require(at, 21)
        return self._int64(at, 1), self._int64(at, 9) + POSTGRES_EPOCH_US, self._int32(at, 17)

    def truncated(self, at: Ints) -> Ints:
        """How many tables the messages of ``at`` truncate; nonsense for those that are none."""
        wanted = self.kind[at] == _TRUNCATE
        count = np.ones(len(at), dtype=np.int64)
        self._require(at[wanted], 6)
        count[wanted] = self._int32(at[wanted], 1)
        if wanted.any():
            self._require(at[wanted], 6 + 4 * count[wanted])
        return count

    def relation(self, row: Ints, nth: Ints) -> Ints:
        """The relation of each row: at a fixed place, or the nth of a truncate; 0 for messages."""
        place = np.where(self.kind[row] == _TRUNCATE, 6 + 4 * nth, 1)
        self._require(row, place + 4)
        found: Ints = np.where(self.kind[row] == _MESSAGE, 0, self._int32(row, place))
        return found

    def outside_transactions(self) -> Ints:
        """Logical messages that were emitted without a transaction."""
        at = np.flatnonzero(self.kind == _MESSAGE)
        self._require(at, 14)
        loose: Ints = at[self._bytes[self._body[at] + 1] == 0]
        return loose

    def loose(self, at: Ints) -> tuple[Ints, Ints]:
        """LSN and time of such messages; the time is when the server sent them."""
        sent_at = self._int64(at, 17 - XLOG_HEADER_BYTES) + POSTGRES_EPOCH_US
        return self._int64(at, 2), sent_at

    def _require(self, at: Ints, size: int | Ints) -> None:
        if (self._end[at] - self._body[at] < size).any():
            raise ProtocolError("a pgoutput message is shorter than its kind", fix="reconnect")

    def _int32(self, at: Ints, place: int | Ints) -> Ints:
        return self._gather(at, place, ">u4")

    def _int64(self, at: Ints, place: int | Ints) -> Ints:
        return self._gather(at, place, ">i8")

    def _gather(self, at: Ints, place: int | Ints, dtype: str) -> Ints:
        """Big-endian integers at ``place`` bytes into the bodies of ``at``."""
        width = np.dtype(dtype).itemsize
        # Every byte position as the start of an integer: no copy, unaligned reads on demand.
        windows = np.ndarray(
            (len(self._buffer) - width + 1,), dtype=dtype, buffer=self._buffer, strides=(1,)
        )
        found: Ints = windows[self._body[at] + place].astype(np.int64)
        return found
