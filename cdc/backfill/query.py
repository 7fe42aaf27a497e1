"""The SQL of a chunk. Values and names go through ``psycopg.sql``; two texts do not.

These are the publication's row filter, which the catalog wrote, and the ``where`` of an operator,
which is SQL by its nature: it runs in a read-only transaction with the rights of the source's role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from cdc.backfill.ranges import BlockRange, RowRange, ValueRange
from cdc.config.table import TableName

Keys = Sequence[Sequence[str]]


@dataclass(frozen=True)
class RowChoice:
    """Which rows of a leaf a chunk has: a range of them, or those with some keys."""

    range: RowRange | None
    keys: Keys = ()
    sort_column: str | None = None
    where: str | None = None
    start_position: str | None = None  # of sort_column, inclusive


def copy_rows(
    leaf: TableName,
    columns: Sequence[str],
    key: Sequence[str],
    row_filter: str | None,
    choice: RowChoice,
    *,
    with_partitions: bool = False,
) -> sql.Composed:
    """COPY of the chosen rows as text."""
    ordered: sql.Composable = sql.SQL("")
    if choice.sort_column is not None:
        ordered = sql.SQL(" ORDER BY {}").format(sql.Identifier(choice.sort_column))
    return sql.SQL("COPY (SELECT {} FROM {} WHERE {}{}) TO STDOUT").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        rows_of(leaf, with_partitions=with_partitions),
        row_conditions(choice, key, row_filter),
        ordered,
    )


def rows_of(name: TableName, *, with_partitions: bool) -> sql.Composed:
    """A table as FROM names it: with its partitions, or without the tables that inherit from it."""
    only = sql.SQL("" if with_partitions else "ONLY ")
    return sql.SQL("{}{}").format(only, sql.Identifier(name.schema, name.table))


def row_conditions(choice: RowChoice, key: Sequence[str], row_filter: str | None) -> sql.Composable:
    """The condition of the chosen rows that are published."""
    conditions = [_chosen(choice, key)]
    for text in (row_filter, choice.where):
        if text is not None:
            # A comment in it ends with its line.
            conditions.append(sql.SQL("({}\n)").format(sql.SQL(text)))
    if choice.sort_column is not None and choice.start_position is not None:
        conditions.append(_from(choice.sort_column, choice.start_position))
    return sql.SQL(" AND ").join(conditions)


def next_boundary(
    leaf: TableName, column: str, after: str | None, rows: int, start: str | None = None
) -> sql.Composed:
    """The value up to which a chunk of about so many rows behind ``after`` reaches."""
    name = sql.Identifier(column)
    above: sql.Composable = sql.SQL("true")
    if after is not None:
        above = sql.SQL("{} > {}").format(name, after)
    elif start is not None:
        above = _from(column, start)
    return sql.SQL(
        "SELECT {name}::text FROM ONLY {leaf} WHERE {above} AND {name} IS NOT NULL "
        "ORDER BY {name} OFFSET {rows} LIMIT 1"
    ).format(name=name, leaf=sql.Identifier(leaf.schema, leaf.table), above=above, rows=rows - 1)


def lock(leaf: TableName) -> sql.Composed:
    """From here on the table, and its partitions, keep their form; taken before the snapshot."""
    return sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(
        sql.Identifier(leaf.schema, leaf.table)
    )


def _from(column: str, start: str) -> sql.Composable:
    return sql.SQL("{} >= {}").format(sql.Identifier(column), start)


def _chosen(choice: RowChoice, key: Sequence[str]) -> sql.Composable:
    if choice.range is None:
        return with_keys(choice.keys, key)
    if isinstance(choice.range, BlockRange):
        return in_blocks(choice.range)
    assert choice.sort_column is not None  # a range of values is one of this column
    return _values(choice.range, sql.Identifier(choice.sort_column))


def in_blocks(blocks: BlockRange) -> sql.Composable:
    """The condition of rows that lie in some blocks."""
    first = sql.SQL("ctid >= {}::tid").format(f"({blocks.first},0)")
    if blocks.end is None:
        return first
    return sql.SQL("{} AND ctid < {}::tid").format(first, f"({blocks.end},0)")


def _values(values: ValueRange, column: sql.Identifier) -> sql.Composable:
    """Literals without a type take that of the column, and its collation."""
    if values.after is None and values.until is None:
        return sql.SQL("true")
    if values.after is None:
        return sql.SQL("({c} <= {until} OR {c} IS NULL)").format(c=column, until=values.until)
    if values.until is None:
        return sql.SQL("{} > {}").format(column, values.after)
    return sql.SQL("{c} > {after} AND {c} <= {until}").format(
        c=column, after=values.after, until=values.until
    )


def with_keys(keys: Keys, key: Sequence[str]) -> sql.Composable:
    """The condition of rows that have one of some keys."""
    columns = sql.SQL(", ").join(map(sql.Identifier, key))
    rows = sql.SQL(", ").join(
        sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, values))) for values in keys
    )
    return sql.SQL("({}) IN ({})").format(columns, rows)
