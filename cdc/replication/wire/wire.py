"""pgoutput messages as one buffer, with the fields that numbering needs read by column. No I/O.

Invariants: no read leaves the message it belongs to; bytes that do not say what their
kind must say are a protocol error; nothing is allocated that the messages' own bytes do not bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.cursor import format_lsn
from cdc.errors import ProtocolError
from cdc.replication.protocol import POSTGRES_EPOCH_US, XLOG_HEADER_BYTES

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

BEGIN, COMMIT, RELATION, TRUNCATE, MESSAGE = (ord(letter) for letter in "BCRTM")


def kinds(letters: str) -> Mask:
    """By kind, whether it is one of ``letters``."""
    table = np.zeros(256, dtype=bool)
    table[[ord(letter) for letter in letters]] = True
    return table


ROWS: Final = kinds("IUDTM")
"""By kind, whether a message is a change."""

CONTROLS: Final = kinds("SEcApbPKr")
"""By kind, whether a message belongs to streaming or to two-phase commit."""

_KNOWN: Final = kinds("IUDTMBCRYOSEcApbPKr")
_TRUNCATE_OF_ONE_BYTES: Final = 10

HEARTBEAT_PREFIX: Final = "walbrook.heartbeat"
"""Logical messages with this prefix are our own: counted, never logged."""

_HEARTBEAT: Final = np.frombuffer(HEARTBEAT_PREFIX.encode() + b"\0", dtype=np.uint8)
MESSAGE_PREFIX_AT: Final = 10
"""Where a logical message has its prefix: behind kind, flags and LSN."""

_CONTENT_AT: Final = MESSAGE_PREFIX_AT + len(_HEARTBEAT) + 4


class Wire:
    """XLogData messages, envelopes included; or some of them (``select``), in order."""

    def __init__(self, buffer: bytearray, body: Ints, end: Ints, place: Ints) -> None:
        self._buffer = buffer
        self._bytes = np.frombuffer(buffer, dtype=np.uint8)
        self._body = body
        self._end = end
        self.place = place
        """The messages' positions in the batch they came with."""
        self.kind = self._bytes[body]

    @classmethod
    def join(cls, messages: Sequence[bytes]) -> Self:
        lengths = np.fromiter(map(len, messages), dtype=np.int64, count=len(messages))
        if (lengths <= XLOG_HEADER_BYTES).any():
            raise ProtocolError("a replication message is empty", fix="reconnect")
        end = np.cumsum(lengths)
        body = end - lengths + XLOG_HEADER_BYTES
        wire = cls(bytearray().join(messages), body, end, np.arange(len(messages)))
        unknown = np.flatnonzero(~_KNOWN[wire.kind])
        if len(unknown):
            at = unknown[:1]
            lsn = int(wire._int64(at, 1 - XLOG_HEADER_BYTES)[0])
            raise ProtocolError(
                f"unknown pgoutput message {bytes([wire.kind[at[0]]])!r} at {format_lsn(lsn)}",
                fix="check that the slot's plugin is pgoutput and the server is version 14 to 18",
            )
        return wire

    def __len__(self) -> int:
        return len(self.kind)

    def select(self, at: Ints) -> Wire:
        """Only the messages of ``at``, over the same buffer."""
        return Wire(self._buffer, self._body[at], self._end[at], self.place[at])

    def without_xid(self, at: Ints) -> tuple[Wire, Ints]:
        """The messages of ``at`` as they are outside of a stream, and the xids that were in them.

        In a stream the xid stands between a message's kind and the rest. The kind is written over
        the xid's last byte, in place, and the message begins there.
        """
        self._require(at, 6)
        xid = self._int32(at, 1)
        self._bytes[self._body[at] + 4] = self.kind[at]
        body = self._body.copy()
        body[at] += 4
        return Wire(self._buffer, body, self._end, self.place), xid

    def message(self, position: int) -> bytes:
        return bytes(self._buffer[self._body[position] : self._end[position]])

    def payload(self, row: Ints, nth: Ints) -> pa.Array:
        """The messages of ``row`` without their envelopes, copied in native code.

        A truncate of several tables is written as one a table, or n tables would take n² bytes.
        """
        size = self._end[row] - self._body[row]
        several = (self.kind[row] == TRUNCATE) & (size > _TRUNCATE_OF_ONE_BYTES)
        if not several.any():
            return self._spans(row)
        ones = self._truncates_of_one(row[several], nth[several])
        order = np.concatenate([np.flatnonzero(~several), np.flatnonzero(several)])
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_arrays([self._spans(row[~several]), ones]).take(pa.array(back))

    def begins(self, at: Ints) -> tuple[Ints, Ints, Ints]:
        """Commit LSN, commit time (Unix microseconds) and xid of Begin messages."""
        self._require(at, 21)
        return self._lsn(at, 1), self._int64(at, 9) + POSTGRES_EPOCH_US, self._int32(at, 17)

    def rows(self) -> tuple[Ints, Ints]:
        """Every change: the position of its message, and which of a truncate's tables it is."""
        rows = np.flatnonzero(ROWS[self.kind])
        repeats = np.where(self.kind[rows] == TRUNCATE, self.truncated(rows), 1)
        row = np.repeat(rows, repeats)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        return row, nth

    def truncated(self, at: Ints) -> Ints:
        """How many tables the messages of ``at`` truncate; nonsense for those that are none."""
        wanted = self.kind[at] == TRUNCATE
        count = np.ones(len(at), dtype=np.int64)
        self._require(at[wanted], 6)
        count[wanted] = self._int32(at[wanted], 1)
        size = self._end[at[wanted]] - self._body[at[wanted]]
        if (size != 6 + 4 * count[wanted]).any():
            raise ProtocolError("a truncate does not hold the tables it counts", fix="reconnect")
        return count

    def relation(self, row: Ints, nth: Ints) -> Ints:
        """The relation of each row: at a fixed place, or the nth of a truncate; 0 for messages."""
        place = np.where(self.kind[row] == TRUNCATE, 6 + 4 * nth, 1)
        self._require(row, place + 4)
        found: Ints = np.where(self.kind[row] == MESSAGE, 0, self._int32(row, place))
        return found

    def outside_transactions(self) -> Ints:
        """Logical messages that were emitted without a transaction."""
        at = np.flatnonzero(self.kind == MESSAGE)
        self._require(at, 14)
        loose: Ints = at[self._bytes[self._body[at] + 1] == 0]
        return loose

    def loose(self, at: Ints) -> tuple[Ints, Ints]:
        """LSN and time of such messages; the time is when the server sent them.

        Postgres names the end of the message's record. The record behind it may be a commit, whose
        rows have that LSN, so the message is placed at the last byte of its own.
        """
        sent_at = self._int64(at, 17 - XLOG_HEADER_BYTES) + POSTGRES_EPOCH_US
        return np.maximum(self._lsn(at, 2), 1) - 1, sent_at

    def heartbeats(self) -> Ints:
        """Logical messages that are heartbeats of our own."""
        at = np.flatnonzero(self.kind == MESSAGE)
        at = at[self._end[at] - self._body[at] >= _CONTENT_AT]
        prefix = self._bytes[
            self._body[at][:, None] + np.arange(MESSAGE_PREFIX_AT, _CONTENT_AT - 4)
        ]
        ours: Ints = at[(prefix == _HEARTBEAT).all(axis=1)]
        return ours

    def heartbeat_content(self, position: int) -> bytes:
        content = self.message(position)[_CONTENT_AT:]
        if int(self._int32(np.array([position]), _CONTENT_AT - 4)[0]) != len(content):
            raise ProtocolError("a heartbeat is not as long as it says", fix="reconnect")
        return content

    def messages_with(self, heads: Sequence[bytes]) -> Ints:
        """Logical messages whose prefix begins with one of ``heads``, each of eight bytes."""
        at = np.flatnonzero(self.kind == MESSAGE)
        if not len(at):
            return at
        at = at[self._end[at] - self._body[at] >= MESSAGE_PREFIX_AT + 8]
        wanted = [int.from_bytes(head) for head in heads]
        found: Ints = at[np.isin(self._int64(at, MESSAGE_PREFIX_AT), wanted)]
        return found

    def _spans(self, row: Ints) -> pa.Array:
        # Taken together, starts and ends are the offsets of an array in which every other value
        # is a wanted message and those between are what lies between.
        offsets = np.empty(2 * len(row), dtype=np.int32)
        offsets[0::2], offsets[1::2] = self._body[row], self._end[row]
        spans = pa.Array.from_buffers(
            pa.binary(),
            max(0, len(offsets) - 1),
            [None, pa.py_buffer(offsets), pa.py_buffer(self._buffer)],
        )
        return spans.take(pa.array(2 * np.arange(len(row))))

    def _truncates_of_one(self, row: Ints, nth: Ints) -> pa.Array:
        """For each row a message that truncates its table alone, with the same options."""
        body = self._body[row]
        ones = np.zeros((len(row), _TRUNCATE_OF_ONE_BYTES), dtype=np.uint8)
        ones[:, 0], ones[:, 4] = TRUNCATE, 1
        ones[:, 5] = self._bytes[body + 5]
        ones[:, 6:] = self._bytes[(body + 6 + 4 * nth)[:, None] + np.arange(4)]
        offsets = np.arange(len(row) + 1, dtype=np.int32) * _TRUNCATE_OF_ONE_BYTES
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(ones)]
        return pa.Array.from_buffers(pa.binary(), len(row), buffers)

    def _require(self, at: Ints, size: int | Ints) -> None:
        if (self._end[at] - self._body[at] < size).any():
            raise ProtocolError("a pgoutput message is shorter than its kind", fix="reconnect")

    def _lsn(self, at: Ints, place: int) -> Ints:
        lsn = self._int64(at, place)
        if (lsn < 0).any():
            raise ProtocolError("a message names an LSN that no server reaches", fix="reconnect")
        return lsn

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
