"""A source as the configuration would name it, and what preflight says of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import pytest

from cdc.replication.preflight import SourceIdentity, prepare_source
from cdc.replication.preflight.problem import SourceNotReadyError, SourceProblem
from tests.fix_postgres import Database


@dataclass(frozen=True)
class Named:
    name: str
    create_if_not_exists: bool = True


@dataclass(frozen=True)
class NamedSlot(Named):
    failover: bool = False
    two_phase: bool = False


@dataclass(frozen=True)
class Published(Named):
    init_sql: str | None = None
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    name: str = "shop"
    slot: NamedSlot = field(default_factory=lambda: NamedSlot(f"slot_{secrets.token_hex(6)}"))
    publication: Published = field(default_factory=lambda: Published("changes"))


def prepare(
    database: Database, settings: Settings, *wanted: str, schemas: tuple[str, ...] = ()
) -> SourceIdentity:
    with database.connect() as connection:
        return prepare_source(connection, settings, wanted, schemas_wanted=schemas)


def refusals(
    database: Database, settings: Settings, *wanted: str, schemas: tuple[str, ...] = ()
) -> SourceNotReadyError:
    with pytest.raises(SourceNotReadyError) as caught:
        prepare(database, settings, *wanted, schemas=schemas)
    return caught.value


def refusal(
    database: Database, settings: Settings, *wanted: str, schemas: tuple[str, ...] = ()
) -> SourceProblem:
    (problem,) = refusals(database, settings, *wanted, schemas=schemas).problems
    return problem


def slot_count(database: Database, settings: Settings) -> int:
    rows = database.execute(
        f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{settings.slot.name}'"
    )
    return int(rows[0][0])


def publication_count(database: Database) -> int:
    return int(database.execute("SELECT count(*) FROM pg_publication")[0][0])
