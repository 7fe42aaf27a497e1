"""The replication slot: there and usable, or created.

A slot that lost its WAL or belongs to something else is never replaced in silence: dropping one
forgets which changes were not yet read, and that is an operator's decision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.cursor import parse_lsn
from cdc.errors import SourceError
from cdc.replication.preflight.problem import Problem, statement

PLUGIN: Final = "pgoutput"
CREATE_TIMEOUT_S: Final = 60.0
_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")

# As JSON, because each major version has other columns.
_SLOT: Final = """
SELECT to_jsonb(s), current_database()::text FROM pg_replication_slots s WHERE slot_name = %s
"""
_CREATE: Final = "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')"
# The slot's first snapshot waits for every transaction that was open when it was asked for.
_OLDEST_WRITER: Final = """
SELECT pid, floor(extract(epoch FROM clock_timestamp() - xact_start))::bigint
FROM pg_stat_activity
WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
ORDER BY xact_start LIMIT 1
"""


@dataclass(frozen=True)
class Slot:
    """A slot that exists, with what is wrong with it."""

    confirmed_lsn: int
    active_pid: int | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def read_slot(connection: psycopg.Connection[tuple[Any, ...]], name: str) -> Slot | None:
    """The slot as it stands, or nothing."""
    row = connection.execute(_SLOT, [name]).fetchone()
    if row is None:
        return None
    slot, database = row
    confirmed = slot["confirmed_flush_lsn"]
    return Slot(
        confirmed_lsn=parse_lsn(confirmed) if confirmed else 0,
        active_pid=slot["active_pid"],
        problems=tuple(slot_problems(name, slot, database)),
        warnings=tuple(slot_warnings(name, slot)),
    )


def name_problems(name: str) -> list[Problem]:
    """Slot names that Postgres would refuse."""
    if _NAME.fullmatch(name):
        return []
    return [
        Problem(
            f"'{name}' cannot be the name of a slot",
            "use up to 63 lower-case letters, digits and underscores in the configuration",
        )
    ]


def slot_problems(name: str, slot: dict[str, Any], database: str) -> list[Problem]:
    """Why the slot, a row of pg_replication_slots, cannot serve this database."""
    another = "name another slot in the configuration"
    if slot["slot_type"] != "logical":
        return [Problem(f"The slot {name} is a physical one; a logical one is needed", another)]
    if slot["database"] != database:
        where = slot["database"]
        return [
            Problem(f"The slot {name} belongs to the database {where}, not {database}", another)
        ]
    drop = drop_statement(name)
    if slot["plugin"] != PLUGIN:
        plugin = slot["plugin"]
        return [Problem(f"The slot {name} uses the plugin {plugin}; {PLUGIN} is needed", drop)]
    if slot["temporary"]:
        return [Problem(f"The slot {name} is temporary and ends with its connection", another)]
    reason = slot.get("invalidation_reason") or (
        "conflict with recovery" if slot.get("conflicting") else None
    )
    if slot["wal_status"] == "lost" or reason:
        return [
            Problem(
                f"The slot {name} is lost ({reason or 'its WAL was removed'}): changes after its "
                "position cannot be read any more",
                f"{drop} -- then start again; the changes in between are lost",
            )
        ]
    return []


def slot_warnings(name: str, slot: dict[str, Any]) -> list[Problem]:
    """What will become a problem if nobody acts."""
    if slot["wal_status"] != "unreserved":
        return []
    return [
        Problem(
            f"The slot {name} is about to lose its WAL",
            "ALTER SYSTEM SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf();",
        )
    ]


def drop_statement(name: str) -> str:
    return statement("SELECT pg_drop_replication_slot({slot});", slot=sql.Literal(name))


def create_statement(name: str) -> str:
    return statement(
        "SELECT pg_create_logical_replication_slot({slot}, 'pgoutput');", slot=sql.Literal(name)
    )


def create_slot(
    connection: psycopg.Connection[tuple[Any, ...]],
    name: str,
    timeout_s: float = CREATE_TIMEOUT_S,
) -> int:
    """Create the slot and return the LSN it starts at."""
    limit = sql.SQL("SET LOCAL statement_timeout = {}").format(round(timeout_s * 1000))
    try:
        with connection.transaction():
            connection.execute(limit)
            row = connection.execute(_CREATE, [name]).fetchone()
    except psycopg.errors.QueryCanceled:
        raise SourceError(
            f"The slot {name} could not be created within {timeout_s:g} s, because a transaction "
            "that was open before has not ended",
            fix=_end_the_oldest_writer(connection),
        ) from None
    assert row is not None
    return parse_lsn(row[0])


def _end_the_oldest_writer(connection: psycopg.Connection[tuple[Any, ...]]) -> str:
    row = connection.execute(_OLDEST_WRITER).fetchone()
    if row is None:
        return "start again; it has ended meanwhile"
    pid, age_s = row
    return f"SELECT pg_terminate_backend({pid}); -- open for {age_s} s"
