"""The publication: there, or created, and publishing what a change stream needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from cdc.replication.preflight.problem import SourceProblem, ended, statement
from cdc.replication.preflight.tables import CatalogName

_PUBLICATION: Final = (
    "SELECT pubinsert AND pubupdate AND pubdelete FROM pg_publication WHERE pubname = %s"
)
_RIGHTS: Final = """
SELECT current_user::text, current_database()::text,
       has_database_privilege(current_database(), 'CREATE')
"""
SCHEMAS_PUBLISHABLE_FROM: Final = 150_000
# What Postgres lets only a superuser publish, whatever was granted.
_SUPERUSERS_ONLY: Final = re.compile(r"ALL\s+TABLES|TABLES\s+IN\s+SCHEMA", re.IGNORECASE)


@dataclass(frozen=True)
class ExistingPublication:
    """A publication that exists."""

    publishes_rows: bool  # inserts, updates and deletes, all three


def read_publication(
    connection: psycopg.Connection[tuple[Any, ...]], name: str
) -> ExistingPublication | None:
    """The publication as it stands, or nothing."""
    row = connection.execute(_PUBLICATION, [name]).fetchone()
    return None if row is None else ExistingPublication(publishes_rows=row[0])


def creation(name: str, tables: Sequence[CatalogName], server_version: int) -> sql.Composed:
    """The statement that creates the publication when the configuration gives none."""
    publication = sql.Identifier(name)
    if tables:
        listed = sql.SQL(", ").join(table.identifier for table in tables)
        return sql.SQL(
            "CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true)"
        ).format(publication, listed)
    if server_version >= SCHEMAS_PUBLISHABLE_FROM:
        return sql.SQL(
            "CREATE PUBLICATION {} FOR TABLES IN SCHEMA public "
            "WITH (publish_via_partition_root = true)"
        ).format(publication)
    return sql.SQL(
        "CREATE PUBLICATION {} FOR ALL TABLES WITH (publish_via_partition_root = true)"
    ).format(publication)


def create_publication(
    connection: psycopg.Connection[tuple[Any, ...]],
    name: str,
    init_sql: str | None,
    create: sql.Composed,
) -> list[SourceProblem]:
    """Create it by ``init_sql`` if given, else by ``create``; what stood in the way.

    In an open transaction a refusal undoes no more than the statement itself.
    """
    text = init_sql or create.as_string(None)
    in_transaction = connection.info.transaction_status != TransactionStatus.IDLE
    try:
        with connection.transaction() if in_transaction else nullcontext():
            connection.execute(text.encode())
    except psycopg.errors.InsufficientPrivilege as error:
        return [_no_right(connection, name, text, error)]
    except psycopg.errors.LockNotAvailable:
        return [
            SourceProblem(
                f"The publication {name} could not be created: one of its tables is locked",
                "try again when the transaction that locks it has ended",
            )
        ]
    except psycopg.errors.DuplicateObject:
        return []  # another start was faster; what it publishes is checked next
    except psycopg.errors.ProgrammingError as error:
        return [
            SourceProblem(
                f"The publication {name} could not be created: {_reason(error)}",
                f"correct {'init_sql' if init_sql else 'the list of tables'} in the configuration",
            )
        ]
    if read_publication(connection, name) is None:
        return [
            SourceProblem(
                f"init_sql ran but created no publication {name}",
                "correct init_sql, or the publication's name, in the configuration",
            )
        ]
    return []


def _no_right(
    connection: psycopg.Connection[tuple[Any, ...]], name: str, text: str, error: psycopg.Error
) -> SourceProblem:
    row = connection.execute(_RIGHTS).fetchone()
    assert row is not None
    role, database, _ = row
    what = f"The role {role} may not create the publication {name}"
    reserved = _SUPERUSERS_ONLY.search(text)
    if reserved is not None:
        form = " ".join(reserved[0].upper().split())
        return SourceProblem(
            f"{what}: Postgres lets only a superuser create one FOR {form} (to do without, list "
            "publication.tables, all owned by the role)",
            f"{ended(text)} -- as a superuser",
        )
    what += f": {_reason(error)}"
    if not row[2]:
        grant = statement(
            "GRANT CREATE ON DATABASE {database} TO {role};", database=database, role=role
        )
        return SourceProblem(what, grant)
    return SourceProblem(what, f"{ended(text)} -- as a superuser, or as the owner of the tables")


def _reason(error: psycopg.Error) -> str:
    return error.diag.message_primary or type(error).__name__


def publication_problems(name: str, publication: ExistingPublication) -> list[SourceProblem]:
    """Kinds of changes that the publication leaves out."""
    if publication.publishes_rows:
        return []
    return [
        SourceProblem(
            f"The publication {name} does not publish all of insert, update and delete",
            statement(
                "ALTER PUBLICATION {publication} "
                "SET (publish = 'insert, update, delete, truncate');",
                publication=name,
            ),
        )
    ]
