"""The versions of a source's tables, as rows of ``walbrook.schema_versions``.

The reader writes a version before the batch with its first row goes into the log. Invariant: a row
never changes, so the schema change that it describes is the same each time the log is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import orjson

from cdc.config.table import TableName
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
# The table that bore a name last is the one that the name means, whatever it is called since.
_BEARERS = """
SELECT DISTINCT ON (n.schema, n.name) n.schema, n.name, v.relation::int8
  FROM unnest(%(schemas)s::text[], %(names)s::text[]) AS n (schema, name)
  JOIN walbrook.schema_versions v
    ON v.source = %(source)s AND (v.table_schema, v.table_name) = (n.schema, n.name)
 ORDER BY n.schema, n.name, v.since_lsn DESC, v.since_idx DESC
"""
_NAMES = """
SELECT relation::int8, table_schema, table_name FROM walbrook.schema_versions
 WHERE source = %s AND relation = ANY (%s::oid[]) ORDER BY relation, version
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


def table_oids(
    connection: Connection, source: str, tables: Sequence[TableName]
) -> dict[TableName, int]:
    """The oid of each table that changes were read of under one of these names, the last one."""
    rows = connection.execute(_BEARERS, _named(source, tables)).fetchall()
    return {TableName(str(row[0]), str(row[1])): int(str(row[2])) for row in rows}


def renamed_tables(
    connection: Connection, source: str, tables: Sequence[TableName]
) -> dict[TableName, list[TableName]]:
    """The names under which changes of these tables were read since they were renamed.

    The reader has written a name before the first change under it is in the log.
    """
    oids = table_oids(connection, source, tables)
    if not oids:
        return {}
    names: dict[int, list[TableName]] = {}
    rows = connection.execute(_NAMES, (source, list(oids.values()))).fetchall()
    for oid, schema, name in rows:
        names.setdefault(int(str(oid)), []).append(TableName(str(schema), str(name)))
    found = {asked: _names_since(asked, names[oid]) for asked, oid in oids.items()}
    return {asked: since for asked, since in found.items() if since}


def _names_since(asked: TableName, names: Sequence[TableName]) -> list[TableName]:
    """Those that a table has had since it was last called ``asked``; ``names`` are in order."""
    last = max(at for at, name in enumerate(names) if name == asked)
    return list(dict.fromkeys(names[last + 1 :]))


def _named(source: str, tables: Sequence[TableName]) -> dict[str, object]:
    return {
        "source": source,
        "schemas": [table.schema for table in tables],
        "names": [table.table for table in tables],
    }


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
