"""The tables of the source: do they exist, are they published, can their rows be identified?

Partitioned tables are published either under the root's name or under each leaf's, and it is the
leaves whose replica identity Postgres asks for. Both views are read here, in two queries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import psycopg
from psycopg import sql

from cdc.config.table import HOW_TO_WRITE
from cdc.config.table import TableName as WrittenName
from cdc.errors import SourceError
from cdc.replication.preflight.problem import SourceProblem, statement

SUGGESTIONS_MAX: Final = 3

_TABLES: Final = """
SELECT n.nspname, c.relname, c.relpersistence::text, rn.nspname, r.relname
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_class r ON r.oid = pg_partition_root(c.oid) AND r.oid <> c.oid
LEFT JOIN pg_namespace rn ON rn.oid = r.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
  AND n.nspname !~ '^pg_(toast|temp)'
"""

# A published root stands for its leaves; a plain table is its own leaf.
_PUBLISHED: Final = """
SELECT p.schemaname, p.tablename, ln.nspname, l.relname,
       CASE l.relreplident
         WHEN 'f' THEN true
         WHEN 'n' THEN false
         ELSE EXISTS (
           SELECT FROM pg_index i
           WHERE i.indrelid = l.oid AND i.indisvalid AND i.indimmediate
             AND CASE l.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END)
       END
FROM pg_publication_tables p
JOIN pg_namespace n ON n.nspname = p.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
LEFT JOIN LATERAL pg_partition_tree(c.oid) t ON c.relkind = 'p' AND t.isleaf
JOIN pg_class l ON l.oid = coalesce(t.relid, c.oid) AND l.relkind = 'r'
JOIN pg_namespace ln ON ln.oid = l.relnamespace
WHERE p.pubname = %s
ORDER BY 1, 2, 3, 4
"""
# A root without leaves has nothing to identify, yet it is published.
_PUBLISHED_NAMES: Final = (
    "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = %s"
)


class CatalogName(NamedTuple):
    """A table's schema and name as the catalog spells them: no two tables are equal."""

    schema: str
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a name as the configuration does; one from it keeps its two parts."""
        try:
            name = WrittenName.parse(text)
        except ValueError:
            raise SourceError(
                f"'{text}' is not the name of a table", fix=f"write it as {HOW_TO_WRITE}"
            ) from None
        return cls(name.schema, name.table)


@dataclass(frozen=True)
class Table:
    """A table that exists."""

    name: CatalogName
    logged: bool
    root: CatalogName | None  # of the partition tree, unless the table is the root itself


@dataclass(frozen=True)
class PublishedLeaf:
    """A table whose rows arrive under the name ``published_as``."""

    name: CatalogName
    published_as: CatalogName
    identified: bool


def read_tables(connection: psycopg.Connection[tuple[Any, ...]]) -> dict[CatalogName, Table]:
    """Every table of the database that can be published, by name."""
    rows = connection.execute(_TABLES).fetchall()
    tables = (
        Table(
            CatalogName(schema, name),
            logged=persistence == "p",
            root=None if root_name is None else CatalogName(root_schema, root_name),
        )
        for schema, name, persistence, root_schema, root_name in rows
    )
    return {table.name: table for table in tables}


def missing_tables(
    wanted: Iterable[CatalogName], tables: dict[CatalogName, Table]
) -> list[SourceProblem]:
    """Wanted tables that do not exist or write no WAL."""
    problems = []
    for name in wanted:
        table = tables.get(name)
        if table is None:
            problems.append(_missing(name, tables))
        elif not table.logged:
            problems.append(
                SourceProblem(
                    f"The table {name} is unlogged, so its changes never reach the WAL",
                    statement("ALTER TABLE {table} SET LOGGED;", table=name.identifier),
                )
            )
    return problems


def near_tables(name: CatalogName, tables: Iterable[CatalogName]) -> list[str]:
    """The tables that a person may have meant, as the configuration writes them."""
    by_text = {WrittenName(*table).written(): table for table in tables}
    near = difflib.get_close_matches(
        WrittenName(*name).written(), by_text, SUGGESTIONS_MAX, cutoff=0.6
    )
    same_name = [text for text, table in by_text.items() if table.name == name.name]
    return list(dict.fromkeys([*same_name, *near]))[:SUGGESTIONS_MAX]


def _missing(name: CatalogName, tables: Iterable[CatalogName]) -> SourceProblem:
    suggested = near_tables(name, tables)
    fix = (
        f"did you mean {' or '.join(suggested)}?"
        if suggested
        else "create the table, or correct its name in the configuration"
    )
    return SourceProblem(f"The table {name} does not exist", fix)


def published_tables(
    connection: psycopg.Connection[tuple[Any, ...]], publication: str
) -> set[CatalogName]:
    """The names under which changes arrive."""
    rows = connection.execute(_PUBLISHED_NAMES, [publication]).fetchall()
    return {CatalogName(*row) for row in rows}


def unpublished_tables(
    connection: psycopg.Connection[tuple[Any, ...]],
    publication: str,
    wanted: Iterable[CatalogName],
    tables: dict[CatalogName, Table],
) -> list[SourceProblem]:
    """Wanted tables whose changes would not arrive under their own name."""
    published = published_tables(connection, publication)
    return [
        _unpublished(publication, name, published, tables)
        for name in wanted
        if name in tables and tables[name].logged and name not in published
    ]


def _unpublished(
    publication: str,
    name: CatalogName,
    published: set[CatalogName],
    tables: dict[CatalogName, Table],
) -> SourceProblem:
    root = tables[name].root
    if root is not None and root in published:
        return SourceProblem(
            f"Changes of the partition {name} arrive under the name of its root, {root}",
            f"name {root} in the configuration instead",
        )
    if any(tables[leaf].root == name for leaf in published if leaf in tables):
        return SourceProblem(
            f"Changes of {name} arrive under the names of its partitions",
            statement(
                "ALTER PUBLICATION {publication} SET (publish_via_partition_root = true);",
                publication=publication,
            ),
        )
    return SourceProblem(
        f"The table {name} is not in the publication {publication}",
        statement(
            "ALTER PUBLICATION {publication} ADD TABLE {table};",
            publication=publication,
            table=name.identifier,
        ),
    )


def unidentified_tables(
    connection: psycopg.Connection[tuple[Any, ...]],
    publication: str,
    wanted: Sequence[CatalogName],
) -> tuple[list[SourceProblem], list[SourceProblem]]:
    """Published tables on which an update or a delete fails: wanted ones, then the others."""
    errors: list[SourceProblem] = []
    warnings: list[SourceProblem] = []
    for row in connection.execute(_PUBLISHED, [publication]).fetchall():
        leaf = PublishedLeaf(CatalogName(*row[2:4]), CatalogName(*row[0:2]), identified=row[4])
        if not leaf.identified:
            chosen = errors if leaf.published_as in wanted else warnings
            chosen.append(_unidentified(leaf.name))
    return errors, warnings


def _unidentified(name: CatalogName) -> SourceProblem:
    fix = statement("ALTER TABLE {table} REPLICA IDENTITY FULL;", table=name.identifier)
    return SourceProblem(
        f"The published table {name} has no usable replica identity, "
        "so Postgres refuses updates and deletes on it (REPLICA IDENTITY DEFAULT with a primary "
        "key would serve as well)",
        fix,
    )
