"""pgoutput messages as one buffer, with the fields that numbering needs read by column. No I/O.

What must always hold: no read leaves the message it belongs to; bytes that do not say what their
kind must say are a protocol error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.cursor import format_lsn
from cdc.errors import ProtocolError
from cdc.replication.protocol import POSTGRES_EPOCH_US, XLOG_HEADER_BYTES

Ints = npt.NDArray[np.int64]

BEGIN, COMMIT, RELATION, TRUNCATE, MESSAGE = (ord(letter) for letter in "BCRTM")


def _kinds(letters: str) -> npt.NDArray[np.bool_]:
    table = np.zeros(256, dtype=bool)
    table[[ord(letter) for letter in letters]] = True
    return table


ROWS = _kinds("IUDTM")
"""By kind, whether a message is a change."""

_OTHERS = _kinds("BCRYO")


class Wire:
    """XLogData messages, envelopes included."""

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
        unknown = np.flatnonzero(~(ROWS | _OTHERS)[self.kind])
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
        wanted = self.kind[at] == TRUNCATE
        count = np.ones(len(at), dtype=np.int64)
        self._require(at[wanted], 6)
        count[wanted] = self._int32(at[wanted], 1)
        if wanted.any():
            self._require(at[wanted], 6 + 4 * count[wanted])
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
