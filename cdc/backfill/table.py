"""A table that is to be read: what the publication sends of it, and where its rows lie.

Invariant: what is read is what changes bring: the published columns of the rows that pass the
publication's row filter. A role that row-level security shows fewer rows is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg
import xxhash
from psycopg import sql

from cdc.config.table import TableName
from cdc.decoding.relation import Relation, parse_relation
from cdc.errors import OperatorError
from cdc.replication.preflight.tables import CatalogName, near_tables, read_tables
from cdc.replication.source.published import published_relations
from cdc.replication.wire.relations import OWN_SCHEMA

Connection = psycopg.Connection[Any]

_ROW_FILTERS_FROM: Final = 150000

_PUBLISHED: Final = """
SELECT p.schemaname, p.tablename FROM pg_publication_tables p WHERE p.pubname = %s
 ORDER BY 1, 2
"""
# What is read under the name of a published table: itself, or the leaves of a partitioned one.
_LEAVES: Final = """
SELECT l.oid::int8, n.nspname, l.relname, coalesce(pg_relation_filenode(l.oid), 0)::int8,
       coalesce(pg_relation_size(l.oid), 0), coalesce(a.amname, '') = 'heap',
       greatest(l.reltuples, 0)::int8, row_security_active(l.oid)
  FROM pg_class c
  JOIN pg_namespace cn ON cn.oid = c.relnamespace
  JOIN LATERAL (SELECT c.oid WHERE c.relkind <> 'p'
                 UNION SELECT t.relid FROM pg_partition_tree(c.oid) t WHERE t.isleaf) part (oid)
       ON true
  JOIN pg_class l ON l.oid = part.oid AND l.relkind IN ('r', 'm')
  JOIN pg_namespace n ON n.oid = l.relnamespace
  LEFT JOIN pg_am a ON a.oid = l.relam
 WHERE cn.nspname = %s AND c.relname = %s
 ORDER BY l.oid
"""
_ROW_FILTER: Final = """
SELECT rowfilter FROM pg_publication_tables
 WHERE pubname = %s AND schemaname = %s AND tablename = %s
"""
_TOASTED: Final = """
SELECT EXISTS (SELECT FROM pg_attribute a
                WHERE a.attrelid = %s::oid AND a.attnum > 0 AND NOT a.attisdropped
                  AND a.attlen = -1 AND a.attstorage <> 'p')
"""
# Of which published tables a partitioned table consists whose root is not sent itself.
_PARTS: Final = """
SELECT p.schemaname, p.tablename
  FROM pg_class c
  JOIN pg_namespace cn ON cn.oid = c.relnamespace
  JOIN LATERAL pg_partition_tree(c.oid) t ON t.isleaf
  JOIN pg_class l ON l.oid = t.relid
  JOIN pg_namespace n ON n.oid = l.relnamespace
  JOIN pg_publication_tables p
       ON p.pubname = %s AND p.schemaname = n.nspname AND p.tablename = l.relname
 WHERE cn.nspname = %s AND c.relname = %s AND c.relkind = 'p'
 ORDER BY 1, 2
"""


@dataclass(frozen=True)
class Leaf:
    """A table that holds rows of its own."""

    oid: int
    name: TableName
    filenode: int
    bytes: int
    is_heap: bool
    rows: int  # about how many, as the last ANALYZE has it


@dataclass(frozen=True)
class PublishedTable:
    """A table as its changes come, and the leaves that hold its rows."""

    name: TableName
    message: bytes  # its Relation message, as the log keeps it
    row_filter: str | None
    leaves: tuple[Leaf, ...]
    may_omit: bool  # whether an update may leave out a TOAST value

    @property
    def relation(self) -> Relation:
        return parse_relation(self.message)

    @property
    def schema_id(self) -> int:
        return xxhash.xxh3_64_intdigest(self.message)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.relation.columns)

    @property
    def key(self) -> tuple[str, ...]:
        relation = self.relation
        return tuple(relation.columns[at].name for at in relation.key)

    @property
    def is_partitioned(self) -> bool:
        """Whether its rows lie in partitions, which tables that inherit from it are not."""
        return [leaf.oid for leaf in self.leaves] != [self.relation.oid]

    @property
    def has_key(self) -> bool:
        """Whether a key tells rows apart; all columns do not: two rows may have the same values."""
        relation = self.relation
        by_all = relation.replica_identity == "f" and len(relation.key) == len(relation.columns)
        return bool(relation.key) and not by_all


def published_tables(connection: Connection, publication: str) -> list[TableName]:
    """The tables whose changes come, by the names that changes have."""
    rows = connection.execute(_PUBLISHED, (publication,)).fetchall()
    return [TableName(schema, table) for schema, table in rows if schema != OWN_SCHEMA]


def sent_as(connection: Connection, publication: str, named: TableName) -> list[TableName]:
    """Under which names the changes of a table come: its own, or those of its partitions."""
    if named in published_tables(connection, publication):
        return [named]
    rows = connection.execute(_PARTS, (publication, named.schema, named.table)).fetchall()
    if not rows:
        raise _not_sent(connection, publication, named)
    return [TableName(schema, table) for schema, table in rows]


def _not_sent(connection: Connection, publication: str, named: TableName) -> OperatorError:
    """Why no change of a table comes: it is not there, or not published."""
    wanted, tables = CatalogName(named.schema, named.table), read_tables(connection)
    if wanted not in tables:
        near = near_tables(wanted, tables)
        again = f"did you mean {' or '.join(near)}? " if near else ""
        return OperatorError(
            f"there is no table {named} in the source",
            fix=f"{again}start it for a table that exists; walbrook backfill cancel ends one that "
            "has failed",
            kind="no_such_table",
        )
    add = sql.SQL("ALTER PUBLICATION {} ADD TABLE {};").format(
        sql.Identifier(publication), wanted.identifier
    )
    return OperatorError(
        f"table {named} is not in the publication {publication}",
        fix=f"{add.as_string(None)} Then retry the backfill",
        kind="not_published",
    )


def describe_table(connection: Connection, publication: str, name: TableName) -> PublishedTable:
    """What is to be read of a published table, as the catalog has it now."""
    found = published_relations(connection, publication, name)
    if not found:
        raise OperatorError(
            f"table {name} is no longer in the publication {publication}, or was dropped",
            fix="add it again and retry the backfill, or skip it",
            kind="not_published",
        )
    (message,) = found
    relation = parse_relation(message)
    leaves = []
    for oid, schema, table, filenode, size, is_heap, rows, hidden in connection.execute(
        _LEAVES, (name.schema, name.table)
    ).fetchall():
        if hidden:
            raise OperatorError(
                f"row-level security hides rows of {schema}.{table} from the role that reads it",
                fix="ALTER ROLE … BYPASSRLS, or read with the owner of the table",
                kind="row_security",
            )
        leaves.append(Leaf(oid, TableName(schema, table), filenode, size, is_heap, rows))
    return PublishedTable(
        name,
        message,
        _row_filter(connection, publication, name),
        tuple(leaves),
        relation.replica_identity != "f" and _one(connection, _TOASTED, (relation.oid,)),
    )


def _row_filter(connection: Connection, publication: str, name: TableName) -> str | None:
    if connection.info.server_version < _ROW_FILTERS_FROM:
        return None
    row = connection.execute(_ROW_FILTER, (publication, name.schema, name.table)).fetchone()
    return None if row is None else row[0]


def _one(connection: Connection, query: str, arguments: tuple[object, ...]) -> bool:
    row = connection.execute(query.encode(), arguments).fetchone()
    return row is not None and bool(row[0])
