"""The schema ``walbrook`` as text: what all files of ``migrations`` together give.

``migrations/schema.txt`` has it. ``make schema`` writes the file anew; a test compares.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from cdc.state.migrate import migrate
from demo.embedded_postgres import EmbeddedPostgres

FILE = Path(__file__).parents[1] / "migrations" / "schema.txt"

_COLUMNS = """
SELECT c.relname, c.relkind::text, format('%s %s%s%s', quote_ident(a.attname),
       format_type(a.atttypid, a.atttypmod),
       CASE WHEN a.attnotnull THEN ' not null' ELSE '' END,
       CASE WHEN a.attidentity <> '' THEN ' identity'
            ELSE coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), '') END)
  FROM pg_class c
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relnamespace = 'walbrook'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'c')
 ORDER BY c.relkind, c.relname, a.attnum
"""
_CONSTRAINTS = """
SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint
 WHERE connamespace = 'walbrook'::regnamespace AND contype IN ('p', 'u', 'f', 'c')
 ORDER BY 1, contype, 2
"""
_INDEXES = """
SELECT i.indrelid::regclass::text, pg_get_indexdef(i.indexrelid) FROM pg_index i
  JOIN pg_class c ON c.oid = i.indexrelid
 WHERE c.relnamespace = 'walbrook'::regnamespace
   AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = i.indexrelid)
 ORDER BY 1, 2
"""
_TRIGGERS = """
SELECT tgrelid::regclass::text, pg_get_triggerdef(oid) FROM pg_trigger
 WHERE NOT tgisinternal AND tgrelid IN
       (SELECT oid FROM pg_class WHERE relnamespace = 'walbrook'::regnamespace)
 ORDER BY 1, 2
"""
_FUNCTIONS = """
SELECT format('%s returns %s%s', oid::regprocedure, pg_get_function_result(oid),
              CASE WHEN prosecdef THEN ', with the rights of its owner' ELSE '' END)
  FROM pg_proc WHERE pronamespace = 'walbrook'::regnamespace ORDER BY oid::regprocedure::text
"""
_KINDS = {"r": "table", "p": "partitioned table", "v": "view", "c": "type"}


def snapshot(connection: psycopg.Connection[Any]) -> str:
    """Tables, types and views with their columns, constraints, indexes; then functions."""
    lines = ["The schema walbrook; written by `make schema`."]
    details: dict[str, list[str]] = {}
    for query in (_CONSTRAINTS, _INDEXES, _TRIGGERS):
        for name, text in connection.execute(query.encode()).fetchall():
            details.setdefault(name.removeprefix("walbrook."), []).append(text)
    last = None
    for name, kind, column in connection.execute(_COLUMNS.encode()).fetchall():
        if name != last:
            lines += _indented(details.pop(last, [])) if last else []
            lines += ["", f"{_KINDS[kind]} {name}"]
            last = name
        lines.append(f"    {column}")
    assert last is not None
    lines += _indented(details.pop(last, []))
    assert not details, f"nobody has {details}"
    lines += ["", "functions"]
    lines += _indented([row[0] for row in connection.execute(_FUNCTIONS.encode()).fetchall()])
    return "\n".join(lines) + "\n"


def _indented(texts: list[str]) -> list[str]:
    return [f"    {text}" for text in texts]


def main() -> None:
    """Write the file anew, from an embedded server."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-schema-") as name,
        EmbeddedPostgres(Path(name), fast=True) as server,
        psycopg.connect(server.dsn, autocommit=True) as connection,
    ):
        migrate(connection)
        FILE.write_text(snapshot(connection))
    print(f"{FILE.name} is written", file=sys.stderr)


if __name__ == "__main__":
    main()
