"""The columns of a table of the lake: those of the source's table, and before them our own. Pure.

Invariant: a column of the source keeps its number from the catalog in the field's metadata, so that
the table's own schema distinguishes a renamed column from a new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Final

import pyarrow as pa

from cdc.decoding.column_diff import ColumnShape, diff_columns
from cdc.decoding.relation import Relation
from cdc.errors import OperatorError
from sinks.lakehouse.table import ATTNUM
from sinks.tables.typed import plan_of, row_schema

DROPPED: Final = b"walbrook.dropped"
"""The key in a field's metadata of a column that the source has no more."""

DATE: Final = "walbrook_date"

OWN: Final = pa.schema(
    [
        pa.field("walbrook_action", pa.string()),
        pa.field("walbrook_lsn", pa.int64()),
        pa.field("walbrook_idx", pa.int64()),
        pa.field("walbrook_committed_at", pa.timestamp("us", tz="UTC")),
        pa.field("walbrook_old_key", pa.string()),
        pa.field("walbrook_unchanged", pa.string()),
        pa.field(DATE, pa.date32()),
    ]
)
"""What a row of a history has before the columns of its table."""


def source_columns(version: str) -> pa.Schema:
    """The columns of a table version, each with its number where the catalog has said it.

    Raises OperatorError for names that are one where case does not count, as in a lake.
    """
    plan = plan_of(version)
    seen: set[str] = set()
    for name in map(str.lower, plan.names):
        if name in seen:
            raise OperatorError(
                f"{plan.relation} has two columns {name}, which differ in case alone",
                fix="leave the table out with source.exclude_tables, or rename one of them",
            )
        seen.add(name)
    fields = plain_schema(row_schema(plan))
    numbers = plan.relation.attnums
    if numbers is None:
        return fields
    return pa.schema(
        [
            field.with_metadata({ATTNUM: str(number).encode()})
            for field, number in zip(fields, numbers, strict=True)
        ]
    )


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The same with the inner fields of lists and maps called as Arrow itself does.

    Formats have names of their own for them, which would make equal types differ.
    """
    return pa.schema([field.with_type(_plain(field.type)) for field in schema])


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _plain(each.type)) for each in kind])
    return kind


def number_of(field: pa.Field) -> int | None:
    """The number of a column in the source's catalog."""
    said = (field.metadata or {}).get(ATTNUM)
    return None if said is None else int(said)


def refuse_own_names(relation: Relation) -> None:
    """A history has columns of its own."""
    taken = {column.name.lower() for column in relation.columns} & set(OWN.names)
    if taken:
        raise OperatorError(
            f"{relation} has a column {min(taken)}, which its history needs for itself",
            fix="leave the table out with source.exclude_tables, or rename the column",
        )


@dataclass(frozen=True)
class Evolution:
    """How a table becomes one of another version.

    ``was`` names for each column of ``schema`` the column whose values it has, None for a new one.
    """

    schema: pa.Schema
    was: tuple[str | None, ...]
    added: tuple[pa.Field, ...]
    dropped: tuple[str, ...]  # that stay, and are to be marked so that none is taken for a new one
    rewrites: bool  # whether files must be rewritten, because one of their columns changed

    @property
    def is_needed(self) -> bool:
        return self.rewrites or bool(self.added or self.dropped)


def evolve(current: pa.Schema, version: str, *, same_table: bool, keeps: bool) -> Evolution:
    """Bring a table to a version of its source.

    A table that ``keeps`` dropped columns, as a history does, also keeps a column that has become
    text: values of any type have a place in it. Columns are known by their names alone where it is
    not the ``same_table`` of the source that the table was made for.
    """
    wanted = source_columns(version)
    own = OWN.names if keeps else []
    if keeps:
        refuse_own_names(plan_of(version).relation)
    there = [field for field in current if field.name not in own and not _is_dropped(field)]
    kept = _kept(there, wanted, same_table=same_table)
    fields: list[pa.Field] = []
    was_names: list[str] = []
    for field in current:
        new = kept.get(field.name)
        if new is not None:
            as_text = keeps and field.type == pa.string()
            fields.append(new.with_type(field.type if as_text else new.type))
        elif field.name in own:
            fields.append(field)
        elif keeps:
            gone = field.with_name(_free(field.name, wanted.names, current.names))
            fields.append(gone.with_metadata({DROPPED: b"1"}))
        else:
            continue
        was_names.append(field.name)
    rewrites = current.names != was_names or any(
        field.name != was or field.type != current.field(was).type
        for field, was in zip(fields, was_names, strict=True)
    )
    found = {field.name for field in kept.values()}
    added = tuple(field for field in wanted if field.name not in found)
    dropped = tuple(field.name for field in there if keeps and field.name not in kept)
    schema = pa.schema([*fields, *added])
    return Evolution(schema, (*was_names, *[None] * len(added)), added, dropped, rewrites)


def _kept(there: list[pa.Field], wanted: pa.Schema, *, same_table: bool) -> dict[str, pa.Field]:
    """The columns that are in both, by the names that they have in the table."""
    if not same_table:
        names = {field.name for field in there}
        return {field.name: field for field in wanted if field.name in names}
    kinds: dict[str, int] = {}

    def shapes(fields: Iterable[pa.Field]) -> list[ColumnShape]:
        return [
            ColumnShape(
                number_of(field), field.name, kinds.setdefault(str(field.type), len(kinds)), -1
            )
            for field in fields
        ]

    diff = diff_columns(shapes(there), shapes(wanted))
    now = {field.name: field.name for field in there} | dict(diff.renamed)
    gone = {column.name for column in diff.dropped}
    return {was: wanted.field(name) for was, name in now.items() if was not in gone}


def _is_dropped(field: pa.Field) -> bool:
    return DROPPED in (field.metadata or {})


def _free(name: str, wanted: list[str], current: list[str]) -> str:
    """The name that a dropped column has from now on: another one if its own has come again."""
    taken = {each.lower() for each in wanted}
    if name.lower() not in taken:
        return name
    taken |= {each.lower() for each in current}
    return next(free for at in count(2) if (free := f"{name}_{at}").lower() not in taken)
