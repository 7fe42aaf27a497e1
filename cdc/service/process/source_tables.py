"""The tables that sinks ask for, compared with what the source publishes now.

A table that is dropped, or taken out of the publication, makes no error in the stream: its changes
just stop. A table that is renamed is followed by its oid, except in the order of event time or
processing time. Invariant: what is reported names the sink and the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import psycopg

from cdc.config import SinkConfig, TableName
from cdc.replication.preflight.problem import SourceProblem
from cdc.replication.preflight.schemas import missing_schemas, unpublished_schemas
from cdc.replication.preflight.tables import (
    CatalogName,
    missing_tables,
    published_tables,
    read_tables,
    unpublished_tables,
)
from cdc.replication.wire.relations import OWN_SCHEMA
from cdc.state.health import Condition

_LISTED_MAX: Final = 5
_NAMES_NOW: Final = """
SELECT c.oid::int8, n.nspname::text, c.relname::text
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%s::oid[])
"""

Connection = psycopg.Connection[tuple[Any, ...]]


class PublicationWatch:
    """What one source has published since the service began to look."""

    def __init__(self, publication: str) -> None:
        self._publication = publication
        self._seen: set[CatalogName] = set()

    def conditions(
        self,
        connection: Connection,
        sinks: Sequence[SinkConfig],
        oids: Mapping[TableName, int] | None = None,
    ) -> dict[str, list[Condition]]:
        """What is wrong with the tables of each sink; a sink without a problem has none.

        ``oids`` are those that tables had when changes of them were last read.
        """
        # One snapshot: a table that is renamed meanwhile is either still there or already gone.
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return self._found(connection, sinks, oids or {})

    def _found(
        self, connection: Connection, sinks: Sequence[SinkConfig], oids: Mapping[TableName, int]
    ) -> dict[str, list[Condition]]:
        tables = read_tables(connection)
        published = published_tables(connection, self._publication)
        self._seen |= published
        # A partition that was attached arrives under the name of its root.
        lost = {
            name
            for name in self._seen - published
            if name.schema != OWN_SCHEMA and (name not in tables or tables[name].root is None)
        }
        renamed = _renamed(connection, oids, tables.keys(), published)
        found = {}
        for sink in sinks:
            moved: dict[CatalogName, CatalogName] = {}
            problems: list[SourceProblem] = []
            # What a sink of several databases asks for need not be in each of them.
            if len(sink.sources) == 1:
                schemas = sink.source.include_schemas or ()
                named = [CatalogName.parse(name) for name in sink.source.include_tables or ()]
                moved = {name: renamed[name] for name in named if name in renamed}
                named = [name for name in named if name not in moved]
                problems += missing_schemas(connection, schemas)
                problems += unpublished_schemas(connection, self._publication, schemas, tables)
                problems += missing_tables(named, tables)
                problems += unpublished_tables(connection, self._publication, named, tables)
            listed = [_missing(sink.name, problems)] if problems else []
            listed += [_moved(sink, moved)] if moved else []
            if not listed and (gone := _gone(sink, lost, tables)):
                listed.append(_unpublished(sink.name, self._publication, gone))
            found[sink.name] = listed
        return found


def _renamed(
    connection: Connection,
    oids: Mapping[TableName, int],
    there: Collection[CatalogName],
    published: Collection[CatalogName],
) -> dict[CatalogName, CatalogName]:
    """The published tables that are called otherwise now, by the names that they had."""
    known = {CatalogName(name.schema, name.table): oid for name, oid in oids.items()}
    missing = {name: oid for name, oid in known.items() if name not in there}
    if not missing:
        return {}
    rows = connection.execute(_NAMES_NOW, (list(missing.values()),)).fetchall()
    now = {oid: CatalogName(schema, name) for oid, schema, name in rows}
    found = {name: now[oid] for name, oid in missing.items() if oid in now}
    return {name: new for name, new in found.items() if new in published}


def _moved(sink: SinkConfig, moved: Mapping[CatalogName, CatalogName]) -> Condition:
    named = _listed([f"{name}, which is called {new} now" for name, new in moved.items()])
    fix = (
        f"write {_listed([str(new) for new in moved.values()])} in source.include_tables of the "
        "sink, and walbrook config apply"
    )
    if sink.in_time_order:
        what = f"{sink.name} takes {named}: it gets no changes under the new name"
        return Condition("tables_renamed", "error", what, fix)
    what = f"{sink.name} takes {named}: it follows the table, and gets its changes"
    return Condition("tables_renamed", "warning", what, fix)


def _gone(
    sink: SinkConfig, lost: Iterable[CatalogName], tables: Collection[CatalogName]
) -> list[CatalogName]:
    """Tables that the sink got and gets no more; without a list of tables, dropping is no loss."""
    named = sink.source.include_tables is not None
    return sorted(
        table for table in lost if sink.source.takes(*table) and (named or table in tables)
    )


def _missing(sink: str, problems: Sequence[SourceProblem]) -> Condition:
    return Condition(
        "tables_missing",
        "error",
        f"{sink} asks for what the source does not publish: {_listed([p.what for p in problems])}",
        _listed([p.fix for p in problems]),
    )


def _unpublished(sink: str, publication: str, tables: Sequence[CatalogName]) -> Condition:
    return Condition(
        "tables_unpublished",
        "warning",
        f"{sink} gets no more changes of {_listed([str(table) for table in tables])}: the "
        f"publication {publication} no longer has them",
        f"if that was not meant, ALTER PUBLICATION {publication} ADD TABLE …; changes made "
        "meanwhile are lost to the sink",
    )


def _listed(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _LISTED_MAX} more" if len(texts) > _LISTED_MAX else ""
    return "; ".join(texts[:_LISTED_MAX]) + more
