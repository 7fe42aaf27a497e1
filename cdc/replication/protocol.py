"""The streaming replication protocol: the envelopes around pgoutput messages. No I/O.

Server to client: ``w`` (XLogData: a message) and ``k`` (keepalive). Client to server: ``r``
(standby status update). Integers are big-endian, times are microseconds since 2000-01-01 UTC.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cdc.errors import ProtocolError

XLOG_DATA = ord("w")
KEEPALIVE = ord("k")
XLOG_HEADER_BYTES = 25  # 'w', start LSN, end LSN, send time
POSTGRES_EPOCH_US = 946_684_800_000_000

_KEEPALIVE = struct.Struct(">cQqB")
_STATUS = struct.Struct(">cQQQqB")
_END_LSN = struct.Struct(">Q")


class Keepalive(NamedTuple):
    """Everything before ``end_lsn`` was sent; the server may ask for an answer at once."""

    end_lsn: int
    reply_requested: bool


def parse_keepalive(data: bytes) -> Keepalive:
    if len(data) != _KEEPALIVE.size or data[0] != KEEPALIVE:
        raise ProtocolError(
            f"an unknown replication message starts with byte {data[:1]!r}, {len(data)} bytes",
            fix="check that nothing but Postgres answers at the configured address",
        )
    _kind, end_lsn, _sent_at, reply = _KEEPALIVE.unpack(data)
    return Keepalive(end_lsn, bool(reply))


def server_end_lsn(xlog_data: bytes) -> int:
    """The end of the server's WAL when it sent this XLogData."""
    end: int = _END_LSN.unpack_from(xlog_data, 9)[0]
    return end


def status_update(
    *, received_lsn: int, confirmed_lsn: int, now_us: int, reply_requested: bool
) -> bytes:
    """Say what was received, and what Postgres may forget: nothing above ``confirmed_lsn``."""
    return _STATUS.pack(
        b"r",
        received_lsn,
        confirmed_lsn,
        confirmed_lsn,
        now_us - POSTGRES_EPOCH_US,
        int(reply_requested),
    )
