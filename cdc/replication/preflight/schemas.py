"""The schemas that sinks ask for: do they exist, and is anything of them published?

A schema counts as published when the publication takes in one of its tables, or the tables it is
yet to have: FOR ALL TABLES, or FOR TABLES IN SCHEMA.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.replication.preflight.problem import SourceProblem, statement
from cdc.replication.preflight.publication import SCHEMAS_PUBLISHABLE_FROM
from cdc.replication.preflight.tables import SUGGESTIONS_MAX, CatalogName, Table

_SCHEMAS: Final = """
SELECT nspname FROM pg_namespace
WHERE nspname <> 'information_schema' AND nspname !~ '^pg_' ORDER BY 1
"""
_PUBLISHED: Final = """
SELECT schemaname FROM pg_publication_tables WHERE pubname = %(name)s
UNION
SELECT nspname FROM pg_namespace, pg_publication WHERE pubname = %(name)s AND puballtables
"""
_PUBLISHED_WHOLE: Final = """
SELECT n.nspname FROM pg_publication p
JOIN pg_publication_namespace pn ON pn.pnpubid = p.oid
JOIN pg_namespace n ON n.oid = pn.pnnspid
WHERE p.pubname = %(name)s
"""


def missing_schemas(
    connection: psycopg.Connection[tuple[Any, ...]], wanted: Iterable[str]
) -> list[SourceProblem]:
    """Wanted schemas that do not exist."""
    known = _names(connection.execute(_SCHEMAS))
    return [_missing(name, known) for name in wanted if name not in known]


def _missing(name: str, known: Sequence[str]) -> SourceProblem:
    near = difflib.get_close_matches(name, known, SUGGESTIONS_MAX, cutoff=0.6)
    fix = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"name one that exists in the configuration: {', '.join(known[:10])}"
    )
    return SourceProblem(f"The schema {name} does not exist", fix)


def unpublished_schemas(
    connection: psycopg.Connection[tuple[Any, ...]],
    publication: str,
    wanted: Iterable[str],
    tables: Mapping[CatalogName, Table],
) -> list[SourceProblem]:
    """Wanted schemas that exist and of which nothing would arrive."""
    whole = connection.info.server_version >= SCHEMAS_PUBLISHABLE_FROM
    published = _names(connection.execute(_PUBLISHED, {"name": publication}))
    if whole:
        published += _names(connection.execute(_PUBLISHED_WHOLE, {"name": publication}))
    known = _names(connection.execute(_SCHEMAS))
    return [
        SourceProblem(
            f"No table of the schema {name} is in the publication {publication}",
            add_schema(publication, name) if whole else add_tables(publication, name, tables),
        )
        for name in wanted
        if name in known and name not in published
    ]


def add_schema(publication: str, schema: str) -> str:
    """The statement that publishes a schema, tables to come included."""
    return statement(
        "ALTER PUBLICATION {publication} ADD TABLES IN SCHEMA {schema}; -- as a superuser",
        publication=publication,
        schema=schema,
    )


def add_tables(publication: str, schema: str, tables: Mapping[CatalogName, Table]) -> str:
    """The same for a server that cannot publish schemas: its tables of today."""
    names = sorted(
        name
        for name, table in tables.items()
        if name.schema == schema and table.logged and table.root is None
    )
    if not names:
        return "create a table in it, or take the schema out of the configuration"
    return statement(
        "ALTER PUBLICATION {publication} ADD TABLE {tables};",
        publication=publication,
        tables=sql.SQL(", ").join(name.identifier for name in names),
    )


def _names(rows: Iterable[tuple[Any, ...]]) -> list[str]:
    return [row[0] for row in rows]
