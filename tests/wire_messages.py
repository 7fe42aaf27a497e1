"""Transactions as the reader gets them from the server, one message after another."""

from __future__ import annotations

import struct

from tests import pgoutput

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])

PART = pgoutput.relation(2, "public", "part", [("id", 23, True)])

OWN = pgoutput.relation(9, "walbrook", "sources", [("id", 23, True)])


def wire(*messages: bytes, lsn: int = 0) -> list[bytes]:
    header = struct.pack(">cQQq", b"w", lsn, lsn, 5)
    return [header + message for message in messages]


def transaction(lsn: int, *messages: bytes) -> list[bytes]:
    return [pgoutput.begin(lsn, lsn * 1000, lsn + 1), *messages, pgoutput.commit(lsn, lsn + 8, 0)]


def row(oid: int = 1) -> bytes:
    return pgoutput.insert(oid, ["1"])
