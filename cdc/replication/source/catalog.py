"""Asking the source's catalog about a table version: its key, its columns' numbers, its types.

The catalog may be ahead of the version that is asked about, by the time that a reader was away. It
may also be behind: with synchronous replication a commit is sent before other sessions can see it.

Invariant: an answer about columns is given only if the catalog still has all of them under these
names; about types, only what cannot be mistaken for another. An answer that lacks a column or a
type is given only after the transaction that needs it has become visible.
"""

from __future__ import annotations

import time
from typing import Any, Final

import psycopg

from cdc.decoding.catalog import CatalogNote, TypeNote
from cdc.decoding.relation import Relation
from cdc.decoding.types.builtin import is_builtin
from cdc.errors import TransientError

_VISIBLE_WITHIN_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.02

# With the place of each column in the index that identifies a row: the one named as replica
# identity, or else the primary key. An index may name a column twice.
_COLUMNS = """
SELECT a.attname, a.attnum, a.attndims,
       (SELECT min(k.place)
          FROM pg_catalog.pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
         WHERE i.indrelid = a.attrelid AND k.attnum = a.attnum AND k.place <= i.indnkeyatts
           AND CASE WHEN %(identity)s = 'i' THEN i.indisreplident ELSE i.indisprimary END)
  FROM pg_catalog.pg_attribute a
 WHERE a.attrelid = %(oid)s::oid AND a.attnum > 0 AND NOT a.attisdropped
"""
# The types of the columns and whatever they are made of. UNION ends at types that were seen.
_TYPES = """
WITH RECURSIVE used (oid) AS (
    SELECT unnest(%(types)s::oid[])
     UNION
    SELECT part.oid
      FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid,
           LATERAL (SELECT t.typelem
                     WHERE t.typsubscript = 'pg_catalog.array_subscript_handler'::regproc
                     UNION ALL SELECT t.typbasetype WHERE t.typtype = 'd'
                     UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a
                                WHERE t.typtype = 'c' AND a.attrelid = t.typrelid
                                  AND a.attnum > 0 AND NOT a.attisdropped) AS part (oid)
)
SELECT t.oid::int8, t.typname, t.typtype::text,
       coalesce((SELECT e.extname
                   FROM pg_catalog.pg_depend d
                   JOIN pg_catalog.pg_extension e ON e.oid = d.refobjid
                  WHERE d.classid = 'pg_catalog.pg_type'::regclass AND d.objid = t.oid
                    AND d.deptype = 'e'
                    AND d.refclassid = 'pg_catalog.pg_extension'::regclass), ''),
       CASE WHEN t.typsubscript = 'pg_catalog.array_subscript_handler'::regproc
            THEN t.typelem::int8 ELSE 0 END,
       t.typdelim::text, t.typbasetype::int8, t.typtypmod, t.typndims,
       ARRAY(SELECT ARRAY[a.attname::text, a.atttypid::int8::text, a.atttypmod::text]
               FROM pg_catalog.pg_attribute a
              WHERE t.typtype = 'c' AND a.attrelid = t.typrelid
                AND a.attnum > 0 AND NOT a.attisdropped
              ORDER BY a.attnum)
  FROM pg_catalog.pg_type t JOIN used ON used.oid = t.oid
 ORDER BY t.oid
"""
# A message has the lower half of a transaction's number. It is at most half a round away from the
# snapshot's end.
_VISIBLE = """
WITH now AS (SELECT pg_current_snapshot() AS snapshot,
                    pg_snapshot_xmax(pg_current_snapshot())::text::numeric AS xmax),
     given AS (SELECT snapshot, xmax,
                      mod(xmax - %(xid)s::int8 + 6442450944, 4294967296) - 2147483648 AS behind
                 FROM now)
SELECT pg_visible_in_snapshot((xmax - behind)::text::xid8, snapshot) FROM given
"""


def ask_catalog(connection: psycopg.Connection[Any], relation: Relation, xid: int) -> CatalogNote:
    """What the catalog says of this table version, for a row of transaction ``xid``.

    Waits, within a bound, for the transaction to become visible if the answer lacks something.
    """
    note = describe(connection, relation)
    if not _lacks(note, relation):
        return note
    until = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        # First the transaction, then the catalog: in between it may become visible.
        visible = _is_visible(connection, xid)
        note = describe(connection, relation)
        if visible or not _lacks(note, relation):
            return note
        if time.monotonic() > until:
            raise TransientError(
                f"transaction {xid}, which created or altered {relation}, is committed but still "
                "waits for synchronous replication, so its types cannot be looked up",
                fix="start the standby that synchronous_standby_names waits for; if that setting "
                "names every standby, name the real ones only",
                kind="not_visible",
            )
        time.sleep(_LOOK_EVERY_S)


def _is_visible(connection: psycopg.Connection[Any], xid: int) -> bool:
    row = connection.execute(_VISIBLE, {"xid": xid}).fetchone()
    return row is not None and bool(row[0])


def _lacks(note: CatalogNote, relation: Relation) -> bool:
    """Whether a column, or the type of one, is not in the catalog."""
    return len(note.attnums) < len(relation.columns) or any(
        column.type_oid not in note.types
        for column in relation.columns
        if not is_builtin(column.type_oid)
    )


def describe(connection: psycopg.Connection[Any], relation: Relation) -> CatalogNote:
    """What the catalog says now of this table version."""
    table = {"oid": relation.oid, "identity": relation.replica_identity}
    rows = connection.execute(_COLUMNS, table).fetchall()
    places = {int(place): _text(name) for name, _, _, place in rows if place is not None}
    known = {_text(name): (int(number), int(depth)) for name, number, depth, _ in rows}
    found = [known[column.name] for column in relation.columns if column.name in known]
    if len(found) < len(relation.columns):
        found = []
    custom = sorted({c.type_oid for c in relation.columns if not is_builtin(c.type_oid)})
    return CatalogNote(
        key=tuple(places[place] for place in sorted(places)),
        attnums=tuple(number for number, _ in found),
        dimensions=tuple(depth for _, depth in found),
        types=_types(connection, custom) if custom else {},
    )


def _types(connection: psycopg.Connection[Any], wanted: list[int]) -> dict[int, TypeNote]:
    notes = {}
    for row in connection.execute(_TYPES, {"types": wanted}).fetchall():
        oid, name, kind, extension, element, delimiter, base, typmod, dimensions, fields = row
        if is_builtin(oid):
            continue
        notes[oid] = TypeNote(
            oid=oid,
            name=_text(name),
            kind=_text(kind),
            extension=_text(extension),
            element=element,
            delimiter=_text(delimiter),
            base=base,
            typmod=typmod,
            dimensions=dimensions,
            fields=tuple((_text(n), int(t), int(m)) for n, t, m in fields),
        )
    return notes


def _text(value: str | bytes) -> str:
    """On a connection without an encoding psycopg gives names as bytes."""
    return value if isinstance(value, str) else value.decode()
