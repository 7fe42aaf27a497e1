"""The Relation message: which table, which columns, which of them identify a row.

Where the reader has asked the catalog (``catalog``), the answer stands behind the message's last
byte (``with_catalog``), and the two together are the schema that the log keeps.

Invariants: every byte of the message is accounted for. A message that is cut, has
bytes left over or says something impossible is refused; nothing is guessed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

from cdc.decoding.catalog import CatalogNote, read_note, write_note
from cdc.errors import DecodeError

_ENCODING, _KEY, _CATALOG = b"E", b"K", b"C"

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
    key_noted: bool = False  # whether the key and its order are certain
    catalog: CatalogNote = field(default_factory=CatalogNote)
    codec: str = ""  # of the texts in its rows, as Python calls it; UTF-8 if it is not said

    @property
    def attnums(self) -> tuple[int, ...] | None:
        """The number that each column has kept since it was made, through every rename."""
        return self.catalog.attnums or None

    @property
    def said_key(self) -> tuple[int, ...]:
        """The key's columns as the message itself has them, in column order.

        Empty if it does not say: the whole row is the replica identity, or none of it.
        """
        return () if self.replica_identity == "f" else _flagged(self.columns)

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


def parse_relation(message: bytes) -> Relation:
    """Read a raw Relation message, from its ``R`` on."""
    reader = _MessageReader(message)
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
    codec = reader.name("encoding") if reader.next_is(_ENCODING) else ""
    key = _key(reader, columns)
    catalog = _catalog(reader, columns)
    reader.end()
    relation = Relation(
        oid, namespace, name, identity, columns, key or _flagged(columns), True, catalog, codec
    )
    if key is not None:
        return relation
    # A catalog that numbers the columns has the table: if it noted no key, there is none.
    certain = len(relation.said_key) == 1 if relation.said_key else bool(catalog.attnums)
    return replace(relation, key_noted=certain)


def _flagged(columns: tuple[Column, ...]) -> tuple[int, ...]:
    return tuple(at for at, column in enumerate(columns) if column.is_key)


def from_encoding(message: bytes, codec: str) -> bytes:
    """A message in another encoding: its names in UTF-8, and a note about the texts of its rows."""
    reader = _MessageReader(message, codec)
    head = reader.take(5, "oid")
    names = [reader.name("namespace", may_be_empty=True), reader.name("table name")]
    parts = [head, *(name.encode() + b"\0" for name in names), reader.take(3, "column count")]
    for _ in range(int.from_bytes(parts[-1][1:], "big")):
        flags = reader.take(1, "column flags")
        name = reader.name("column name")
        parts += (flags, name.encode(), b"\0", reader.take(8, "type"))
    reader.end()
    return b"".join([*parts, _ENCODING, codec.encode(), b"\0"])


def with_catalog(message: bytes, note: CatalogNote) -> bytes:
    """The message with what the catalog says of its table behind it.

    The catalog may be ahead of the message. If the message says which columns are the key, the
    catalog adds only their order. If it does not, the catalog's key is taken, provided that this
    version has its columns.
    """
    relation = parse_relation(message)
    positions = {column.name: at for at, column in enumerate(relation.columns)}
    said = {relation.columns[at].name for at in relation.said_key}
    key = note.key
    if key and (set(key) == said if said else positions.keys() >= set(key)):
        message += struct.pack(f">cH{len(key)}H", _KEY, len(key), *map(positions.get, key))
    rest = write_note(note)
    return message + struct.pack(">cI", _CATALOG, len(rest)) + rest if rest else message


def _catalog(reader: _MessageReader, columns: tuple[Column, ...]) -> CatalogNote:
    if not reader.next_is(_CATALOG):
        return CatalogNote()
    return read_note(reader.take(reader.uint32("catalog's length"), "catalog"), len(columns))


def _key(reader: _MessageReader, columns: tuple[Column, ...]) -> tuple[int, ...] | None:
    if not reader.next_is(_KEY):
        return None
    key = tuple(reader.uint16("key column") for _ in range(reader.uint16("key column count")))
    if not key or max(key) >= len(columns) or len(set(key)) != len(key):
        raise reader.broken(f"its key is the columns {key} of {len(columns)}")
    return key


def _column(reader: _MessageReader) -> Column:
    flags = reader.byte("column flags")
    if flags > 1:
        raise reader.broken(f"a column has the flags {flags}")
    name = reader.name("column name")
    return Column(name, reader.uint32("type oid"), reader.int32("typmod"), flags == 1)


class _MessageReader:
    """Takes the fields of a message one after another, never past its end."""

    def __init__(self, message: bytes, codec: str = "utf-8") -> None:
        self._message = message
        self._codec = codec
        self._at = 0

    def next_is(self, mark: bytes) -> bool:
        """Whether this byte comes next; then it is taken."""
        found = self._message.startswith(mark, self._at)
        self._at += found
        return found

    def take(self, size: int, field: str) -> bytes:
        taken = self._message[self._at : self._at + size]
        if len(taken) < size:
            raise self.broken(f"it ends within its {field}")
        self._at += size
        return taken

    def byte(self, field: str) -> int:
        return self.take(1, field)[0]

    def uint16(self, field: str) -> int:
        return int.from_bytes(self.take(2, field), "big")

    def uint32(self, field: str) -> int:
        return int.from_bytes(self.take(4, field), "big")

    def int32(self, field: str) -> int:
        return int(struct.unpack(">i", self.take(4, field))[0])

    def name(self, field: str, *, may_be_empty: bool = False) -> str:
        stop = self._message.find(b"\0", self._at)
        if stop < 0:
            raise self.broken(f"its {field} has no end")
        raw = self._message[self._at : stop]
        self._at = stop + 1
        if not raw and not may_be_empty:
            raise self.broken(f"its {field} is empty")
        try:
            return raw.decode(self._codec)
        except UnicodeDecodeError:
            raise self.broken(
                f"its {field} {raw!r} is not {self._codec.upper()}",
                fix="rename it; then, the service being stopped, move the slot past what was "
                "written under the old name with pg_replication_slot_advance, start, and accept "
                "the gap as it is reported then",
            ) from None

    def end(self) -> None:
        if self._at != len(self._message):
            raise self.broken(f"{len(self._message) - self._at} bytes follow its end")

    def broken(self, why: str, fix: str = "") -> DecodeError:
        return DecodeError(
            f"A Relation message cannot be read: {why}",
            fix=fix or "check that the source speaks pgoutput protocol 1 to 4 without streaming",
        )
