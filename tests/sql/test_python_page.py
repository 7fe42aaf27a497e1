"""The program on docs/python.md runs as it stands, against a real server."""

from __future__ import annotations

import re
from pathlib import Path

import walbrook
from tests.fix_postgres import Database

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_program_of_the_page_decodes_what_a_slot_gives(database: Database) -> None:
    database.execute("CREATE TYPE pair AS (a int, b text)")
    database.execute("CREATE TABLE item (b text, id int, p pair, PRIMARY KEY (id, b))")
    database.execute("CREATE PUBLICATION my_publication FOR TABLE item")
    database.execute("SELECT pg_create_logical_replication_slot('my_slot', 'pgoutput')")
    database.execute("SET synchronous_commit = on; INSERT INTO item VALUES ('x', 1, (2, 'y'))")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(program.replace('"dbname=shop"', repr(database.dsn)), names)
    decoded = names["decoded"]
    assert isinstance(decoded, walbrook.Decoded)
    (change,) = decoded.changes.to_pylist()
    assert change["record"] == '{"b":"x","id":1,"p":{"a":2,"b":"y"}}'
    assert change["record_pks"] == '["1","x"]'
    (row,) = decoded.tables[0].rows.to_pylist()
    assert row["record"] == {"b": "x", "id": 1, "p": {"a": 2, "b": "y"}}
    names["source"].close()  # type: ignore[attr-defined]
