"""What two versions of a table differ in, and how a consumer learns of it. Pure.

Versions are compared by what they describe, not by their bytes: two descriptions that say the same
of name, replica identity, columns and key are one version, whatever else came with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cdc.decoding.column_diff import ColumnShape, diff_columns
from cdc.decoding.relation import Column, Relation
from cdc.decoding.types.names import describe_type

IDENTITY_WORDS = {"d": "default", "n": "nothing", "f": "full", "i": "index"}
"""Replica identities as ``ALTER TABLE … REPLICA IDENTITY`` spells them."""


def describe(column: Column, relation: Relation) -> str:
    """A column's type as Postgres writes it."""
    return describe_type(column.type_oid, column.typmod, relation.catalog.types)


def shapes(relation: Relation) -> list[ColumnShape]:
    """The columns as a diff compares them, with their numbers if the catalog has said them."""
    numbers = relation.attnums or (None,) * len(relation.columns)
    return [
        ColumnShape(number, column.name, column.type_oid, column.typmod)
        for number, column in zip(numbers, relation.columns, strict=True)
    ]


def same_columns(old: Relation, new: Relation) -> bool:
    """Whether they have the same columns; numbers count only where both have them."""
    if old.attnums and new.attnums:
        return shapes(old) == shapes(new)
    return [replace(one, attnum=None) for one in shapes(old)] == [
        replace(one, attnum=None) for one in shapes(new)
    ]


def key_of(relation: Relation) -> list[str]:
    """The names of the key's columns, in key order."""
    return [relation.columns[at].name for at in relation.key]


def same_key(old: Relation, new: Relation, renamed: Mapping[str, str]) -> bool:
    """Whether they have the same key, also if one of its columns has another name now.

    The catalog may no longer know this version when it is asked. Then the order of the key's
    columns is not known, and of a table whose messages do not say its key not even the columns.
    """
    before, after = [renamed.get(name, name) for name in key_of(old)], key_of(new)
    if old.key_noted == new.key_noted:
        return before == after
    if old.said_key and new.said_key:
        return set(before) == set(after)
    return True


def same_table(old: Relation, new: Relation) -> bool:
    """Whether both describe one version."""
    return (
        (old.namespace, old.name, old.replica_identity)
        == (new.namespace, new.name, new.replica_identity)
        and same_columns(old, new)
        and same_key(old, new, {})
    )


def columns_of(relation: Relation) -> list[dict[str, object]]:
    """Name, type, and whether it is part of the key, of each column."""
    return [
        {"name": column.name, "type": describe(column, relation), "key": at in relation.key}
        for at, column in enumerate(relation.columns)
    ]


def change_between(old: Relation, new: Relation, version: int) -> dict[str, object]:
    """The record of a ``schema_change`` message: the new version, and what differs."""
    diff = diff_columns(shapes(old), shapes(new))
    was = {column.name: describe(column, old) for column in old.columns}
    now = {column.name: describe(column, new) for column in new.columns}
    change: dict[str, object] = {
        "version": version,
        "table": _table(new),
        "columns": columns_of(new),
        "added": [{"name": c.name, "type": now[c.name]} for _, c in diff.added],
        "dropped": [{"name": c.name, "type": was[c.name]} for c in diff.dropped],
        "renamed": [{"from": before, "to": after} for before, after in diff.renamed],
        "retyped": [
            {"name": after.name, "from": was[before.name], "to": now[after.name]}
            for before, after in diff.retyped
        ],
    }
    if _table(old) != _table(new):
        change["renamed_table"] = {"from": _table(old), "to": _table(new)}
    if old.replica_identity != new.replica_identity:
        change["replica_identity"] = {
            "from": IDENTITY_WORDS[old.replica_identity],
            "to": IDENTITY_WORDS[new.replica_identity],
        }
    if not same_key(old, new, dict(diff.renamed)):
        change["key"] = {"from": key_of(old), "to": key_of(new)}
    return change


def _table(relation: Relation) -> dict[str, str]:
    return {"schema": relation.namespace, "name": relation.name}
