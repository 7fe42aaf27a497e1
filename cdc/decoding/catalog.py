"""What the source's catalog says of a table version beyond its Relation message.

pgoutput names types by number, and says neither which columns make up the primary key nor which
place a column has had from the beginning. The reader asks the catalog once for each table version,
and the answer stands behind the message in the log, so that old segments decode without a server.
Invariant: a note that was written is read back as it was, and one that cannot be read
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from cdc.errors import DecodeError


@dataclass(frozen=True)
class TypeNote:
    """A type that is not built in, as ``pg_type`` has it."""

    oid: int
    name: str
    kind: str  # typtype: b, c, d, e, r, m
    extension: str = ""  # that it belongs to
    element: int = 0  # of an array
    delimiter: str = ","  # of arrays of this type
    base: int = 0  # of a domain
    typmod: int = -1  # of a domain's base
    dimensions: int = 0  # of a domain over an array
    fields: tuple[tuple[str, int, int], ...] = ()  # of a composite: name, type, typmod


@dataclass(frozen=True)
class CatalogNote:
    """The catalog's answer for one table version; what it does not know is left out."""

    key: tuple[str, ...] = ()  # columns, in key order
    attnums: tuple[int, ...] = ()  # by column of the message
    dimensions: tuple[int, ...] = ()  # as declared, by column of the message
    types: Mapping[int, TypeNote] = field(default_factory=dict)


def write_note(note: CatalogNote) -> bytes:
    """All of it but the key, which has a form of its own; empty if there is nothing to say."""
    content: dict[str, Any] = {}
    if note.attnums:
        content["attnums"] = note.attnums
    if any(note.dimensions):
        content["dimensions"] = note.dimensions
    if note.types:
        content["types"] = [_written(note.types[oid]) for oid in sorted(note.types)]
    return orjson.dumps(content) if content else b""


def read_note(data: bytes, columns: int) -> CatalogNote:
    """What ``write_note`` wrote for a table version of so many columns."""
    try:
        content = orjson.loads(data)
        types = [_read(given) for given in content.get("types", ())]
        note = CatalogNote(
            attnums=tuple(map(int, content.get("attnums", ()))),
            dimensions=tuple(map(int, content.get("dimensions", ()))),
            types={one.oid: one for one in types},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as fault:
        raise _broken(str(fault)) from None
    if any(len(one) not in (0, columns) for one in (note.attnums, note.dimensions)):
        raise _broken(f"it is not of {columns} columns")
    return note


_PLAIN = TypeNote(0, "", "b")


def _written(note: TypeNote) -> dict[str, Any]:
    """Only what differs from a plain type: this stands in every frame."""
    return {
        name: value
        for name, value in vars(note).items()
        if name in ("oid", "name", "kind") or value != getattr(_PLAIN, name)
    }


def _read(given: dict[str, Any]) -> TypeNote:
    fields = tuple((str(n), int(t), int(m)) for n, t, m in given.pop("fields", ()))
    if len({name for name, _, _ in fields}) != len(fields):
        raise ValueError("two fields of a type have one name")
    note = TypeNote(**given, fields=fields)
    for name, value in vars(note).items():
        if type(value) is not type(getattr(_PLAIN, name)):
            raise TypeError(f"the {name} of a type is a {type(value).__name__}")
    return note


def _broken(why: str) -> DecodeError:
    return DecodeError(
        f"What the log keeps of the catalog cannot be read: {why}",
        fix="it was written by another version or is damaged; read it from the slot again",
    )
