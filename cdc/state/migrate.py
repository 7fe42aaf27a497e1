"""Applying ``migrations/*.sql``: in order, each once, one process at a time.

Each file runs in a transaction with the row that records it, so a failed one leaves no trace. The
advisory lock makes a second service wait for the first. A database that holds a migration this
version does not know is refused: an older version must not write to a newer schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import psycopg
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
"""


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    statements: str


def available() -> list[Migration]:
    """The migrations that this version carries, in order."""
    found = []
    for file in resources.files("migrations").iterdir():
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(number), name, file.read_text()))
    return sorted(found, key=lambda migration: migration.number)


def migrate(connection: Connection) -> list[Migration]:
    """Bring the schema up to date over an autocommit connection; says what was applied."""
    known = available()
    try:
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        try:
            connection.execute(_PREPARE)
            return _apply_missing(connection, known)
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
    return missing
