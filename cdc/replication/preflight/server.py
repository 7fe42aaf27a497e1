"""The server and the role: version, WAL level, rights, room for one more reader."""

from __future__ import annotations

import re
from typing import Any, Final

import psycopg

from cdc.replication.preflight.problem import SourceProblem, statement
from cdc.replication.stream import stream_name

OLDEST_VERSION: Final = 14

_SETTINGS: Final = """
SELECT current_setting('wal_level'), current_setting('max_replication_slots')::int,
       current_setting('max_wal_senders')::int,
       (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM pg_stat_replication)
"""
# Amazon RDS gives the right to replicate by membership instead of the role attribute.
_MAY_REPLICATE: Final = """
SELECT rolname, rolsuper OR rolreplication OR EXISTS (
         SELECT FROM pg_roles m
         WHERE m.rolname = 'rds_replication' AND pg_has_role(r.oid, m.oid, 'member'))
FROM pg_roles r WHERE rolname = current_user
"""
_IDLE_SLOTS: Final = (
    "SELECT slot_name::text FROM pg_replication_slots WHERE NOT active ORDER BY 1 LIMIT 3"
)

_SYNCHRONOUS: Final = "SELECT current_setting('synchronous_standby_names')"
_COUNTED: Final = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?\d+\s*\((?P<names>.*)\)\s*", re.I | re.S)
_NAME: Final = re.compile(r'"((?:[^"]|"")*)"|([^\s,()"]+)')


def version_problems(server_version: int) -> list[SourceProblem]:
    """A server too old for the other checks; ``server_version`` is a number such as 180001."""
    major = server_version // 10_000
    if major >= OLDEST_VERSION:
        return []
    return [
        SourceProblem(
            f"The server runs Postgres {major}; Walbrook needs {OLDEST_VERSION} or later",
            "upgrade the server",
        )
    ]


def server_problems(
    connection: psycopg.Connection[tuple[Any, ...]], *, slot_exists: bool, slot_active: bool
) -> list[SourceProblem]:
    """What the server's settings and the role's rights lack."""
    row = connection.execute(_SETTINGS).fetchone()
    assert row is not None
    wal_level, slots_max, senders_max, slots, senders = row
    problems = []
    if wal_level != "logical":
        problems.append(
            SourceProblem(
                f"The server's wal_level is {wal_level}; it must be logical",
                "ALTER SYSTEM SET wal_level = logical; -- then restart Postgres",
            )
        )
    problems += _role_problems(connection)
    if not slot_exists and slots >= slots_max:
        problems.append(_no_room_for_a_slot(connection, slots_max))
    # A reader that is still attached to our slot gives its connection back to us.
    if not slot_active and senders >= senders_max:
        problems.append(
            SourceProblem(
                f"All {senders_max} replication connections (max_wal_senders) are taken",
                f"ALTER SYSTEM SET max_wal_senders = {senders + 5}; -- then restart Postgres",
            )
        )
    return problems


def synchronous_warnings(
    connection: psycopg.Connection[tuple[Any, ...]], slot: str
) -> list[SourceProblem]:
    """Whether the primary would count the reader of ``slot`` as one of its synchronous standbys."""
    row = connection.execute(_SYNCHRONOUS).fetchone()
    assert row is not None
    names = [name.casefold() for name in standby_names(str(row[0]))]
    ours = stream_name(slot)
    found = next((name for name in ("*", ours) if name.casefold() in names), None)
    if found is None:
        return []
    return [
        SourceProblem(
            f"synchronous_standby_names is {row[0]}, and {found} stands for the reader {ours} too: "
            "commits may wait for it, or be acknowledged by it in place of a standby",
            "ALTER SYSTEM SET synchronous_standby_names = 'the names of the standbys'; "
            "SELECT pg_reload_conf();",
        )
    ]


def standby_names(setting: str) -> list[str]:
    """The names in a value of synchronous_standby_names, with or without FIRST or ANY."""
    counted = _COUNTED.fullmatch(setting)
    listed = setting if counted is None else counted["names"]
    return [
        quoted.replace('""', '"') if quoted else plain for quoted, plain in _NAME.findall(listed)
    ]


def _role_problems(connection: psycopg.Connection[tuple[Any, ...]]) -> list[SourceProblem]:
    row = connection.execute(_MAY_REPLICATE).fetchone()
    assert row is not None
    role, may_replicate = row
    if may_replicate:
        return []
    return [
        SourceProblem(
            f"The role {role} may not replicate",
            statement("ALTER ROLE {role} REPLICATION;", role=role),
        )
    ]


def _no_room_for_a_slot(
    connection: psycopg.Connection[tuple[Any, ...]], slots_max: int
) -> SourceProblem:
    idle = [name for (name,) in connection.execute(_IDLE_SLOTS).fetchall()]
    unread = f" (nobody reads {', '.join(idle)})" if idle else ""
    return SourceProblem(
        f"All {slots_max} replication slots (max_replication_slots) are taken{unread}",
        f"ALTER SYSTEM SET max_replication_slots = {slots_max + 5}; -- then restart Postgres",
    )
