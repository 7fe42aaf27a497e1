"""Rows of the source by key, each with its version: one short transaction per some thousand keys.

As a chunk of a backfill: REPEATABLE READ, READ ONLY, no lock but ACCESS SHARE, and the position of
the WAL once the rows are read, so that whatever was seen was committed below it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.backfill.copy_rows import columns_of, raw_rows
from cdc.backfill.query import rows_of, with_keys
from cdc.backfill.reading import begin_reading, copy_texts, wal_end
from cdc.backfill.table import PublishedTable, describe_table
from cdc.config.table import TableName
from cdc.decoding.format import ValueFormat
from cdc.verify.held import Form, Key, held_of_raw, key_of
from cdc.verify.rounds import SourceRow

_KEYS_AT_ONCE: Final = 2_000
_STATEMENT_S: Final = 60
_VERSION: Final = "concat_ws(' ', xmin, ctid, tableoid)"


@dataclass
class SourceRows:
    """Rows by their key; all of them were committed below ``lsn``."""

    rows: dict[Key, SourceRow] = field(default_factory=dict)
    lsn: int = 0


@dataclass(frozen=True)
class SourceReader:
    """Reads rows of one published table by their keys."""

    publication: str
    table: TableName
    form: Form
    values: ValueFormat | None = None

    def read(self, connection: psycopg.Connection[Any], keys: Collection[Key]) -> SourceRows:
        """The rows that have one of these keys and are published."""
        found, listed = SourceRows(), list(keys)
        for at in range(0, len(listed), _KEYS_AT_ONCE):
            begin_reading(connection, self.table, _STATEMENT_S)
            try:
                table = describe_table(connection, self.publication, self.table)
                self._copy(connection, table, listed[at : at + _KEYS_AT_ONCE], found)
                found.lsn = max(found.lsn, wal_end(connection))
            finally:
                connection.execute("ROLLBACK")
        return found

    def _copy(
        self,
        connection: psycopg.Connection[Any],
        table: PublishedTable,
        keys: list[Key],
        found: SourceRows,
    ) -> None:
        conditions = [with_keys(keys, table.key)]
        if table.row_filter is not None:
            conditions.append(sql.SQL("({}\n)").format(sql.SQL(table.row_filter)))
        query = sql.SQL("COPY (SELECT {}, {} FROM {} WHERE {}) TO STDOUT").format(
            sql.SQL(", ").join(map(sql.Identifier, table.columns)),
            sql.SQL(_VERSION),
            rows_of(table.name, with_partitions=table.is_partitioned),
            sql.SQL(" AND ").join(conditions),
        )
        schemas = {table.schema_id: table.message}
        for text in copy_texts(connection, query):
            *columns, versions = columns_of(text, len(table.columns) + 1)
            raw = raw_rows(columns, oid=table.relation.oid, schema_id=table.schema_id, read_us=0)
            held = held_of_raw(raw, schemas, self.form, self.values)
            for key, content, version in zip(
                held.column("key").to_pylist(),
                held.column("content").to_pylist(),
                versions.to_pylist(),
                strict=True,
            ):
                found.rows[key_of(key)] = SourceRow(content, version.decode())
