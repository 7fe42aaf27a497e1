"""The rows that a mirrored table holds, as COPY gives them: the texts that the source writes too.

A table is read in ranges of blocks, each in a transaction of its own. So a row that is written
meanwhile may be there twice, or not at all: a comparison reads such rows again by key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import pyarrow as pa
from psycopg import sql

from cdc.backfill.copy_rows import columns_of
from cdc.backfill.query import in_blocks, with_keys
from cdc.backfill.ranges import block_ranges
from cdc.backfill.reading import copy_texts
from cdc.backfill.table import PublishedTable
from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.replication.stream import PINNED
from cdc.verify.held import Key, held_of_columns
from sinks.postgres.target import Target

_RANGE_BYTES: Final = 64 << 20
_KEYS_AT_ONCE: Final = 2_000
_CTID_RANGES_FROM: Final = 140_000  # before that each range reads the whole table

_ABOUT = """
SELECT c.relkind = 'r' AND coalesce(m.amname, '') = 'heap', pg_relation_size(c.oid),
       current_setting('block_size')::int8,
       ARRAY(SELECT a.attname::text FROM pg_attribute a
              WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
  FROM pg_class c LEFT JOIN pg_am m ON m.oid = c.relam
 WHERE c.oid = to_regclass(%s)
"""


def held_rows(
    connection: Connection, target: Target, table: PublishedTable, keys: Collection[Key] | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a target; none if it was never made."""
    row = connection.execute(_ABOUT, (target.identifier.as_string(connection),)).fetchone()
    if row is None:
        return
    is_heap, size, block, present = row
    assert isinstance(present, list)
    lacking = [name for name in table.columns if name not in present]
    if lacking:
        raise OperatorError(
            f"{target} has no column {lacking[0]}, which {table.name} has",
            fix="deliver a change or a backfill of the table first: the column is added with it",
            kind="other_columns",
        )
    for chosen in _choices(connection, table, keys, bool(is_heap), int(str(size)), int(str(block))):
        yield from _read(connection, target, table, chosen)


def _choices(
    connection: Connection,
    table: PublishedTable,
    keys: Collection[Key] | None,
    is_heap: bool,
    size: int,
    block_bytes: int,
) -> Iterator[sql.Composable]:
    """The conditions of the transactions that read a target."""
    if keys is not None:
        listed = list(keys)
        for at in range(0, len(listed), _KEYS_AT_ONCE):
            yield with_keys(listed[at : at + _KEYS_AT_ONCE], table.key)
    elif is_heap and connection.info.server_version >= _CTID_RANGES_FROM:
        for each in block_ranges(size // block_bytes, block_bytes, _RANGE_BYTES):
            yield in_blocks(each)
    else:
        yield sql.SQL("true")


def _read(
    connection: Connection, target: Target, table: PublishedTable, chosen: sql.Composable
) -> Iterator[pa.RecordBatch]:
    query = sql.SQL("COPY (SELECT {} FROM {} WHERE {}) TO STDOUT").format(
        sql.SQL(", ").join(map(sql.Identifier, table.columns)), target.identifier, chosen
    )
    with connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        for name, value in PINNED.items():
            connection.execute(sql.SQL("SET LOCAL {} TO {}").format(sql.SQL(name), value))
        for text in copy_texts(connection, query):
            yield held_of_columns(table, columns_of(text, len(table.columns)))
