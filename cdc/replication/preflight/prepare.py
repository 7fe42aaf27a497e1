"""All checks of a source in order, and what they found out about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import psycopg
from psycopg import sql

from cdc.errors import SourceError, TransientError
from cdc.replication.preflight import publication as publications
from cdc.replication.preflight import schemas
from cdc.replication.preflight import slot as slots
from cdc.replication.preflight import tables as catalog
from cdc.replication.preflight.problem import Problem, ended, raise_problems
from cdc.replication.preflight.server import server_problems, version_problems
from cdc.replication.preflight.tables import TableName

Connection = psycopg.Connection[tuple[Any, ...]]

_SYSTEM_IDENTIFIER: Final = "SELECT system_identifier FROM pg_control_system()"


class SlotSettings(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def create_if_not_exists(self) -> bool: ...


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
    def slot(self) -> SlotSettings: ...
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
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Wanted:
    """What sinks ask for by name."""

    tables: Sequence[TableName]
    schemas: Sequence[str]


def prepare_source(
    connection: Connection,
    database: SourceSettings,
    tables_wanted: Sequence[str],
    *,
    schemas_wanted: Sequence[str] = (),
) -> SourceIdentity:
    """Check the source, create what may be created; one ``SourceError`` names all problems."""
    wanted = _Wanted([TableName.parse(name) for name in tables_wanted], schemas_wanted)
    try:
        return _prepare(connection, database, wanted)
    except psycopg.OperationalError as error:
        raise TransientError(
            f"The source went away while it was checked: {error}", fix="it is tried again"
        ) from error
    except psycopg.Error as error:
        raise SourceError(
            f"The source refused a check: {error}", fix="grant the role what the message names"
        ) from error


def _prepare(connection: Connection, database: SourceSettings, wanted: _Wanted) -> SourceIdentity:
    version = connection.info.server_version
    raise_problems(database.name, version_problems(version))
    slot = slots.read_slot(connection, database.slot.name)
    problems = server_problems(
        connection,
        slot_exists=slot is not None,
        slot_active=slot is not None and slot.active_pid is not None,
    )
    problems += _slot_problems(database.slot, slot)
    found, warnings = _table_problems(
        connection, database, wanted, version, slot, stop=bool(problems)
    )
    raise_problems(database.name, problems + found)

    warnings += [] if slot is None else slot.warnings
    lsn = slots.create_slot(connection, database.slot.name) if slot is None else slot.confirmed_lsn
    row = connection.execute(_SYSTEM_IDENTIFIER).fetchone()
    assert row is not None
    return SourceIdentity(
        system_identifier=row[0],
        server_version=version,
        slot_confirmed_lsn=lsn,
        slot_created=slot is None,
        slot_active_pid=None if slot is None else slot.active_pid,
        warnings=tuple(str(warning) for warning in warnings),
    )


def _slot_problems(settings: SlotSettings, slot: slots.Slot | None) -> list[Problem]:
    if slot is not None:
        return list(slot.problems)
    problems = slots.name_problems(settings.name)
    if not problems and not settings.create_if_not_exists:
        problems.append(
            Problem(
                f"The slot {settings.name} does not exist", slots.create_statement(settings.name)
            )
        )
    return problems


def _table_problems(
    connection: Connection,
    database: SourceSettings,
    wanted: _Wanted,
    version: int,
    slot: slots.Slot | None,
    *,
    stop: bool,
) -> tuple[list[Problem], list[Problem]]:
    """Problems, then warnings, of the publication and its tables."""
    settings = database.publication
    tables = catalog.read_tables(connection)
    listed = [TableName.parse(name) for name in settings.tables or ()]
    problems = schemas.missing_schemas(connection, wanted.schemas)
    problems += catalog.missing_tables(dict.fromkeys([*wanted.tables, *listed]), tables)
    publication = publications.read_publication(connection, settings.name)
    if publication is None:
        create = publications.creation(settings.name, listed, version)
        if slot is not None and not slot.problems:
            problems.append(_slot_came_first(database, create))
        else:
            problems += _absent(connection, settings, create, stop=stop or bool(problems))
        publication = publications.read_publication(connection, settings.name)
    if publication is None:
        return problems, []
    problems += publications.publication_problems(settings.name, publication)
    problems += schemas.unpublished_schemas(connection, settings.name, wanted.schemas, tables)
    problems += catalog.unpublished_tables(connection, settings.name, wanted.tables, tables)
    unidentified, warnings = catalog.unidentified_tables(connection, settings.name, wanted.tables)
    return problems + unidentified, warnings


def _absent(
    connection: Connection, settings: PublicationSettings, create: sql.Composed, *, stop: bool
) -> list[Problem]:
    """Create the publication if that is allowed and nothing else is wrong."""
    if not settings.create_if_not_exists:
        by_hand = ended(settings.init_sql or create.as_string(None))
        return [Problem(f"The publication {settings.name} does not exist", by_hand)]
    if stop:
        return []
    return publications.create_publication(connection, settings.name, settings.init_sql, create)


def _slot_came_first(database: SourceSettings, create: sql.Composed) -> Problem:
    slot, publication = database.slot.name, database.publication
    by_hand = ended(publication.init_sql or create.as_string(None))
    return Problem(
        f"The slot {slot} exists but its publication {publication.name} does not, so changes that "
        "wait in the slot cannot be read",
        f"{by_hand}\n{slots.drop_statement(slot)} -- then start again; what waited is lost",
    )
