"""The columns of target tables: their types, and what becomes of them between two versions. Pure.

A type that is not built in is looked for at the destination by its name. What is not there becomes
text, which holds every value as the source wrote it; a domain becomes its base type first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psycopg import sql

from cdc.decoding.column_diff import ColumnDiff, diff_columns
from cdc.decoding.relation import Column, Relation
from cdc.decoding.schema_change import shapes
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


def is_row_identity(relation: Relation) -> bool:
    """Whether a row is known by all its values, because the table has no key."""
    return relation.replica_identity == "f" and len(relation.key) == len(relation.columns)


def key_names(relation: Relation) -> tuple[str, ...]:
    """The key's columns in key order; none if rows are known by all their values."""
    if is_row_identity(relation):
        return ()
    return tuple(relation.columns[at].name for at in relation.key)


def differences(old: Relation, new: Relation) -> ColumnDiff:
    """What became of a table's columns; of another table of the same name, by their names."""
    was, now = shapes(old), shapes(new)
    if old.oid == new.oid:
        return diff_columns(was, now)
    before, after = {column.name: column for column in was}, {column.name for column in now}
    return ColumnDiff(
        added=tuple((at, column) for at, column in enumerate(now) if column.name not in before),
        dropped=tuple(column for column in was if column.name not in after),
        renamed=(),
        retyped=tuple(
            (before[column.name], column)
            for column in now
            if column.name in before and before[column.name].type != column.type
        ),
    )


def names_in(current: Relation, older: Relation) -> tuple[str | None, ...]:
    """For each column of an older version the name it has in ``current``; None if it has gone."""
    numbers, old_numbers = current.attnums, older.attnums
    if current.oid == older.oid and numbers and old_numbers:
        pairs = zip(numbers, current.columns, strict=True)
        by_number = {number: column.name for number, column in pairs}
        return tuple(by_number.get(number) for number in old_numbers)
    present = {column.name for column in current.columns}
    return tuple(c.name if c.name in present else None for c in older.columns)
