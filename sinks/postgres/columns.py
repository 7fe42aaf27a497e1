"""The types of the columns of target tables. Pure.

A type that is not built in is looked for at the destination by its name. What is not there becomes
text, which holds every value as the source wrote it; a domain becomes its base type first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psycopg import sql

from cdc.decoding.relation import Column, Relation
from cdc.decoding.types.builtin import ELEMENT_OF_ARRAY
from cdc.decoding.types.names import describe_type

_FIRST_CUSTOM_OID = 10_000

HasType = Callable[[str], bool]
"""Whether the destination has a type of this name, as SQL writes it."""


@dataclass(frozen=True)
class ColumnType:
    """A column's type at the destination, and at the source if that one does not exist here."""

    name: str
    lacking: str | None = None


def column_type(column: Column, relation: Relation, has_type: HasType) -> ColumnType:
    """What a column of the source is at the destination."""
    found = _known(column.type_oid, column.typmod, relation, has_type)
    if found is not None:
        return ColumnType(found)
    said = describe_type(column.type_oid, column.typmod, relation.catalog.types)
    return ColumnType("text", lacking=said)


def _known(oid: int, typmod: int, relation: Relation, has_type: HasType) -> str | None:
    notes = relation.catalog.types
    note = notes.get(oid)
    element = ELEMENT_OF_ARRAY.get(oid) or (note.element if note else 0)
    if element:
        found = _known(element, typmod, relation, has_type)
        return None if found is None else f"{found}[]"
    if note is not None:
        named = sql.Identifier(note.name).as_string(None)
        if has_type(named):
            return named
        # A value of a domain is one of its base type.
        return _known(note.base, note.typmod, relation, has_type) if note.base else None
    if oid >= _FIRST_CUSTOM_OID:
        return None
    named = describe_type(oid, typmod)
    return None if named.startswith("type ") else named
