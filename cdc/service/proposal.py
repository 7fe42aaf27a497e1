"""A configuration and its SQL for a database, from a look at it. Nothing is changed there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
import yaml
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.reach import reach

SINKS: Final = ("file", "parquet", "webhook", "redis_stream", "pull")
"""Types of a first sink, the default first."""

_SCHEMAS_FROM: Final = 150_000  # Postgres numbers versions so; FOR TABLES IN SCHEMA came with 15
_LOOK: Final = """
SELECT current_database()::text, current_setting('wal_level'),
       current_setting('server_version_num')::int, pg_is_in_recovery(),
       EXISTS (SELECT FROM pg_roles WHERE rolname = %s)
"""
_TABLES: Final = """
SELECT n.nspname::text, c.relname::text,
       c.relreplident IN ('f', 'i') OR EXISTS (
           SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'walbrook')
 ORDER BY 1, 2
"""
_DESTINATIONS: Final[dict[str, dict[str, object]]] = {
    "file": {"type": "file", "path": "data/changes"},
    "parquet": {"type": "parquet", "path": "data/changes"},
    "webhook": {"type": "webhook", "url": "http://localhost:8000/changes"},
    "redis_stream": {"type": "redis_stream", "host": "localhost", "stream_key": "changes"},
    "pull": {"type": "pull"},
}


@dataclass(frozen=True)
class Proposal:
    """The text of a configuration, its SQL, and what a person should know."""

    configuration: str
    statements: str
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class _Look:
    database: str
    wal_level: str
    version: int
    in_recovery: bool
    role_exists: bool
    tables: dict[tuple[str, str], bool]  # whether updates of it can be published


def propose(url: str, *, role: str, name: str | None, tables: Sequence[str], sink: str) -> Proposal:
    """Look at the database at ``url``, and propose a source with one sink."""
    if sink not in SINKS:
        raise OperatorError(f"{sink} is no type of a first sink", fix=f"use {', '.join(SINKS)}")
    try:
        place = conninfo_to_dict(url)
    except psycopg.Error:
        raise OperatorError(
            "the URL of the database cannot be read",
            fix="write it as postgres://user:password@host:5432/database",
        ) from None
    with reach(url, "the database") as connection:
        look = _look(connection, role)
    wanted = [_known(look, each) for each in tables]
    if look.in_recovery:
        raise OperatorError(
            "the database is a standby, where neither role nor publication can be made",
            fix="look at its primary, then set the address and primary_url in the file by hand",
        )
    source = name or re.sub(r"[^A-Za-z0-9_-]", "_", look.database)
    database: dict[str, object] = {
        "name": source,
        "hostname": str(place.get("host") or "localhost"),
        "port": int(str(place.get("port") or 5432)),
        "database": look.database,
        "username": role,
        "slot": {"name": "walbrook_slot", "create_if_not_exists": True},
        "publication": {"name": "walbrook_pub"},
    }
    first: dict[str, object] = {"name": "changes", "destination": _DESTINATIONS[sink]}
    if wanted:
        first["source"] = {"include_tables": [TableName(*each).written() for each in wanted]}
    return Proposal(
        _HEAD + yaml.safe_dump({"databases": [database], "sinks": [first]}, sort_keys=False),
        _statements(look, role, wanted),
        tuple(_remarks(look, wanted)),
    )


_HEAD: Final = """\
# Written by walbrook init. Every key: docs/configuration.md.
# The role's password comes from PGPASSWORD or the password file, or add: password: ${PASSWORD}
"""


def _look(connection: Connection, role: str) -> _Look:
    row = connection.execute(_LOOK, (role,)).fetchone()
    assert row is not None
    tables = {
        (str(schema), str(table)): bool(identified)
        for schema, table, identified in connection.execute(_TABLES).fetchall()
    }
    database, wal_level, version, in_recovery, role_exists = row
    return _Look(
        str(database),
        str(wal_level),
        int(str(version)),
        bool(in_recovery),
        bool(role_exists),
        tables,
    )


def _known(look: _Look, written: str) -> tuple[str, str]:
    try:
        parsed = TableName.parse(written)
    except ValueError as error:
        raise OperatorError(f"'{written}' names no table", fix=f"it {error}") from None
    table = (parsed.schema, parsed.table)
    if table not in look.tables:
        there = ", ".join(TableName(*each).written() for each in list(look.tables)[:10])
        raise OperatorError(f"there is no table {written}", fix=f"there are: {there or 'none'}")
    return table


def _statements(look: _Look, role: str, wanted: Sequence[tuple[str, str]]) -> str:
    """The role, its rights, and the publication, to be run once by a superuser."""
    who = sql.Identifier(role)
    schemas = sorted({schema for schema, _ in wanted} or {"public"})
    lines: list[sql.Composed] = []
    made = "ALTER" if look.role_exists else "CREATE"
    lines.append(sql.SQL("{} ROLE {} LOGIN REPLICATION;").format(sql.SQL(made), who))
    database = sql.Identifier(look.database)
    lines.append(sql.SQL("GRANT CREATE ON DATABASE {} TO {};").format(database, who))
    for schema in schemas:
        named = sql.Identifier(schema)
        lines.append(sql.SQL("GRANT USAGE ON SCHEMA {} TO {};").format(named, who))
        if not wanted:
            grant = "GRANT SELECT ON ALL TABLES IN SCHEMA {} TO {};"
            lines.append(sql.SQL(grant).format(named, who))
    identifiers = sql.SQL(", ").join(sql.Identifier(*each) for each in wanted)
    if wanted:
        lines.append(sql.SQL("GRANT SELECT ON {} TO {};").format(identifiers, who))
        tables = sql.SQL("TABLE {}").format(identifiers)
    elif look.version >= _SCHEMAS_FROM:
        tables = sql.SQL("TABLES IN SCHEMA {}").format(sql.Identifier("public"))
    else:
        tables = sql.SQL("ALL TABLES").format()
    lines.append(
        sql.SQL(
            "CREATE PUBLICATION walbrook_pub FOR {} WITH (publish_via_partition_root = true);"
        ).format(tables)
    )
    head = "-- Written by walbrook init. Run it once, as a superuser; then: \\password " + role
    if look.wal_level != "logical":
        head += "\n-- First, and then restart Postgres: ALTER SYSTEM SET wal_level = logical;"
    return "\n".join([head, *(line.as_string(None) for line in lines)]) + "\n"


def _remarks(look: _Look, wanted: Sequence[tuple[str, str]]) -> list[str]:
    remarks = []
    if look.wal_level != "logical":
        remarks.append(f"wal_level is {look.wal_level}; it must be logical, which needs a restart")
    published = wanted or [each for each in look.tables if each[0] == "public"]
    keyless = [TableName(*each).written() for each in published if not look.tables[each]]
    if keyless:
        remarks.append(
            f"updates and deletes of {', '.join(keyless)} will be refused by Postgres once they "
            "are published: give them a primary key, or ALTER TABLE … REPLICA IDENTITY FULL"
        )
    return remarks
