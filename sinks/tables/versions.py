"""The columns of a table between two of its versions, and what a row of it is known by. Pure."""

from __future__ import annotations

from cdc.decoding.column_diff import ColumnDiff, diff_columns
from cdc.decoding.relation import Relation
from cdc.decoding.schema_change import shapes


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
