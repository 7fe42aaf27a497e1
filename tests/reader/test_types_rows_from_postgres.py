"""Rows of all types at once, and what the server's own list of types says of ours."""

from __future__ import annotations

import json

from psycopg import sql

import walbrook
from cdc.decoding.types.builtin import BOX_OID, ELEMENT_OF_ARRAY, RICHER
from tests.exact_json import parse
from tests.fix_postgres import Database, on_both_versions
from tests.reader.type_values import (
    CATALOG,
    DOCUMENTS,
    NUMBERS,
    PLACES,
    RANGES,
    TEXTS,
    TIMES,
    text,
)
from tests.reader.type_values_custom import CUSTOM, SETUP, VECTORS
from tests.reader.types_source import usable
from tests.slot_decoder import as_the_reader, open_slot, read_messages, read_slot
from tests.unit.decoding.columns_of import plain

pytestmark = on_both_versions

CASES = [*NUMBERS, *TEXTS, *DOCUMENTS, *TIMES, *PLACES, *CATALOG, *RANGES, *CUSTOM, *VECTORS]

_ARRAYS = """
SELECT a.oid::int8, e.oid::int8, e.typdelim::text FROM pg_type a JOIN pg_type e ON e.oid = a.typelem
 WHERE a.oid < 10000 AND a.typlen = -1 AND a.typsubscript::text = 'array_subscript_handler'
   AND e.typtype IN ('b', 'r', 'm') AND a.typname LIKE '\\_%'
"""


def test_a_row_of_all_types_is_exact_in_updates_and_deletes(database: Database) -> None:
    with as_the_reader(database) as connection:
        connection.execute(SETUP.encode())
        cases = usable(connection, CASES)
        columns = [f"c{at}" for at in range(len(cases))]
        declared = ", ".join(f"{c} {case.type}" for c, case in zip(columns, cases, strict=True))
        connection.execute(f"CREATE TABLE everything ({declared})".encode())
        connection.execute("ALTER TABLE everything REPLICA IDENTITY FULL")
        connection.execute("CREATE TABLE copies (LIKE everything)")
        open_slot(connection)
        first, second = (
            sql.SQL(", ").join(sql.Literal(case.values[at]) for case in cases) for at in (0, -1)
        )
        with connection.transaction():
            for values in (first, second):
                connection.execute(sql.SQL("INSERT INTO copies VALUES ({})").format(values))
            connection.execute(sql.SQL("INSERT INTO everything VALUES ({})").format(first))
            names = sql.SQL(", ").join(map(sql.Identifier, columns))
            connection.execute(
                sql.SQL("UPDATE everything SET ({}) = ROW({})").format(names, second)
            )
            connection.execute("DELETE FROM everything")
            connection.execute("INSERT INTO everything DEFAULT VALUES")
            connection.execute("DELETE FROM everything")
        decoded = read_slot(connection)
    old, new, insert, update, delete, empty, empty_delete = decoded.changes.to_pylist()

    assert insert["record"] == old["record"]
    assert update["record"] == delete["record"] == new["record"]
    before, after, changes = (parse(t) for t in (old["record"], new["record"], update["changes"]))
    differing = [name for name in columns if before[name] != after[name]]
    assert len(differing) > len(columns) // 2
    assert [name for name, _ in changes.members] == differing
    assert all(changes[name] == before[name] for name in differing)
    assert (
        empty["record"]
        == empty_delete["record"]
        == json.dumps(dict.fromkeys(columns), separators=(",", ":"))
    )

    copies, rows = (table.rows for table in decoded.tables)
    assert rows.column("error").null_count == rows.num_rows
    records = [plain(record) for record in rows.column("record")]
    assert records[:3] == [plain(copies.column("record")[at]) for at in (0, 1, 1)]
    assert plain(rows.column("before")[1]) == records[0]
    assert set(records[3].values()) == set(records[4].values()) == {None}


def test_the_built_in_arrays_are_those_of_the_server(database: Database) -> None:
    with as_the_reader(database) as connection:
        found = connection.execute(_ARRAYS.encode()).fetchall()
    assert {array: ELEMENT_OF_ARRAY.get(array) for array, _, _ in found} == {
        array: element for array, element, _ in found
    }
    assert {element for _, element, delimiter in found if delimiter != ","} == {BOX_OID}


def test_the_numbers_of_built_in_types_are_those_of_the_server(database: Database) -> None:
    names = "bool bytea int8 int2 int4 oid json float4 float8 date timestamp timestamptz jsonb"
    with as_the_reader(database) as connection:
        found = connection.execute(
            "SELECT oid::int8 FROM pg_type WHERE typname = ANY (%s)", [names.split()]
        ).fetchall()
    assert {oid for (oid,) in found} == set(RICHER)


def test_json_that_only_postgres_reads_is_kept(database: Database) -> None:
    texts = [r'"\ud800"', "[" * 3000 + "]" * 3000, '"' + "x" * 70_000 + '"', "-1e99999"]
    with as_the_reader(database) as connection:
        connection.execute("CREATE TABLE docs (v json)")
        open_slot(connection)
        for one in texts:
            connection.execute("INSERT INTO docs VALUES (%s)", [one])
        changes = read_slot(connection).changes.to_pylist()
    assert [change["record"] for change in changes] == [f'{{"v":{one}}}' for one in texts]


def test_a_composite_that_has_grown_is_its_text_in_json_and_an_error_when_typed(
    database: Database,
) -> None:
    with as_the_reader(database) as connection:
        connection.execute("CREATE TYPE part AS (a int, b text); CREATE TABLE parts (v part)")
        open_slot(connection)
        decoder = walbrook.Decoder(walbrook.catalog_of(connection))
        connection.execute("INSERT INTO parts VALUES ('(1,x)')")
        old = decoder.decode(read_messages(connection))
        connection.execute("ALTER TYPE part ADD ATTRIBUTE c int")
        connection.execute("INSERT INTO parts VALUES ('(2,\"y z\",3)')")
        # A stream does not describe the table again: it is the same one.
        messages = [m for m in read_messages(connection) if m[:1] != b"R"]
        new = decoder.decode(messages)
    assert old.changes.column("record").to_pylist() == ['{"v":{"a":1,"b":"x"}}']
    assert json.loads(new.changes.column("record")[0].as_py()) == {"v": '(2,"y z",3)'}
    (typed,) = new.tables
    assert "more or fewer fields" in str(typed.rows.column("error")[0])


def test_a_composite_whose_field_became_another_type_is_its_text(database: Database) -> None:
    with as_the_reader(database) as connection:
        connection.execute("CREATE TYPE part AS (a text, b int); CREATE TABLE parts (v part[])")
        open_slot(connection)
        decoder = walbrook.Decoder(walbrook.catalog_of(connection))
        connection.execute("INSERT INTO parts VALUES ('{\"(x,1)\"}')")
        decoder.decode(read_messages(connection))
        connection.execute("ALTER TYPE part DROP ATTRIBUTE b, ADD ATTRIBUTE c text")
        connection.execute('INSERT INTO parts VALUES (\'{"(x,AB)","(y,2)"}\')')
        messages = [m for m in read_messages(connection) if m[:1] != b"R"]
        (change,) = decoder.decode(messages).changes.to_pylist()
    assert change["error"] is None
    assert json.loads(change["record"]) == {"v": ["(x,AB)", {"a": "y", "b": 2}]}


def test_a_type_that_is_gone_is_its_text(database: Database) -> None:
    with as_the_reader(database) as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('a,b'); CREATE TYPE pair AS (a int)")
        connection.execute("CREATE TABLE moods (m mood, ms mood[], p pair)")
        open_slot(connection)
        connection.execute("INSERT INTO moods VALUES ('a,b', '{\"a,b\"}', '(1)')")
        connection.execute("DROP TABLE moods; DROP TYPE mood; DROP TYPE pair")
        decoded = read_slot(connection)
    expected = text("mood", "a,b", '{"a,b"}', "(1)").values
    (record,) = decoded.changes.column("record").to_pylist()
    assert tuple(json.loads(record).values()) == expected
