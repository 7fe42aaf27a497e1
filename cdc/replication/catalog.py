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

# With the place of each column in the index that identifies a row: the one named as replica
# identity, or else the primary key.
_COLUMNS = """
SELECT a.attname, a.attnum, a.attndims,
       (SELECT k.place
          FROM pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
         WHERE i.indrelid = a.attrelid AND k.attnum = a.attnum AND k.place <= i.indnkeyatts
           AND CASE WHEN %(identity)s = 'i' THEN i.indisreplident ELSE i.indisprimary END)
  FROM pg_attribute a
 WHERE a.attrelid = %(oid)s::oid AND a.attnum > 0 AND NOT a.attisdropped
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
