"""Which chunks a table is read in: by blocks where it is a heap, else by the values of a column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import psycopg

from cdc.backfill.query import next_boundary
from cdc.backfill.ranges import CHUNKS_MAX, RowRange, ValueRange, block_ranges
from cdc.backfill.table import Leaf, PublishedTable, published_tables
from cdc.config import SinkConfig
from cdc.config.read_back import sharing
from cdc.config.table import TableName
from cdc.error_text import public_text
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.replication.stream import PINNED
from cdc.state.backfills import Backfill

Planned = tuple[TableName, int, int, RowRange]
"""Leaf, its oid, its file, and which rows."""

# Boundaries are texts, which chunks read: so they are written as chunks have them.
_WRITTEN: Final = {name: value for name, value in PINNED.items() if name != "search_path"}
_PIN: Final = "SELECT " + ", ".join(f"set_config('{name}', %s, true)" for name in _WRITTEN)

_ROW_BYTES: Final = 100  # of a table that was never analyzed
_ROWS_MIN: Final = 1_000


def column_of(backfill: Backfill, table: PublishedTable, leaf: Leaf) -> str | None:
    """The column by whose values a leaf is read; None: by blocks."""
    if backfill.sort_column is not None:
        if backfill.sort_column not in table.columns:
            raise OperatorError(
                f"table {table.name} has no published column {backfill.sort_column}",
                fix="cancel the backfill and start it with another sort_column",
                kind="no_such_column",
            )
        return backfill.sort_column
    if leaf.is_heap:
        return None
    if not table.key:
        raise OperatorError(
            f"table {leaf.name} is no heap and has no key, so it cannot be read in parts",
            fix="start the backfill with a sort_column",
            kind="no_key",
        )
    return table.key[0]


def refuse_shared_target(
    connection: psycopg.Connection[Any], publication: str, consumer: SinkConfig, table: TableName
) -> None:
    """A reload would take the rows of other tables out of a target that they share."""
    other = sharing(consumer, table, published_tables(connection, publication))
    if other is not None:
        raise OperatorError(
            f"rows of {other} go to the same target as those of {table}",
            fix="cancel the backfill and start it without reload",
            kind="shared_target",
        )


def plan_leaf(
    connection: psycopg.Connection[Any], backfill: Backfill, table: PublishedTable, leaf: Leaf
) -> Iterator[Planned]:
    """The chunks of one leaf."""
    column = column_of(backfill, table, leaf)
    ranges = (
        block_ranges(leaf.bytes // block_bytes(connection), block_bytes(connection),
                     backfill.chunk_bytes, backfill.connections)
        if column is None
        else _value_ranges(connection, backfill, leaf, column)
    )  # fmt: skip
    for each in ranges:
        yield leaf.name, leaf.oid, leaf.filenode, each


def block_bytes(connection: psycopg.Connection[Any]) -> int:
    return int(connection.info.parameter_status("block_size") or _asked(connection))


def _asked(connection: psycopg.Connection[Any]) -> str:
    row = connection.execute("SHOW block_size").fetchone()
    assert row is not None
    return str(row[0])


def _value_ranges(
    connection: psycopg.Connection[Any], backfill: Backfill, leaf: Leaf, column: str
) -> Iterator[ValueRange]:
    """One query per boundary, each over the rows of one chunk if the column has an index."""
    row_bytes = leaf.bytes // leaf.rows if leaf.rows else _ROW_BYTES
    rows = max(_ROWS_MIN, backfill.chunk_bytes // max(1, row_bytes))
    after: str | None = None
    for _ in range(CHUNKS_MAX):
        query = next_boundary(leaf.name, column, after, rows, backfill.start_position)
        try:
            with connection.transaction():
                connection.execute(_PIN, [*_WRITTEN.values()])
                found = connection.execute(query).fetchone()
        except psycopg.Error as error:
            raise _unplanned(leaf.name, column, error) from error
        if found is None or found[0] == after:
            break
        yield ValueRange(after, found[0])
        after = found[0]
    yield ValueRange(after, None)


def _unplanned(leaf: TableName, column: str, error: psycopg.Error) -> WalbrookError:
    """Why no chunks can be made of the values of a column: that concerns this backfill alone."""
    if not isinstance(error, psycopg.ProgrammingError | psycopg.DataError):
        return TransientError(
            f"{leaf} could not be read: {public_text(error)}", fix="it is tried again"
        )
    again = "cancel the backfill and start it again with a sort_column that has an order, and a "
    return OperatorError(
        f"{leaf} cannot be read in the order of {column}: {public_text(error)}",
        fix="grant SELECT on it to the role of the source, then retry the backfill"
        if isinstance(error, psycopg.errors.InsufficientPrivilege)
        else f"{again}start_position that is one of its values",
        kind="not_planned",
    )
