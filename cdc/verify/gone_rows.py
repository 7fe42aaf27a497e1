"""Rows that a destination holds and its source has no more: their keys become deletes.

The keys of the destination are laid beside those of the table, range by range. What only the
destination has is then looked for in the table once more, all in one snapshot, which decides. So
the listings need no agreement with each other, and no transaction lasts longer than the reading of
one range of blocks, or than the last look.

Invariant: a delete says of a row that it is not there in the snapshot of its chunk. The
destination is read before that snapshot is taken. A row that comes back later comes as a change
that the snapshot does not contain, and the delete is dropped.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.backfill.chunk_file import chunk_file
from cdc.backfill.copy_rows import columns_of, raw_rows
from cdc.backfill.overtaken import row_keys
from cdc.backfill.query import RowChoice, copy_rows, row_conditions, rows_of
from cdc.backfill.ranges import ValueRange, block_ranges
from cdc.backfill.reading import (
    ChunkRead,
    begin_reading,
    connect_to_read,
    copy_texts,
    reading_errors,
    take_snapshot,
    wal_end,
)
from cdc.backfill.table import PublishedTable, describe_table
from cdc.config.table import TableName
from cdc.errors import TransientError
from cdc.verify.held import Key, key_of, rows_held
from cdc.verify.key_ranges import RANGES_MAX, HeldSide

_RANGE_BYTES: Final = 64 << 20
_BLOCK_BYTES: Final = 8192  # as a divisor alone: ranges need not fit blocks exactly
_KEYS_AT_ONCE: Final = 500

Held = Callable[[PublishedTable], Iterator[pa.RecordBatch]]
"""What a destination holds of a table (``HELD_SCHEMA``)."""


@dataclass(frozen=True)
class GoneTask:
    """The table whose deleted rows are looked for, and where they go."""

    dsn: str
    source: str
    publication: str
    table: TableName
    path: Path
    statement_s: int = 600

    def __repr__(self) -> str:
        return f"GoneTask({self.table})"  # the DSN may hold a password


def read_gone(task: GoneTask, held: Held) -> ChunkRead:
    """Write deletes of the rows that ``held`` has and the source has not into the task's file."""
    with (
        reading_errors(task.table, task.statement_s),
        closing(connect_to_read(task.dsn, f"{task.source}:backfill")) as connection,
        tempfile.TemporaryDirectory(dir=task.path.parent) as scratch,
    ):
        begin_reading(connection, task.table, task.statement_s)
        table = describe_table(connection, task.publication, task.table)
        connection.execute("COMMIT")
        keys = keys_only(table)
        there, here = (
            HeldSide(Path(scratch) / name, RANGES_MAX) for name in ("destination", "source")
        )
        with closing(there):
            for batch in held(keys):
                there.add(batch)
        with closing(here):
            for batch in _source_keys(connection, table, keys, task.statement_s):
                here.add(batch)
        candidates = (_only(there, here, number) for number in range(RANGES_MAX))
        return _write(connection, task, table, candidates)


def keys_only(table: PublishedTable) -> PublishedTable:
    """The table as if its key were all of its columns."""
    relation = table.relation
    columns = [relation.columns[at] for at in relation.key]
    names = (relation.namespace.encode() + b"\0", relation.name.encode() + b"\0")
    parts = [struct.pack(">cI", b"R", relation.oid), *names, b"d", struct.pack(">H", len(columns))]
    for column in columns:
        parts.append(b"\1" + column.name.encode() + b"\0")
        parts.append(struct.pack(">Ii", column.type_oid, column.typmod))
    return replace(table, message=b"".join(parts))


def _source_keys(
    connection: psycopg.Connection[Any], table: PublishedTable, keys: PublishedTable, limit_s: int
) -> Iterator[pa.RecordBatch]:
    """The keys of the table, in ranges of blocks, each in a transaction of its own."""
    schemas = {keys.schema_id: keys.message}
    for leaf in table.leaves:
        choices = [RowChoice(ValueRange(None, None), sort_column=keys.key[0])]
        if leaf.is_heap:
            blocks = leaf.bytes // _BLOCK_BYTES
            choices = [*map(RowChoice, block_ranges(blocks, _BLOCK_BYTES, _RANGE_BYTES))]
        for choice in choices:
            begin_reading(connection, leaf.name, limit_s)
            query = copy_rows(leaf.name, keys.columns, keys.key, table.row_filter, choice)
            for text in copy_texts(connection, query):
                raw = _raw(keys, columns_of(text, len(keys.columns)))
                found = row_keys(raw, schemas).record_pks
                yield rows_held(found, found)
            connection.execute("COMMIT")


def _only(there: HeldSide, here: HeldSide, number: int) -> list[Key]:
    """The keys of a range that the destination alone has."""
    held = there.range(number).keys
    alone = pc.invert(pc.is_in(held, value_set=here.range(number).keys))
    return [key_of(text) for text in held.filter(alone).to_pylist()]


def _write(
    connection: psycopg.Connection[Any],
    task: GoneTask,
    table: PublishedTable,
    candidates: Iterator[list[Key]],
) -> ChunkRead:
    begin_reading(connection, task.table, task.statement_s)
    snapshot, read_us, _ = take_snapshot(connection, table.relation.oid)
    _require_same(table, describe_table(connection, task.publication, task.table))
    rows = size = 0
    with chunk_file(task.path, table) as write:
        for keys in candidates:
            for at in range(0, len(keys), _KEYS_AT_ONCE):
                gone = _gone(connection, table, keys[at : at + _KEYS_AT_ONCE])
                if gone:
                    raw = _deletes(table, gone, read_us)
                    write(raw)
                    rows += raw.num_rows
                    size += raw.nbytes
    end = wal_end(connection)
    connection.execute("COMMIT")
    return ChunkRead(snapshot, end, rows, size)


def _require_same(before: PublishedTable, now: PublishedTable) -> None:
    """TransientError if the keys that were listed are not those of the table as it is now."""
    if (before.message, before.row_filter) != (now.message, now.row_filter):
        raise TransientError(
            f"{now.name} or its publication was altered while its keys were listed",
            fix="they are listed again",
            kind="altered",
        )


def _gone(
    connection: psycopg.Connection[Any], table: PublishedTable, keys: Sequence[Key]
) -> list[Key]:
    """Those of these keys that no row of the table has, as the server compares them."""
    name = rows_of(table.name, with_partitions=table.is_partitioned)
    looks = [
        sql.SQL("EXISTS (SELECT FROM {} WHERE {})").format(
            name, row_conditions(RowChoice(None, [key]), table.key, table.row_filter)
        )
        for key in keys
    ]
    query = sql.SQL("SELECT ARRAY[{}]").format(sql.SQL(", ").join(looks))
    row = connection.execute(query).fetchone()
    assert row is not None
    return [key for key, is_there in zip(keys, row[0], strict=True) if not is_there]


def _raw(keys: PublishedTable, columns: list[pa.BinaryArray]) -> pa.RecordBatch:
    return raw_rows(columns, oid=keys.relation.oid, schema_id=keys.schema_id, read_us=0)


def _deletes(table: PublishedTable, keys: Sequence[Key], read_us: int) -> pa.RecordBatch:
    """Raw deletes as pgoutput writes them: the key's columns, and null for the others."""
    columns = [pa.nulls(len(keys), pa.binary()) for _ in table.columns]
    for place, at in enumerate(table.relation.key):
        columns[at] = pa.array([key[place].encode() for key in keys], pa.binary())
    return raw_rows(
        columns, oid=table.relation.oid, schema_id=table.schema_id, read_us=read_us,
        kind=b"D", tag=b"K",
    )  # fmt: skip
