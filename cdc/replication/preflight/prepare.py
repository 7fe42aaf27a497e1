"""All checks of a source in order, and what they found out about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString, Protocol

import psycopg
from psycopg import sql

from cdc.cursor import parse_lsn
from cdc.errors import SourceError, TransientError
from cdc.replication.preflight import publication as publications
from cdc.replication.preflight import schemas
from cdc.replication.preflight import slot as slots
from cdc.replication.preflight import tables as catalog
from cdc.replication.preflight.problem import SourceProblem, ended, raise_problems
from cdc.replication.preflight.reading import Reads, unreadable_tables
from cdc.replication.preflight.server import (
    server_problems,
    synchronous_warnings,
    version_problems,
)
from cdc.replication.preflight.standby import (
    StandbySnapshots,
    standby_problems,
    standby_warnings,
)
from cdc.replication.preflight.tables import CatalogName

Connection = psycopg.Connection[tuple[Any, ...]]

_SYSTEM_IDENTIFIER: Final = "SELECT system_identifier FROM pg_control_system()"
# A trial waits for no lock, and no other transaction waits for it.
_BRIEF_LOCKS: Final = "SET LOCAL lock_timeout = '2s'"
_IN_RECOVERY: Final = "SELECT pg_is_in_recovery()"
_END_OF_WAL: Final = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_insert_lsn() END::text
"""
# Physical slots of standbys that must have what a failover slot's reader is sent.
_STANDBYS_FIRST: Final = "SELECT current_setting('synchronized_standby_slots', true)"


class PublicationSettings(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def create_if_not_exists(self) -> bool: ...
    @property
    def init_sql(self) -> str | None: ...
    @property
    def tables(self) -> Sequence[str] | None: ...


class SourceSettings(Protocol):
    """What the configuration says about a source database."""

    @property
    def name(self) -> str: ...
    @property
    def slot(self) -> slots.SlotSettings: ...
    @property
    def publication(self) -> PublicationSettings: ...


@dataclass(frozen=True)
class SourceIdentity:
    """Which server this is and where its slot stands."""

    system_identifier: int
    server_version: int  # as Postgres numbers them: 180001
    slot_confirmed_lsn: int
    slot_created: bool  # by this call
    slot_active_pid: int | None  # the server process of another reader
    wal_end_lsn: int  # what is committed from now on stands at or above it
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Wanted:
    """What sinks ask for by name."""

    tables: Sequence[CatalogName]
    schemas: Sequence[str]


def prepare_source(
    connection: Connection,
    database: SourceSettings,
    tables_wanted: Sequence[str],
    *,
    schemas_wanted: Sequence[str] = (),
    primary_dsn: str | None = None,
) -> SourceIdentity:
    """Check the source, create what may be created; one ``SourceError`` names all problems.

    ``primary_dsn`` leads to the primary of a source that is a standby.
    """
    wanted = _Wanted([CatalogName.parse(name) for name in tables_wanted], schemas_wanted)
    with _refusals():
        return _prepare(connection, database, wanted, primary_dsn)


def check_source(
    connection: Connection,
    database: SourceSettings,
    tables_wanted: Sequence[str],
    *,
    schemas_wanted: Sequence[str] = (),
    reads: Reads = lambda schema, name: False,
) -> list[SourceProblem]:
    """The same checks, and nothing is created. Returns the warnings.

    One of them names the tables that a backfill reads (``reads``) and the role may not.

    A publication that the start would create is created in a transaction that is rolled back, so
    the server itself checks the role's rights, and what it publishes is checked as well.
    """
    wanted = _Wanted([CatalogName.parse(name) for name in tables_wanted], schemas_wanted)
    with _refusals(), connection.transaction(force_rollback=True):
        connection.execute(_BRIEF_LOCKS)
        warnings = _checked(connection, database, wanted, for_trial=True)[1]
        return warnings + unreadable_tables(connection, database.publication.name, reads)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except psycopg.OperationalError as error:
        raise TransientError(
            f"The source went away while it was checked: {error}", fix="it is tried again"
        ) from error
    except psycopg.Error as error:
        raise SourceError(
            f"The source refused a check: {error}", fix="grant the role what the message names"
        ) from error


def _prepare(
    connection: Connection, database: SourceSettings, wanted: _Wanted, primary_dsn: str | None
) -> SourceIdentity:
    slot, warnings = _checked(connection, database, wanted)
    in_recovery = _one(connection, _IN_RECOVERY)
    snapshots = StandbySnapshots(primary_dsn) if in_recovery else None
    return SourceIdentity(
        system_identifier=_one(connection, _SYSTEM_IDENTIFIER),
        server_version=connection.info.server_version,
        slot_confirmed_lsn=slot.confirmed_lsn
        if slot is not None
        else slots.create_slot(connection, database.slot, snapshots=snapshots),
        slot_created=slot is None,
        slot_active_pid=None if slot is None else slot.active_pid,
        wal_end_lsn=end_of_wal(connection),
        warnings=tuple(str(warning) for warning in warnings),
    )


def end_of_wal(connection: Connection) -> int:
    """Everything that is committed stands below it."""
    return parse_lsn(_one(connection, _END_OF_WAL))


def _checked(
    connection: Connection, database: SourceSettings, wanted: _Wanted, *, for_trial: bool = False
) -> tuple[slots.ExistingSlot | None, list[SourceProblem]]:
    """Its slot and the warnings; raises for problems. A missing publication may be created."""
    version = connection.info.server_version
    raise_problems(database.name, version_problems(version))
    in_recovery = _one(connection, _IN_RECOVERY)
    slot = slots.read_slot(connection, database.slot)
    problems = server_problems(
        connection,
        slot_exists=slot is not None,
        slot_active=slot is not None and slot.active_pid is not None,
    )
    problems += standby_problems(version) if in_recovery else []
    problems += _slot_problems(database.slot, slot, version, in_recovery=in_recovery)
    found, warnings = _table_problems(
        connection, database, wanted, version, slot,
        stop=bool(problems), for_trial=for_trial, in_recovery=in_recovery,
    )  # fmt: skip
    raise_problems(database.name, problems + found)

    warnings += (
        standby_warnings(connection)
        if in_recovery
        else [
            *_failover_warnings(connection, database.slot),
            *synchronous_warnings(connection, database.slot.name),
        ]
    )
    warnings += [] if slot is None else slot.warnings
    return slot, warnings


def _one(connection: Connection, query: LiteralString) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def _failover_warnings(connection: Connection, settings: slots.SlotSettings) -> list[SourceProblem]:
    if not settings.failover or _one(connection, _STANDBYS_FIRST):
        return []
    return [
        SourceProblem(
            "slot.failover is on, but synchronized_standby_slots names no standby: changes can be "
            "read before a standby has them; when it then takes over, the reader refuses to go on",
            "ALTER SYSTEM SET synchronized_standby_slots = 'the standby''s physical slot'; "
            "SELECT pg_reload_conf();",
        )
    ]


def _slot_problems(
    settings: slots.SlotSettings,
    slot: slots.ExistingSlot | None,
    version: int,
    *,
    in_recovery: bool,
) -> list[SourceProblem]:
    if slot is not None:
        return [*slot.problems, *slots.version_problems(settings, version)]
    problems = slots.settings_problems(settings, version, in_recovery=in_recovery)
    if not problems and not settings.create_if_not_exists:
        create = slots.create_statement(settings).as_string(None)
        problems.append(SourceProblem(f"The slot {settings.name} does not exist", create))
    return problems


def _table_problems(
    connection: Connection,
    database: SourceSettings,
    wanted: _Wanted,
    version: int,
    slot: slots.ExistingSlot | None,
    *,
    stop: bool,
    for_trial: bool,
    in_recovery: bool,
) -> tuple[list[SourceProblem], list[SourceProblem]]:
    """Problems, then warnings, of the publication and its tables."""
    settings = database.publication
    tables = catalog.read_tables(connection)
    listed = [CatalogName.parse(name) for name in settings.tables or ()]
    problems = schemas.missing_schemas(connection, wanted.schemas)
    publication = publications.read_publication(connection, settings.name)
    # The list is for a publication that has yet to be created.
    asked_for = [*wanted.tables, *(listed if publication is None else ())]
    problems += catalog.missing_tables(dict.fromkeys(asked_for), tables)
    if publication is None:
        create = publications.creation(settings.name, listed, version)
        if slot is not None and not slot.problems:
            problems.append(_slot_came_first(database, create))
        else:
            # The person's own SQL may commit, so it is no part of a trial.
            untried = for_trial and settings.init_sql is not None
            problems += _absent(
                connection, settings, create,
                stop=stop or untried or bool(problems), in_recovery=in_recovery,
            )  # fmt: skip
            if untried and not problems:
                return [], [
                    SourceProblem("publication.init_sql was not tried", "the first start runs it")
                ]
        publication = publications.read_publication(connection, settings.name)
    if publication is None:
        return problems, []
    problems += publications.publication_problems(settings.name, publication)
    problems += schemas.unpublished_schemas(connection, settings.name, wanted.schemas, tables)
    problems += catalog.unpublished_tables(connection, settings.name, wanted.tables, tables)
    unidentified, warnings = catalog.unidentified_tables(connection, settings.name, wanted.tables)
    return problems + unidentified, warnings


def _absent(
    connection: Connection,
    settings: PublicationSettings,
    create: sql.Composed,
    *,
    stop: bool,
    in_recovery: bool,
) -> list[SourceProblem]:
    """Create the publication if that is allowed and nothing else is wrong."""
    if in_recovery:
        by_hand = ended(settings.init_sql or create.as_string(None))
        return [
            SourceProblem(
                f"The publication {settings.name} does not exist, and a standby cannot create it",
                f"{by_hand} -- on the primary",
            )
        ]
    if not settings.create_if_not_exists:
        by_hand = ended(settings.init_sql or create.as_string(None))
        return [SourceProblem(f"The publication {settings.name} does not exist", by_hand)]
    if stop:
        return []
    return publications.create_publication(connection, settings.name, settings.init_sql, create)


def _slot_came_first(database: SourceSettings, create: sql.Composed) -> SourceProblem:
    slot, publication = database.slot.name, database.publication
    by_hand = ended(publication.init_sql or create.as_string(None))
    return SourceProblem(
        f"The slot {slot} exists but its publication {publication.name} does not, so changes that "
        "wait in the slot cannot be read",
        f"{by_hand}\n{slots.drop_statement(slot)} -- then start again; what waited is lost",
    )
