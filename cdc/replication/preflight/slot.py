"""The replication slot: there and usable, or created.

A slot that lost its WAL or belongs to something else is never replaced silently: dropping one
forgets which changes were not yet read, and that is an operator's decision.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any, Final, Protocol

import psycopg
from psycopg import sql

from cdc.cursor import parse_lsn
from cdc.errors import SourceError
from cdc.replication.preflight.problem import SourceProblem, statement
from cdc.replication.preflight.standby import StandbySnapshots
from cdc.replication.source.slot_row import READ_SLOT, SlotRow, slot_fault, slot_row

CREATE_TIMEOUT_S: Final = 60.0
FAILOVER_FROM: Final = 170_000
TWO_PHASE_FROM: Final = 150_000
_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")

# The slot's first snapshot waits for every transaction that was open when it was asked for.
_OLDEST_WRITER: Final = """
SELECT pid, floor(extract(epoch FROM clock_timestamp() - xact_start))::bigint
FROM pg_stat_activity
WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
ORDER BY xact_start LIMIT 1
"""


class SlotSettings(Protocol):
    """What the configuration says about the slot."""

    @property
    def name(self) -> str: ...
    @property
    def create_if_not_exists(self) -> bool: ...
    @property
    def failover(self) -> bool: ...
    @property
    def two_phase(self) -> bool: ...


@dataclass(frozen=True)
class ExistingSlot:
    """A slot that exists, with what is wrong with it."""

    confirmed_lsn: int
    active_pid: int | None
    problems: tuple[SourceProblem, ...]
    warnings: tuple[SourceProblem, ...]


def read_slot(
    connection: psycopg.Connection[tuple[Any, ...]], settings: SlotSettings
) -> ExistingSlot | None:
    """The slot as it stands, or nothing."""
    row = connection.execute(READ_SLOT, [settings.name]).fetchone()
    if row is None:
        return None
    columns, database, limit_mib, in_recovery = row
    slot = slot_row(settings.name, columns, limit_mib)
    return ExistingSlot(
        confirmed_lsn=slot.confirmed_lsn,
        active_pid=slot.active_pid,
        problems=tuple(slot_problems(slot, database, in_recovery=in_recovery)),
        warnings=tuple(slot_warnings(slot, settings, connection.info.server_version)),
    )


def settings_problems(
    settings: SlotSettings, server_version: int, *, in_recovery: bool
) -> list[SourceProblem]:
    """What a slot that is not there yet cannot be, by its name, the version or the server."""
    problems = []
    if not _NAME.fullmatch(settings.name):
        problems.append(
            SourceProblem(
                f"'{settings.name}' cannot be the name of a slot",
                "use up to 63 lower-case letters, digits and underscores in the configuration",
            )
        )
    if settings.failover and in_recovery:
        problems.append(
            SourceProblem(
                "slot.failover is asked for, but the source is a standby, and only a primary's "
                "slot can be kept in step on others",
                "set slot.failover to false, or let the source be the primary",
            )
        )
    return problems + version_problems(settings, server_version)


def version_problems(settings: SlotSettings, server_version: int) -> list[SourceProblem]:
    """What is asked of the slot and the server is too old for."""
    major, problems = server_version // 10_000, []
    if settings.failover and server_version < FAILOVER_FROM:
        problems.append(
            SourceProblem(
                f"slot.failover needs Postgres 17 or later; the server runs {major}",
                "set slot.failover to false, or upgrade the server",
            )
        )
    if settings.two_phase and server_version < TWO_PHASE_FROM:
        problems.append(
            SourceProblem(
                f"slot.two_phase needs Postgres 15 or later; the server runs {major}",
                "set slot.two_phase to false, or upgrade the server",
            )
        )
    return problems


_FIX_BY_FAULT: Final = {
    "slot_physical": "name another slot in the configuration",
    "slot_database": "name another slot in the configuration",
    "slot_temporary": "name another slot in the configuration",
}


def slot_problems(slot: SlotRow, database: str, *, in_recovery: bool) -> list[SourceProblem]:
    """Why the slot cannot serve this database."""
    if in_recovery and slot.synced:
        return [
            SourceProblem(
                f"The slot {slot.name} is a copy that this standby keeps in step with its primary; "
                "it can be read only once the standby is promoted",
                "let the source be the primary, or name another slot in the configuration",
            )
        ]
    fault = slot_fault(slot, database)
    if fault is None:
        return []
    drop = drop_statement(slot.name)
    if fault.kind == "slot_lost":
        drop = (
            "walbrook repair, with the name of the source, makes a new slot and bridges what was "
            f"lost; for a source that was never read: {drop} -- then start again"
        )
    return [SourceProblem(fault.what, _FIX_BY_FAULT.get(fault.kind, drop))]


def slot_warnings(
    slot: SlotRow, settings: SlotSettings, server_version: int
) -> list[SourceProblem]:
    """What will become a problem unless an operator acts, and what is not as configured."""
    warnings = []
    if slot.at_risk:
        warnings.append(
            SourceProblem(
                f"The slot {slot.name} is about to lose its WAL",
                "ALTER SYSTEM SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf();",
            )
        )
    if slot.failover != settings.failover and server_version >= FAILOVER_FROM:
        wanted, found = _flag(settings.failover), _flag(slot.failover)
        warnings.append(
            SourceProblem(
                f"slot.failover is {wanted} in the configuration, but the slot {slot.name} was "
                f"created with {found}",
                "stop the service, then over a replication connection (psql with "
                "replication=database): "
                + statement(
                    "ALTER_REPLICATION_SLOT {slot} ( FAILOVER {wanted} );",
                    slot=slot.name,
                    wanted=sql.SQL("true") if settings.failover else sql.SQL("false"),
                ),
            )
        )
    if slot.two_phase != settings.two_phase:
        wanted, found = _flag(settings.two_phase), _flag(slot.two_phase)
        warnings.append(
            SourceProblem(
                f"slot.two_phase is {wanted} in the configuration, but the slot {slot.name} was "
                f"created with {found}, which counts",
                "set slot.two_phase to what the slot has; only a new slot can be another",
            )
        )
    return warnings


def _flag(value: bool) -> str:
    return "true" if value else "false"


def drop_statement(name: str) -> str:
    return statement("SELECT pg_drop_replication_slot({slot});", slot=sql.Literal(name))


def create_statement(settings: SlotSettings) -> sql.Composed:
    """The query that creates the slot as configured and answers with its LSN."""
    flags = {"twophase": settings.two_phase, "failover": settings.failover}
    wanted = [sql.SQL(", {} => true").format(sql.Identifier(f)) for f, on in flags.items() if on]
    return sql.SQL("SELECT lsn FROM pg_create_logical_replication_slot({}, 'pgoutput'{});").format(
        sql.Literal(settings.name), sql.SQL("").join(wanted)
    )


def create_slot(
    connection: psycopg.Connection[tuple[Any, ...]],
    settings: SlotSettings,
    timeout_s: float = CREATE_TIMEOUT_S,
    *,
    snapshots: StandbySnapshots | None = None,
) -> int:
    """Create the slot and return the LSN it starts at; ``snapshots`` come from the primary."""
    limit = sql.SQL("SET LOCAL statement_timeout = {}").format(round(timeout_s * 1000))
    try:
        with snapshots or contextlib.nullcontext(), connection.transaction():
            connection.execute(limit)
            row = connection.execute(create_statement(settings)).fetchone()
    except psycopg.errors.QueryCanceled:
        if snapshots is not None:
            raise snapshots.timed_out(settings.name, timeout_s) from None
        raise SourceError(
            f"The slot {settings.name} could not be created within {timeout_s:g} s, because a "
            "transaction that was open before has not ended",
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
