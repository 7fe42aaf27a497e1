"""Bringing the schema ``walbrook`` up to date: numbered migrations, then functions and views.

``migrations/NNNN_name.sql`` are tables, types and indexes. They are applied in order, each once,
each in one transaction with the row that records it, so a failed one leaves no trace.
``migrations/functions`` and ``migrations/views`` have one definition of each function and view. All
of them are applied in one transaction whenever one of their files has changed, and after every
migration. A migration that removes a function or a view drops it; one that changes the columns of
a view drops the view, which is then made again.

An advisory lock makes a second service wait for the first. A database that holds a migration this
version does not know is refused: an older version must not write to a newer schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import psycopg
import xxhash
from psycopg import sql

from cdc.connection import Connection
from cdc.errors import OperatorError

_LOCK = 0x77616C62  # 'walb'

_PREPARE = """
CREATE SCHEMA IF NOT EXISTS walbrook;
CREATE TABLE IF NOT EXISTS walbrook.migrations (
    number     integer PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS walbrook.definitions (
    file       text PRIMARY KEY,
    checksum   text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""
# Bodies may name functions and views of files that come later.
_BEFORE_DEFINITIONS = "SET LOCAL check_function_bodies = off; DELETE FROM walbrook.definitions"
_AFTER_DEFINITIONS = "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA walbrook FROM PUBLIC"


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    statements: str


@dataclass(frozen=True)
class Definition:
    """A file of functions or of views."""

    file: str
    statements: str

    @property
    def checksum(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.statements.encode())


def available() -> list[Migration]:
    """The migrations that this version carries, in order."""
    found = []
    for file in resources.files("migrations").iterdir():
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(number), name, file.read_text()))
    return sorted(found, key=lambda migration: migration.number)


def definitions() -> list[Definition]:
    """The functions and then the views that this version carries; views may call functions."""
    return [
        Definition(f"{folder}/{file.name}", file.read_text())
        for folder in ("functions", "views")
        for file in sorted(
            resources.files("migrations").joinpath(folder).iterdir(), key=lambda file: file.name
        )
    ]


def migrate(connection: Connection) -> list[Migration]:
    """Bring the schema up to date over an autocommit connection; says what was applied."""
    known = available()
    try:
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        try:
            connection.execute(_PREPARE)
            applied = _apply_missing(connection, known)
            _define(connection, definitions())
            return applied
        finally:
            connection.execute("SELECT pg_advisory_unlock(%s)", (_LOCK,))
    except psycopg.errors.InsufficientPrivilege as error:
        raise OperatorError(
            f"the role may not create the schema walbrook: {error.diag.message_primary}",
            fix=_grant(connection),
        ) from error


def _grant(connection: Connection) -> str:
    row = connection.execute("SELECT current_database()::text, current_user::text").fetchone()
    database, role = row or ("", "")
    statement = sql.SQL("GRANT CREATE ON DATABASE {} TO {};").format(
        sql.Identifier(str(database)), sql.Identifier(str(role))
    )
    return f"{statement.as_string(connection)} or set state.url to a database where it may"


def _apply_missing(connection: Connection, known: list[Migration]) -> list[Migration]:
    rows = connection.execute("SELECT number FROM walbrook.migrations").fetchall()
    applied = {row[0] for row in rows}
    newer = applied - {migration.number for migration in known}
    if newer:
        raise OperatorError(
            f"the schema walbrook holds migration {max(newer, key=str)}, "
            "which this version does not know",
            fix="upgrade walbrook, or give this one a state database of its own",
        )
    missing = [migration for migration in known if migration.number not in applied]
    for migration in missing:
        with connection.transaction():
            connection.execute(migration.statements.encode())
            connection.execute(
                "INSERT INTO walbrook.migrations (number, name) VALUES (%s, %s)",
                (migration.number, migration.name),
            )
            # What it dropped of them is made again, also after a crash at this point.
            connection.execute("DELETE FROM walbrook.definitions")
    return missing


def _define(connection: Connection, known: list[Definition]) -> None:
    rows = connection.execute("SELECT file, checksum FROM walbrook.definitions").fetchall()
    if set(rows) == {(each.file, each.checksum) for each in known}:
        return
    with connection.transaction():
        connection.execute(_BEFORE_DEFINITIONS)
        for each in known:
            connection.execute(each.statements.encode())
            connection.execute(
                "INSERT INTO walbrook.definitions (file, checksum) VALUES (%s, %s)",
                (each.file, each.checksum),
            )
        connection.execute(_AFTER_DEFINITIONS)
