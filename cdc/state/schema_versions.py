"""The versions of a source's tables, as rows of ``walbrook.schema_versions``.

The reader writes a version before the batch with its first row goes into the log. Invariant: a row
never changes, so the schema change that it describes is the same each time the log is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import orjson

from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn
from cdc.decoding.schema_change import IDENTITY_WORDS, columns_of, key_of
from cdc.decoding.table_version import TableVersion, record_of
from cdc.state.fence import DURABLY, FENCE, fenced

# The newest version of each table, and those whose first rows may come again.
_KNOWN = """
SELECT version, schema, since_lsn::text, since_idx,
       (extract(epoch FROM commit_timestamp) * 1000000)::bigint, change::text
  FROM walbrook.schema_versions v
 WHERE source = %(source)s
   AND (since_lsn >= %(lsn)s::pg_lsn
        OR version = (SELECT max(version) FROM walbrook.schema_versions w
                       WHERE w.source = v.source AND w.relation = v.relation))
"""
_INSERT = """
INSERT INTO walbrook.schema_versions
       (source, relation, version, table_schema, table_name, columns, replica_identity, key, change,
        schema, since_lsn, since_idx, commit_timestamp, announced_lsn, announced_idx)
VALUES (%(source)s, %(relation)s, %(version)s, %(table_schema)s, %(table_name)s,
        %(columns)s::jsonb, %(replica_identity)s, %(key)s::text[], %(change)s::jsonb, %(schema)s,
        %(since_lsn)s::pg_lsn, %(since_idx)s, %(committed)s, %(announced_lsn)s::pg_lsn,
        %(announced_idx)s)
"""
_EPOCH = datetime.fromtimestamp(0, UTC)


def known_versions(connection: Connection, source: str, resume: Cursor) -> list[TableVersion]:
    """What a reader that goes on at ``resume`` must know."""
    rows = connection.execute(_KNOWN, {"source": source, "lsn": format_lsn(resume.lsn)}).fetchall()
    return [
        TableVersion(
            int(str(version)),
            _bytes(schema),
            cursor_of(lsn, idx),
            int(str(commit_ts)),
            None if change is None else record_of(orjson.loads(str(change))),
        )
        for version, schema, lsn, idx, commit_ts, change in rows
    ]


def record_versions(
    connection: Connection, source: str, term: int, versions: Sequence[TableVersion]
) -> None:
    """Write versions, durably, in one transaction of the latest start of the service."""
    with connection.transaction():
        if connection.execute(FENCE, (source, term)).fetchone() is None:
            raise fenced(source)
        connection.execute(DURABLY)
        with connection.cursor() as cursor:
            cursor.executemany(_INSERT, [_row(source, version) for version in versions])


def _row(source: str, version: TableVersion) -> dict[str, object]:
    relation, announced = version.relation, version.record is not None
    return {
        "source": source,
        "relation": relation.oid,
        "version": version.number,
        "table_schema": relation.namespace,
        "table_name": relation.name,
        "columns": orjson.dumps(columns_of(relation)).decode(),
        "replica_identity": IDENTITY_WORDS[relation.replica_identity],
        "key": key_of(relation),
        "change": version.record.decode() if version.record is not None else None,
        "schema": version.schema,
        "since_lsn": format_lsn(version.since.lsn),
        "since_idx": version.since.idx,
        "committed": _EPOCH + timedelta(microseconds=version.commit_ts),
        "announced_lsn": format_lsn(version.place.lsn) if announced else None,
        "announced_idx": version.place.idx if announced else None,
    }


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value
