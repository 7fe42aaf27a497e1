"""The server and the role: version, WAL level, rights, room for one more reader."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from cdc.replication.preflight.problem import Problem, statement

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


def version_problems(server_version: int) -> list[Problem]:
    """A server too old for the other checks; ``server_version`` is a number such as 180001."""
    major = server_version // 10_000
    if major >= OLDEST_VERSION:
        return []
    return [
        Problem(
            f"The server runs Postgres {major}; Walbrook needs {OLDEST_VERSION} or later",
            "upgrade the server",
        )
    ]


def server_problems(
    connection: psycopg.Connection[tuple[Any, ...]], *, slot_exists: bool, slot_active: bool
) -> list[Problem]:
    """What the server's settings and the role's rights lack."""
    row = connection.execute(_SETTINGS).fetchone()
    assert row is not None
    wal_level, slots_max, senders_max, slots, senders = row
    problems = []
    if wal_level != "logical":
        problems.append(
            Problem(
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
            Problem(
                f"All {senders_max} replication connections (max_wal_senders) are taken",
                f"ALTER SYSTEM SET max_wal_senders = {senders + 5}; -- then restart Postgres",
            )
        )
    return problems


def _role_problems(connection: psycopg.Connection[tuple[Any, ...]]) -> list[Problem]:
    row = connection.execute(_MAY_REPLICATE).fetchone()
    assert row is not None
    role, may_replicate = row
    if may_replicate:
        return []
    return [
        Problem(
            f"The role {role} may not replicate",
            statement("ALTER ROLE {role} REPLICATION;", role=role),
        )
    ]


def _no_room_for_a_slot(connection: psycopg.Connection[tuple[Any, ...]], slots_max: int) -> Problem:
    idle = [name for (name,) in connection.execute(_IDLE_SLOTS).fetchall()]
    unread = f" (nobody reads {', '.join(idle)})" if idle else ""
    return Problem(
        f"All {slots_max} replication slots (max_replication_slots) are taken{unread}",
        f"ALTER SYSTEM SET max_replication_slots = {slots_max + 5}; -- then restart Postgres",
    )
