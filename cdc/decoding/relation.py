"""The Relation message: which table, which columns, which of them identify a row.

pgoutput says which columns are in the replica identity, not which make up the primary key or in
which order. Where the reader has asked the catalog, the answer stands behind the message's last
byte (``with_key``), and the two together are the schema that the log keeps.

What must always hold: every byte of the message is accounted for. A message that is cut, has
bytes left over or says something impossible is refused; nothing is guessed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cdc.errors import DecodeError

_KEY = b"K"

IDENTITIES = "dnfi"
"""Replica identities as Postgres writes them: default, nothing, full, index."""


@dataclass(frozen=True)
class Column:
    """A column as the source described it; ``is_key``: part of the replica identity."""

    name: str
    type_oid: int
    typmod: int
    is_key: bool


@dataclass(frozen=True)
class Relation:
    """One version of a table."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]
    key: tuple[int, ...]  # positions of the key's columns, in key order

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


def parse_relation(message: bytes) -> Relation:
    """Read a raw Relation message, from its ``R`` on."""
    reader = _Reader(message)
    if reader.byte("kind") != ord("R"):
        raise reader.broken("it does not start with R")
    oid = reader.uint32("oid")
    # Postgres sends its own catalog's namespace as an empty name.
    namespace = reader.name("namespace", may_be_empty=True) or "pg_catalog"
    name = reader.name("table name")
    identity = chr(reader.byte("replica identity"))
    if identity not in IDENTITIES:
        raise reader.broken(f"its replica identity is {identity!r}")
    columns = tuple(_column(reader) for _ in range(reader.uint16("column count")))
    if len({column.name for column in columns}) != len(columns):
        raise reader.broken("two of its columns have one name")
    key = _key(reader, columns)
    reader.end()
    return Relation(oid, namespace, name, identity, columns, key)


def with_key(message: bytes, names: Sequence[str]) -> bytes:
    """The message with its table's key noted behind it; without change if that cannot be.

    The catalog may be ahead of the message: a key with a column that the message does not have is
    not this version's.
    """
    positions = {column.name: at for at, column in enumerate(parse_relation(message).columns)}
    if not names or not positions.keys() >= set(names):
        return message
    return message + struct.pack(f">cH{len(names)}H", _KEY, len(names), *map(positions.get, names))


def _key(reader: _Reader, columns: tuple[Column, ...]) -> tuple[int, ...]:
    """The noted key, or else the columns of the replica identity."""
    if reader.at_end:
        return tuple(at for at, column in enumerate(columns) if column.is_key)
    if reader.byte("key") != _KEY[0]:
        raise reader.broken("something other than its key follows its last column")
    key = tuple(reader.uint16("key column") for _ in range(reader.uint16("key column count")))
    if not key or max(key) >= len(columns) or len(set(key)) != len(key):
        raise reader.broken(f"its key is the columns {key} of {len(columns)}")
    return key


def _column(reader: _Reader) -> Column:
    flags = reader.byte("column flags")
    if flags > 1:
        raise reader.broken(f"a column has the flags {flags}")
    name = reader.name("column name")
    return Column(name, reader.uint32("type oid"), reader.int32("typmod"), flags == 1)


class _Reader:
    """Takes the fields of a message one after another, never past its end."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = 0

    def _take(self, size: int, field: str) -> bytes:
        taken = self._message[self._at : self._at + size]
        if len(taken) < size:
            raise self.broken(f"it ends within its {field}")
        self._at += size
        return taken

    def byte(self, field: str) -> int:
        return self._take(1, field)[0]

    def uint16(self, field: str) -> int:
        return int.from_bytes(self._take(2, field), "big")

    def uint32(self, field: str) -> int:
        return int.from_bytes(self._take(4, field), "big")

    def int32(self, field: str) -> int:
        return int(struct.unpack(">i", self._take(4, field))[0])

    def name(self, field: str, *, may_be_empty: bool = False) -> str:
        stop = self._message.find(b"\0", self._at)
        if stop < 0:
            raise self.broken(f"its {field} has no end")
        raw = self._message[self._at : stop]
        self._at = stop + 1
        if not raw and not may_be_empty:
            raise self.broken(f"its {field} is empty")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.broken(f"its {field} {raw!r} is not UTF-8") from None

    @property
    def at_end(self) -> bool:
        return self._at == len(self._message)

    def end(self) -> None:
        if self._at != len(self._message):
            raise self.broken(f"{len(self._message) - self._at} bytes follow its end")

    def broken(self, why: str) -> DecodeError:
        return DecodeError(
            f"A Relation message cannot be read: {why}",
            fix="check that the source speaks pgoutput protocol 1 to 4 without streaming",
        )
