"""The tables of a publication, and of which partitioned table each is a leaf."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from cdc.replication.wire.relations import OWN_SCHEMA

_TABLES: Final = """
SELECT p.schemaname || '.' || p.tablename, coalesce(r.nspname || '.' || r.relname,
                                                    p.schemaname || '.' || p.tablename)
  FROM pg_publication_tables p
  JOIN pg_namespace n ON n.nspname = p.schemaname
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
  LEFT JOIN LATERAL (SELECT rn.nspname, rc.relname
                       FROM pg_class rc JOIN pg_namespace rn ON rn.oid = rc.relnamespace
                      WHERE rc.oid = pg_partition_root(c.oid)) r ON true
 WHERE p.pubname = %s AND p.schemaname <> %s
"""


def partition_roots(connection: psycopg.Connection[Any], publication: str) -> dict[str, str]:
    """Each published table with its root, as ``schema.table``; most are their own."""
    rows = connection.execute(_TABLES, (publication, OWN_SCHEMA)).fetchall()
    return {str(table): str(root) for table, root in rows}
