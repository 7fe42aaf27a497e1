"""What a publication shows of its tables now: names, columns and types, as a check needs them.

Invariant: a column is here if and only if the next change of its table has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg

from cdc.config import Database
from cdc.connection import Connection
from cdc.decoding.relation import Relation, parse_relation
from cdc.errors import WalbrookError
from cdc.reach import reach
from cdc.replication.source.published import published_relations

_PUBLICATION: Final = "SELECT 1 FROM pg_publication WHERE pubname = %s"
_SCHEMAS: Final = "SELECT nspname::text FROM pg_namespace WHERE nspname !~ '^pg_(toast|temp)'"
_TYPE_NAMES: Final = "SELECT oid::int8, typname::text FROM pg_type WHERE oid = ANY (%s::oid[])"
_ROOTS: Final = """
SELECT c.oid::int8, n.nspname::text, r.relname::text
  FROM pg_class c JOIN pg_class r ON r.oid = pg_partition_root(c.oid) AND r.oid <> c.oid
  JOIN pg_namespace n ON n.oid = r.relnamespace
 WHERE c.oid = ANY (%s::oid[])
"""


@dataclass(frozen=True)
class ShownTable:
    """A table of a publication: its name, whose partition it is, its columns with their types."""

    schema: str
    name: str
    columns: Mapping[str, str]  # column → pg_type.typname; of a domain, the type below it
    root: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True)
class PublishedTables:
    """The tables that a publication shows and the schemas; or why they are not known."""

    tables: Sequence[ShownTable] = ()
    schemas: frozenset[str] = field(default_factory=frozenset)
    why_not: str = ""


def shown_by(database: Database) -> PublishedTables:
    """What the database's publication shows; never raises for a server that does not answer."""
    publication = database.publication.name
    try:
        with reach(database.dsn(), f"database {database.name}") as source:
            if source.execute(_PUBLICATION, (publication,)).fetchone() is None:
                return PublishedTables(why_not=f"the publication {publication} is not there yet")
            messages = published_relations(source, publication)
            tables = _described(source, [parse_relation(message) for message in messages])
            schemas = source.execute(_SCHEMAS).fetchall()
            return PublishedTables(tables, frozenset(str(name) for (name,) in schemas))
    except WalbrookError as error:
        return PublishedTables(why_not=error.what)
    except psycopg.Error as error:
        return PublishedTables(why_not=str(error).strip())


def _described(source: Connection, relations: Sequence[Relation]) -> list[ShownTable]:
    below = {
        column.type_oid: _below(relation, column.type_oid)
        for relation in relations
        for column in relation.columns
    }
    found = source.execute(_TYPE_NAMES, ([*below.values()],)).fetchall()
    names = {oid: str(name) for oid, name in found}
    oids = [relation.oid for relation in relations]
    roots = {
        oid: (str(schema), str(name))
        for oid, schema, name in source.execute(_ROOTS, (oids,)).fetchall()
    }
    return [
        ShownTable(
            relation.namespace,
            relation.name,
            {c.name: names.get(below[c.type_oid], "unknown") for c in relation.columns},
            roots.get(relation.oid),
        )
        for relation in relations
    ]


def _below(relation: Relation, type_oid: int) -> int:
    """The type that a domain is made of, through as many as there are; any other is itself."""
    while (note := relation.catalog.types.get(type_oid)) is not None and note.kind == "d":
        type_oid = note.base
    return type_oid
