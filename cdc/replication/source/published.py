"""The tables of a publication as pgoutput will describe them, before any of them has changed.

Invariant: a table is described as its next Relation message will, with what the
catalog says behind it, so that whatever is checked here is checked against what comes.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import psycopg
import structlog

from cdc.config.table import TableName
from cdc.decoding.relation import parse_relation, with_catalog
from cdc.errors import DecodeError
from cdc.replication.source.catalog import describe
from cdc.replication.wire.relations import OWN_SCHEMA

_logger = structlog.get_logger("walbrook.start")

_COLUMN_LISTS_FROM: Final = 150000
_GENERATED_FROM: Final = 180000

# With the columns that are sent, and which of them identify a row.
_TABLES: Final = """
SELECT c.oid::int8, n.nspname, c.relname, c.relreplident::text,
       a.attname, a.atttypid::int8, a.atttypmod,
       CASE c.relreplident WHEN 'f' THEN true WHEN 'n' THEN false
            ELSE EXISTS (SELECT FROM pg_index i
                          WHERE i.indrelid = c.oid
                            AND a.attnum = ANY ((i.indkey::int2[])[:i.indnkeyatts - 1])
                            AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
                                     ELSE i.indisprimary END) END
  FROM pg_publication_tables p
  JOIN pg_namespace n ON n.nspname = p.schemaname
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
  LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                          AND {sent}
 WHERE p.pubname = %s AND n.nspname <> %s
   AND (%s::text IS NULL OR (p.schemaname, p.tablename) = (%s, %s))
 ORDER BY c.oid, a.attnum
"""
_NOT_GENERATED: Final = "a.attgenerated = ''"
_LISTED: Final = "a.attname = ANY (p.attnames)"


def published_relations(
    connection: psycopg.Connection[Any], publication: str, only: TableName | None = None
) -> list[bytes]:
    """A Relation message with its catalog note for each table, or one; ours are never sent."""
    named = (None, None) if only is None else (only.schema, only.table)
    rows = connection.execute(
        _TABLES.format(sent=_sent(connection.info.server_version)).encode(),
        (publication, OWN_SCHEMA, named[1], *named),
    ).fetchall()
    tables: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        tables.setdefault(row[0], []).append(row)
    found = []
    for columns in tables.values():
        try:
            message = _message(columns)
            note = describe(connection, parse_relation(message))
            found.append(with_catalog(message, note))
        except (DecodeError, UnicodeDecodeError, struct.error) as error:
            # Its changes cannot be decoded either, and then say so.
            _logger.warning("source.undescribed_table", table=str(columns[0][2]), error=str(error))
    return found


def _sent(version: int) -> str:
    if version >= _GENERATED_FROM:
        return _LISTED
    return f"{_NOT_GENERATED} AND {_LISTED}" if version >= _COLUMN_LISTS_FROM else _NOT_GENERATED


def _message(rows: list[tuple[Any, ...]]) -> bytes:
    oid, schema, table, identity = rows[0][:4]
    columns = [row[4:] for row in rows if row[4] is not None]
    parts = [
        b"R" + struct.pack(">I", oid),
        _name(schema) + _name(table) + _bytes(identity),
        struct.pack(">H", len(columns)),
    ]
    for name, type_oid, typmod, is_key in columns:
        parts.append(bytes([is_key]) + _name(name) + struct.pack(">Ii", type_oid, typmod))
    return b"".join(parts)


def _name(value: str | bytes) -> bytes:
    return _bytes(value) + b"\0"


def _bytes(value: str | bytes) -> bytes:
    """On a connection without an encoding psycopg gives names as bytes."""
    return value.encode() if isinstance(value, str) else value
