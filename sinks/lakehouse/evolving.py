"""Bringing a table to a version of its source's table: new columns at once, others by new files.

Invariant: a table is altered in commits of its own before the rows of the new version, each of them
atomic. The table's own schema says what is left to do, so that the next
delivery finishes what a crash left.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pyarrow as pa

from cdc.decoding.lossless_cast import conform
from cdc.errors import OperatorError
from sinks.lakehouse.columns import Evolution, evolve
from sinks.lakehouse.table import LakeTable, TableState


class _CannotBecomeError(Exception):
    """A column's values do not fit its new type."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


def follow(
    table: LakeTable, state: TableState, version: str, *, same_table: bool, keeps: bool
) -> TableState:
    """The table as this version has it. Returns its state then.

    A history (``keeps``) makes a column text whose values cannot have the new type. Raises
    OperatorError for another table.
    """
    evolution = evolve(table.schema, version, same_table=same_table, keeps=keeps)
    while evolution.is_needed:  # each step leaves less to do
        after = state.moved(state.cursor)
        if not table.alter(evolution, after):
            _rewrite(table, evolution, after, keeps=keeps)
            return _loaded(table)
        state = _loaded(table)
        evolution = evolve(table.schema, version, same_table=same_table, keeps=keeps)
    return state


def _loaded(table: LakeTable) -> TableState:
    state = table.load()
    assert state is not None
    return state


def _rewrite(table: LakeTable, evolution: Evolution, after: TableState, *, keeps: bool) -> None:
    """Rewrite all files, one after another; a column that cannot be widened may become text."""
    texts: set[str] = set()
    while True:
        try:
            added = [
                new
                for file in table.files()
                for new in table.write(_converted(table.read(file), evolution, texts))
            ]
        except _CannotBecomeError as refused:
            if not keeps or refused.column in texts:
                raise _cannot_widen(table, evolution, refused.column) from None
            texts.add(refused.column)
            evolution = _with_text(evolution, refused.column)
            continue
        table.replace(added, evolution.schema, after)
        return


def _converted(rows: pa.Table, evolution: Evolution, texts: Collection[str]) -> pa.Table:
    columns = []
    for field, was in zip(evolution.schema, evolution.was, strict=True):
        if was is None:
            columns.append(pa.nulls(rows.num_rows, field.type))
            continue
        values = rows.column(was).combine_chunks()
        if field.name in texts:
            columns.append(_as_text(values, field.name))
            continue
        found, bad = conform(values, field.type)
        if bad.any():
            raise _CannotBecomeError(field.name)
        columns.append(found)
    return pa.Table.from_arrays(columns, schema=evolution.schema)


def _as_text(values: pa.Array, column: str) -> pa.Array:
    try:
        return values.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise _CannotBecomeError(column) from None


def _with_text(evolution: Evolution, column: str) -> Evolution:
    at = evolution.schema.get_field_index(column)
    field = evolution.schema.field(at).with_type(pa.string())
    return replace(evolution, schema=evolution.schema.set(at, field))


def _cannot_widen(table: LakeTable, evolution: Evolution, column: str) -> OperatorError:
    at = evolution.schema.get_field_index(column)
    old = table.schema.field(str(evolution.was[at])).type
    return OperatorError(
        f"column {column} of the table at {table.place} was {old}, is "
        f"{evolution.schema.field(at).type} now, and holds values that cannot become that without "
        "loss",
        fix="correct these values in the table, or give its column the new type there: what waits "
        "is written then; or begin anew: rewind with destination => 'new_generation'",
        kind="cannot_widen",
    )
