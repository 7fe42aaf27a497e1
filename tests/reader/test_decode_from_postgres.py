"""Decode reads what a real server writes: every kind of change, and the texts of many types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cdc.decoding.relation import parse_relation
from tests.fix_postgres import Database
from tests.unit.decoding.frames import Frame

VALUES = {
    "bool": ("true", True),
    "int8": ("9223372036854775807", 9223372036854775807),
    "oid": ("4000000000", 4000000000),
    "numeric(10,4)": ("22.22", 22.22),
    "numeric": ("'NaN'", "NaN"),
    "float8": ("1e20", 1e20),
    "float4": ("'-Infinity'", "-Infinity"),
    "text": ("E'q\" \\\\ \\n \\u0001 \\U0001F600'", 'q" \\ \n \x01 \U0001f600'),
    "char(4)": ("'ab'", "ab  "),
    "bytea": ("'\\x000102'", "\\x000102"),
    "date": ("'0044-03-15 BC'", "0044-03-15 BC"),
    "time": ("'24:00'", "24:00:00"),
    "timestamp": ("'infinity'", "infinity"),
    "json": ('\'{"a" :  1, "a":2}\'', {"a": 2}),
    "jsonb": ("'[18446744073709551617, null]'", [18446744073709551617, None]),
    "int4[]": ("'[0:1][1:2]={{1,NULL},{3,4}}'", [[1, None], [3, 4]]),
    "text[]": (
        "ARRAY['a,b', 'q\"x', 'back\\slash', '', 'NULL', NULL, 'null', ' x ', '{}']",
        ["a,b", 'q"x', "back\\slash", "", "NULL", None, "null", " x ", "{}"],
    ),
    "jsonb[]": ("ARRAY['{\"k\": [\"v\"]}'::jsonb, 'null']", [{"k": ["v"]}, None]),
    "box[]": ("'{(1,1),(0,0);(3,3),(2,2)}'", ["(1,1),(0,0)", "(3,3),(2,2)"]),
    "float8[]": ("'{NaN,1.5,-0}'", ["NaN", 1.5, -0.0]),
    "bool[]": ("'{}'", []),
    "date[]": ("'{infinity,2026-01-01}'", ["infinity", "2026-01-01"]),
    "int4range": ("'[1,5]'", "[1,6)"),
    "int4multirange[]": ("ARRAY['{[1,3),[5,8)}'::int4multirange]", ["{[1,3),[5,8)}"]),
    "point": ("'(1,2)'", "(1,2)"),
    "inet[]": ("'{10.0.0.1}'", ["10.0.0.1"]),
    "uuid": ("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    "pair": ("ROW(1, 'x \"y\", z')", '(1,"x ""y"", z")'),
    "positive": ("5", "5"),
    "mood": ("'so so'", "so so"),
    "int2vector": ("'1 2'", "1 2"),
}


@contextmanager
def _slot(database: Database) -> Iterator[None]:
    database.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    database.execute("SELECT pg_create_logical_replication_slot('decode', 'pgoutput')")
    try:
        yield
    finally:
        database.execute("SELECT pg_drop_replication_slot('decode')")


def _changes(database: Database) -> list[dict[str, object]]:
    # A commit that waits for its flush: everything before it can be read from the slot then.
    database.execute(
        "SET synchronous_commit = on; SELECT pg_logical_emit_message(true, 'p', 'hello')"
    )
    rows = database.execute(
        "SELECT data FROM pg_logical_slot_get_binary_changes('decode', NULL, NULL, "
        "'proto_version', '1', 'publication_names', 'everything', 'messages', 'true')"
    )
    frame, relations = Frame(), dict[int, bytes]()
    for (payload,) in rows:
        if payload[:1] == b"R":
            relations[parse_relation(payload).oid] = payload
        elif payload[:1] == b"T":
            for at in range(6, len(payload), 4):
                oid = int.from_bytes(payload[at : at + 4], "big")
                frame.add(payload, relations[oid], oid=oid)
        elif payload[:1] == b"M":
            frame.add(payload)
        elif payload[:1] in b"IUD":
            oid = int.from_bytes(payload[1:5], "big")
            frame.add(payload, relations[oid], oid=oid)
    return frame.decode()


def test_the_texts_of_many_types_keep_their_values(database: Database) -> None:
    database.execute("CREATE TYPE pair AS (a int, b text); CREATE TYPE mood AS ENUM ('so so')")
    database.execute("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    columns = ", ".join(f'"{name}" {name}' for name in VALUES)
    database.execute(f"CREATE TABLE everything ({columns}, nothing text)")
    with _slot(database):
        literals = ", ".join(literal for literal, _ in VALUES.values())
        database.execute(f"INSERT INTO everything VALUES ({literals}, NULL)")
        change, _ = _changes(database)
    record = json.loads(str(change["record"]))
    assert record == {name: value for name, (_, value) in VALUES.items()} | {"nothing": None}
    assert '"numeric(10,4)":22.2200,' in str(change["record"])
    assert '"json":{"a" :  1, "a":2},' in str(change["record"])


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_every_kind_of_change_is_read(database: Database, identity: str) -> None:
    database.execute("CREATE TABLE docs (id int PRIMARY KEY, title text, body text)")
    database.execute("ALTER TABLE docs ALTER body SET STORAGE EXTERNAL")
    database.execute(f"ALTER TABLE docs REPLICA IDENTITY {identity}")
    database.execute('CREATE TABLE "select" ("a.b" int)')
    body = "x" * 5000
    with _slot(database):
        database.execute(f"INSERT INTO docs VALUES (1, 'one', '{body}')")
        database.execute("UPDATE docs SET title = 'uno'")
        database.execute("UPDATE docs SET id = 2")
        database.execute("DELETE FROM docs")
        database.execute('TRUNCATE docs, "select"')
        changes = _changes(database)
    insert, update, key_change, delete, *truncates, message = changes
    records = [json.loads(str(change["record"])) for change in changes]
    full = identity == "FULL"

    assert records[0] == {"id": 1, "title": "one", "body": body}
    assert insert["record_pks"] == (
        json.dumps(["1", "one", body], separators=(",", ":")) if full else '["1"]'
    )
    assert records[1] == {"id": 1, "title": "uno"} | ({"body": body} if full else {})
    assert update["changes"] == ('{"title":"one"}' if full else "{}")
    assert update["unchanged"] == (None if full else '["body"]')
    assert records[2] == {"id": 2, "title": "uno"} | ({"body": body} if full else {})
    assert key_change["changes"] == '{"id":1}'
    expected = {"title": "uno", "body": body} if full else {"title": None, "body": None}
    assert records[3] == {"id": 2} | expected
    assert delete["action"] == "delete"
    assert {str(change["table_name"]) for change in truncates} == {"docs", "select"}
    assert records[-1] == {"prefix": "p", "content": "hello", "transactional": True}
    assert message["action"] == "message"
