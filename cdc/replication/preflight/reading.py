"""The published tables that backfills are to read: may the role read them?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.replication.preflight.problem import SourceProblem, statement
from cdc.replication.preflight.tables import CatalogName

Reads = Callable[[str, str], bool]
"""Whether a backfill is to read the table that is published as ``schema``, ``name``."""

_LISTED_MAX: Final = 50

# A role that may read some columns is left to the backfill, which knows the published ones.
_UNREADABLE: Final = """
SELECT p.schemaname, p.tablename, n.nspname, l.relname,
       has_schema_privilege(n.oid, 'USAGE'), current_user::text
FROM pg_publication_tables p
JOIN pg_namespace pn ON pn.nspname = p.schemaname
JOIN pg_class c ON c.relnamespace = pn.oid AND c.relname = p.tablename
LEFT JOIN LATERAL pg_partition_tree(c.oid) t ON c.relkind = 'p' AND t.isleaf
JOIN pg_class l ON l.oid = coalesce(t.relid, c.oid) AND l.relkind = 'r'
JOIN pg_namespace n ON n.oid = l.relnamespace
WHERE p.pubname = %s
  AND NOT (has_schema_privilege(n.oid, 'USAGE') AND has_any_column_privilege(l.oid, 'SELECT'))
ORDER BY 3, 4
"""


def unreadable_tables(
    connection: psycopg.Connection[tuple[Any, ...]], publication: str, reads: Reads
) -> list[SourceProblem]:
    """One problem for all tables that a backfill would fail on, with the grants."""
    rows = connection.execute(_UNREADABLE, [publication]).fetchall()
    found = [row[2:] for row in rows if reads(row[0], row[1])]
    if not found:
        return []
    role = found[0][-1]
    tables = [CatalogName(schema, name) for schema, name, *_ in found[:_LISTED_MAX]]
    closed = dict.fromkeys(schema for schema, _, open_to, _ in found if not open_to)
    grants = statement(
        "GRANT SELECT ON {tables} TO {role};",
        tables=sql.SQL(", ").join(table.identifier for table in tables),
        role=role,
    )
    if closed:
        schemas = sql.SQL(", ").join(map(sql.Identifier, closed))
        usage = statement("GRANT USAGE ON SCHEMA {s} TO {role};", s=schemas, role=role)
        grants = f"{usage} {grants}"
    more = len(found) - len(tables)
    named = ", ".join(map(str, tables)) + (f" and {more} more" if more else "")
    return [
        SourceProblem(
            f"The role {role} may not read what initial_backfill asks for: {named}", grants
        )
    ]
