"""Asking the source's catalog about a table version: its key, its columns' numbers, its types.

The catalog may be ahead of the version that is asked about, by the time a reader was away. What
must always hold: an answer about columns is given only if the catalog still has all of them under
these names; about types, only what cannot be mistaken for another.
"""

from __future__ import annotations

from typing import Any

import psycopg

from cdc.decoding.catalog import CatalogNote, TypeNote
from cdc.decoding.relation import Relation
from cdc.decoding.types.builtin import is_builtin

# The index that identifies a row: the one named as replica identity, or else the primary key.
_KEY = """
SELECT a.attname
  FROM pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_attribute a ON a.attnum = k.attnum
 WHERE i.indrelid = %(oid)s::oid AND a.attrelid = i.indrelid AND k.place <= i.indnkeyatts
   AND CASE WHEN %(identity)s = 'i' THEN i.indisreplident ELSE i.indisprimary END
 ORDER BY k.place
"""
_COLUMNS = """
SELECT attname, attnum, attndims FROM pg_attribute
 WHERE attrelid = %(oid)s::oid AND attnum > 0 AND NOT attisdropped
"""
# The types of the columns and whatever they are made of. UNION ends at types that were seen.
_TYPES = """
WITH RECURSIVE used (oid) AS (
    SELECT unnest(%(types)s::oid[])
     UNION
    SELECT part.oid
      FROM used JOIN pg_type t ON t.oid = used.oid,
           LATERAL (SELECT t.typelem WHERE t.typsubscript::text = 'array_subscript_handler'
                     UNION ALL SELECT t.typbasetype WHERE t.typtype = 'd'
                     UNION ALL SELECT a.atttypid FROM pg_attribute a
                                WHERE t.typtype = 'c' AND a.attrelid = t.typrelid
                                  AND a.attnum > 0 AND NOT a.attisdropped) AS part (oid)
)
SELECT t.oid::int8, t.typname, t.typtype::text,
       coalesce((SELECT e.extname FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
                  WHERE d.classid = 'pg_type'::regclass AND d.objid = t.oid AND d.deptype = 'e'
                    AND d.refclassid = 'pg_extension'::regclass), ''),
       CASE WHEN t.typsubscript::text = 'array_subscript_handler' THEN t.typelem::int8 ELSE 0 END,
       t.typdelim::text, t.typbasetype::int8, t.typtypmod, t.typndims,
       ARRAY(SELECT ARRAY[a.attname::text, a.atttypid::int8::text, a.atttypmod::text]
               FROM pg_attribute a
              WHERE t.typtype = 'c' AND a.attrelid = t.typrelid
                AND a.attnum > 0 AND NOT a.attisdropped
              ORDER BY a.attnum)
  FROM pg_type t JOIN used ON used.oid = t.oid
 ORDER BY t.oid
"""


def ask_catalog(connection: psycopg.Connection[Any], relation: Relation) -> CatalogNote:
    """What the catalog says now of this table version."""
    table = {"oid": relation.oid, "identity": relation.replica_identity}
    key = tuple(str(name) for (name,) in connection.execute(_KEY, table).fetchall())
    attnums, dimensions = _columns(connection, relation)
    custom = sorted({c.type_oid for c in relation.columns if not is_builtin(c.type_oid)})
    types = _types(connection, custom) if custom else {}
    return CatalogNote(key, attnums, dimensions, types)


def _columns(
    connection: psycopg.Connection[Any], relation: Relation
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = connection.execute(_COLUMNS, {"oid": relation.oid}).fetchall()
    known = {str(name): (int(number), int(dimensions)) for name, number, dimensions in rows}
    if not all(column.name in known for column in relation.columns):
        return (), ()
    found = [known[column.name] for column in relation.columns]
    return tuple(number for number, _ in found), tuple(dimensions for _, dimensions in found)


def _types(connection: psycopg.Connection[Any], wanted: list[int]) -> dict[int, TypeNote]:
    notes = {}
    for row in connection.execute(_TYPES, {"types": wanted}).fetchall():
        oid, name, kind, extension, element, delimiter, base, typmod, dimensions, fields = row
        if is_builtin(oid):
            continue
        notes[oid] = TypeNote(
            oid=oid,
            name=name,
            kind=kind,
            extension=extension,
            element=element,
            delimiter=delimiter,
            base=base,
            typmod=typmod,
            dimensions=dimensions,
            fields=tuple((str(n), int(t), int(m)) for n, t, m in fields),
        )
    return notes
