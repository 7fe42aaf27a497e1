"""The tables of publications, changed and checked while the source is read.

What a configuration adds to or takes out of ``publication.tables`` is altered in a transaction of
its own per source. Invariant: all of them are committed, or none: who fails in between leaves every
publication as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from cdc.config import Config, Database
from cdc.connection import Connection
from cdc.errors import SourceError
from cdc.reach import UnreachableError, reach
from cdc.replication.preflight import check_source, end_of_wal
from cdc.replication.preflight.tables import CatalogName, published_tables
from cdc.service.process.prepare import tables_wanted

_BRIEFLY: Final = "SET LOCAL lock_timeout = '5s'"
_LISTED: Final = """
SELECT n.nspname::text, c.relname::text FROM pg_publication p
  JOIN pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_class c ON c.oid = r.prrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = %s
"""


@dataclass(frozen=True)
class PublishedChange:
    """What a source publishes before and after, and where its WAL ends."""

    before: frozenset[CatalogName]
    after: frozenset[CatalogName]
    wal_end_lsn: int


@contextmanager
def changed_publications(
    running: Config, wanted: Config, concerned: Config, *, trial: bool = False
) -> Iterator[dict[str, PublishedChange]]:
    """Alter the publications of sources that both configurations have; commit at the end.

    A ``trial`` is rolled back in any case.

    ``concerned`` has only those sinks active whose tables are to be checked. A source that does not
    answer is left out, unless its publication is to be changed.
    """
    known = {database.name: database for database in running.databases}
    with ExitStack() as held:
        found = {}
        for database in wanted.databases:
            if database.name not in known:
                continue
            alters = listed(known[database.name]) != listed(database)
            tables, schemas = tables_wanted(concerned, database)
            if not alters and not concerned_by(concerned, database):
                continue
            try:
                source = held.enter_context(reach(database.dsn(), f"database {database.name}"))
            except UnreachableError:
                if alters:
                    raise
                continue
            held.enter_context(source.transaction(force_rollback=trial))
            source.execute(_BRIEFLY)
            name = database.publication.name
            before = frozenset(published_tables(source, name))
            if alters:
                _alter(source, known[database.name], database)
            check_source(source, database, tables, schemas_wanted=schemas)
            after = frozenset(published_tables(source, name))
            found[database.name] = PublishedChange(before, after, end_of_wal(source))
        yield found


def listed(database: Database) -> frozenset[CatalogName]:
    """The tables of its publication, if the configuration lists them."""
    return frozenset(map(CatalogName.parse, database.publication.tables or ()))


def concerned_by(config: Config, database: Database) -> bool:
    return any(sink.status == "active" for sink in config.sinks_of(database.name))


def _alter(source: Connection, before: Database, after: Database) -> None:
    """From one list to the other; without a list the publication is whatever it was made."""
    if not before.publication.tables or not after.publication.tables:
        return
    name = after.publication.name
    there = {CatalogName(*map(str, row)) for row in source.execute(_LISTED, (name,)).fetchall()}
    added = sorted(listed(after) - there)
    dropped = sorted((listed(before) - listed(after)) & there)
    for verb, tables in ((sql.SQL("ADD"), added), (sql.SQL("DROP"), dropped)):
        if tables:
            _execute(source, after, _statement(name, verb, tables))


def _statement(publication: str, verb: sql.SQL, tables: Sequence[CatalogName]) -> sql.Composed:
    names = sql.SQL(", ").join(table.identifier for table in tables)
    return sql.SQL("ALTER PUBLICATION {} {} TABLE {}").format(
        sql.Identifier(publication), verb, names
    )


def _execute(source: Connection, database: Database, alter: sql.Composed) -> None:
    try:
        source.execute(alter)
    except psycopg.errors.LockNotAvailable:
        raise SourceError(
            f"the publication of database {database.name} could not be altered: one of its tables "
            "is locked",
            fix="try again when the transaction that locks it has ended",
        ) from None
    except psycopg.errors.ProgrammingError as error:
        raise SourceError(
            f"the publication of database {database.name} could not be altered: "
            f"{error.diag.message_primary}",
            fix=f"{alter.as_string(source)}; as the owner of the publication and its tables, then "
            "apply again",
        ) from None
