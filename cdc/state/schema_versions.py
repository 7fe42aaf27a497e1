"""The versions of a source's tables, as rows of ``walbrook.schema_versions``.

What must always hold: a version is written in the transaction that moves the first cursor over its
first row, and its row never changes; so where a ``schema_change`` message stands is decided once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import orjson

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn, parse_lsn
from cdc.decoding.relation import Relation
from cdc.decoding.schema_change import IDENTITY_WORDS, columns_of, key_of
from cdc.errors import TransientError

_LATEST = """
SELECT DISTINCT ON (relation) relation::int8, version, schema, since_lsn::text, since_idx
  FROM walbrook.schema_versions WHERE source = %s ORDER BY relation, version DESC
"""
_ANNOUNCED = """
SELECT announced_lsn::text, announced_idx, commit_timestamp, table_schema, table_name, change::text
  FROM walbrook.schema_versions
 WHERE source = %s AND (announced_lsn, announced_idx) >= (%s::pg_lsn, %s)
 ORDER BY announced_lsn, announced_idx
"""
_INSERT = """
INSERT INTO walbrook.schema_versions
       (source, relation, version, table_schema, table_name, columns, replica_identity, key, change,
        schema, since_lsn, since_idx, commit_timestamp, announced_lsn, announced_idx)
VALUES (%(source)s, %(relation)s, %(version)s, %(table_schema)s, %(table_name)s,
        %(columns)s::jsonb, %(replica_identity)s, %(key)s::text[], %(change)s::jsonb, %(schema)s,
        %(since_lsn)s::pg_lsn, %(since_idx)s, %(committed)s, %(announced_lsn)s::pg_lsn,
        %(announced_idx)s)
    ON CONFLICT (source, relation, since_lsn, since_idx) DO NOTHING
"""
_SAME = """
SELECT 1 FROM walbrook.schema_versions
 WHERE source = %(source)s AND relation = %(relation)s AND version = %(version)s
   AND since_lsn = %(since_lsn)s::pg_lsn AND since_idx = %(since_idx)s
   AND announced_lsn IS NOT DISTINCT FROM %(announced_lsn)s::pg_lsn
   AND announced_idx IS NOT DISTINCT FROM %(announced_idx)s::bigint
"""


@dataclass(frozen=True)
class Announcement:
    """A ``schema_change`` message: where it stands, and what it says."""

    cursor: Cursor
    committed_at: datetime
    table_schema: str
    table_name: str
    record: str

    @classmethod
    def of(
        cls, cursor: Cursor, committed_at: datetime, schema: str, table: str, change: object
    ) -> Announcement:
        # Sorted, because jsonb keeps no order: the message must be the same after a restart.
        record = orjson.dumps(change, option=orjson.OPT_SORT_KEYS).decode()
        return cls(cursor, committed_at, schema, table, record)


@dataclass(frozen=True)
class LatestVersion:
    """The newest version known of a table; ``since`` is the cursor of its first row."""

    version: int
    schema: bytes
    since: Cursor


@dataclass(frozen=True)
class NewVersion:
    """A version that was not known before; without an announcement it is a table's first."""

    version: int
    relation: Relation
    schema: bytes
    since: Cursor
    committed_at: datetime
    announcement: Announcement | None


def latest_versions(connection: Connection, source: str) -> dict[int, LatestVersion]:
    """The newest version of each table, by its oid."""
    return {
        int(str(relation)): LatestVersion(
            int(str(version)), _bytes(schema), Cursor(parse_lsn(str(lsn)), int(str(idx)))
        )
        for relation, version, schema, lsn, idx in connection.execute(_LATEST, (source,))
    }


def announcements(connection: Connection, source: str, start: Cursor) -> list[Announcement]:
    """The schema changes told at or above ``start``, in order."""
    rows = connection.execute(_ANNOUNCED, (source, format_lsn(start.lsn), start.idx)).fetchall()
    return [
        Announcement.of(
            Cursor(parse_lsn(str(lsn)), int(str(idx))),
            datetime.fromisoformat(str(committed)),
            str(schema),
            str(table),
            orjson.loads(str(change)),
        )
        for lsn, idx, committed, schema, table, change in rows
    ]


def record_versions(connection: Connection, source: str, versions: Sequence[NewVersion]) -> None:
    """Write what a micro-batch found, inside the settling transaction."""
    if versions:
        with connection.cursor() as cursor:
            cursor.executemany(_INSERT, [_row(source, version) for version in versions])
            if cursor.rowcount != len(versions):
                _check_same(connection, source, versions)


def _check_same(connection: Connection, source: str, versions: Sequence[NewVersion]) -> None:
    """Another lane was first; most often it came to the same."""
    for version in versions:
        row = _row(source, version)
        if connection.execute(_SAME, row).fetchone() is None:
            raise TransientError(
                f"another lane has recorded version {version.version} of table {version.relation} "
                "otherwise; this one starts again and takes it as recorded"
            )


def _row(source: str, version: NewVersion) -> dict[str, object]:
    relation, told = version.relation, version.announcement
    return {
        "source": source,
        "relation": relation.oid,
        "version": version.version,
        "table_schema": relation.namespace,
        "table_name": relation.name,
        "columns": orjson.dumps(columns_of(relation)).decode(),
        "replica_identity": IDENTITY_WORDS[relation.replica_identity],
        "key": key_of(relation),
        "change": told.record if told else None,
        "schema": version.schema,
        "since_lsn": format_lsn(version.since.lsn),
        "since_idx": version.since.idx,
        "committed": version.committed_at,
        "announced_lsn": format_lsn(told.cursor.lsn) if told else None,
        "announced_idx": told.cursor.idx if told else None,
    }


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value
