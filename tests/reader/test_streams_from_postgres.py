"""Streams of a real server: what each change says of its table, its key and its old row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fix_postgres import Database, fresh_database, on_both_versions
from tests.slot_decoder import slot_decoder

pytestmark = on_both_versions


def _records(changes: list[dict[str, Any]]) -> list[object]:
    return [json.loads(change["record"]) for change in changes]


def test_changes_of_a_transaction_are_numbered_and_savepoints_leave_survivors(
    database: Database,
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with slot_decoder(database) as slot:
        slot.run("BEGIN", "INSERT INTO t VALUES (1), (2)", "SAVEPOINT s")
        slot.run("INSERT INTO t VALUES (3)", "ROLLBACK TO s", "INSERT INTO t VALUES (4)", "COMMIT")
        slot.run("BEGIN", "INSERT INTO t VALUES (5)", "ROLLBACK", "INSERT INTO t VALUES (6)")
        changes = slot.changes()
    assert [record["id"] for record in _records(changes)] == [1, 2, 4, 6]  # type: ignore[index]
    assert [change["commit_idx"] for change in changes] == [0, 1, 2, 0]
    assert len({change["commit_lsn"] for change in changes[:3]}) == 1
    assert changes[3]["commit_lsn"] > changes[0]["commit_lsn"]


@pytest.mark.parametrize(("via_root", "name"), [("true", "events"), ("false", "events_2026")])
def test_a_partition_is_its_root_or_itself_as_the_publication_says(
    database: Database, via_root: str, name: str
) -> None:
    database.execute("CREATE TABLE events (id int, at date, PRIMARY KEY (id, at)) "
                     "PARTITION BY RANGE (at)")  # fmt: skip
    # Its columns stand in another order than the root's.
    database.execute("CREATE TABLE events_2026 (at date NOT NULL, id int NOT NULL)")
    database.execute("ALTER TABLE events ATTACH PARTITION events_2026 "
                     "FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')")  # fmt: skip
    publication = f"FOR ALL TABLES WITH (publish_via_partition_root = {via_root})"
    with slot_decoder(database, publication=publication) as slot:
        slot.run("INSERT INTO events VALUES (7, '2026-02-03')", "UPDATE events SET id = 8")
        slot.run("DELETE FROM events")
        insert, update, delete = changes = slot.changes()
    assert {change["table_name"] for change in changes} == {name}
    assert _records([insert]) == [{"id": 7, "at": "2026-02-03"}]
    assert [json.loads(change["record_pks"]) for change in (insert, update, delete)] == [
        ["7", "2026-02-03"],
        ["8", "2026-02-03"],
        ["8", "2026-02-03"],
    ]
    assert json.loads(update["changes"]) == {"id": 7}


def test_a_key_is_reported_in_key_order_whatever_the_replica_identity(database: Database) -> None:
    database.execute("CREATE TABLE a (x int, y text, z int, PRIMARY KEY (z, x))")
    database.execute("CREATE TABLE b (x int, y text, z int, PRIMARY KEY (z, x))")
    database.execute("ALTER TABLE b REPLICA IDENTITY FULL")
    database.execute("CREATE TABLE c (x int, y text NOT NULL, z int)")
    database.execute("CREATE UNIQUE INDEX c_y ON c (y); "
                     "ALTER TABLE c REPLICA IDENTITY USING INDEX c_y")  # fmt: skip
    database.execute("CREATE TABLE d (x int, y text, z int)")
    database.execute("ALTER TABLE d REPLICA IDENTITY FULL")
    with slot_decoder(database) as slot:
        for table in "abcd":
            slot.run(f"INSERT INTO {table} VALUES (1, 'y', 2)")
            slot.run(f"UPDATE {table} SET x = 3, y = 'n'")
            slot.run(f"DELETE FROM {table}")
        changes = slot.changes()
    keys = [json.loads(change["record_pks"]) for change in changes]
    assert keys[0:3] == keys[3:6] == [["2", "1"], ["2", "3"], ["2", "3"]]
    assert keys[6:9] == [["y"], ["n"], ["n"]]
    assert keys[9:12] == [["1", "y", "2"], ["3", "n", "2"], ["3", "n", "2"]]
    told = [json.loads(change["changes"]) for change in changes[1::3]]
    assert told == [{"x": 1}, {"x": 1, "y": "y"}, {"y": "y"}, {"x": 1, "y": "y"}]
    old_keys = [change["old_record_pks"] for change in changes[1::3]]
    assert old_keys == ['["2","1"]', '["2","1"]', '["y"]', '["1","y","2"]']
    assert {change["old_record_pks"] for change in changes if change["action"] != "update"} == {
        None
    }


def test_an_update_that_keeps_its_key_has_no_old_key_whatever_else_it_changes(
    database: Database,
) -> None:
    database.execute("CREATE TABLE t (id timestamptz PRIMARY KEY, n int, note text)")
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    with slot_decoder(database) as slot:
        slot.run("INSERT INTO t VALUES ('2024-01-01Z', 1, '')")
        slot.run("UPDATE t SET n = 2", "UPDATE t SET note = id::text, n = NULL")
        slot.run("UPDATE t SET id = '2024-01-02Z'")
        changes = slot.changes()
    old_keys = [change["old_record_pks"] for change in changes]
    assert old_keys == [None, None, None, '["2024-01-01 00:00:00+00"]']


def test_each_row_has_the_columns_its_table_had_when_it_was_written(database: Database) -> None:
    database.execute('CREATE TABLE "Sélect" ("a.b" int PRIMARY KEY, gone int)')
    with slot_decoder(database) as slot:
        slot.run("BEGIN", 'INSERT INTO "Sélect" VALUES (1, 1)')
        slot.run('ALTER TABLE "Sélect" ADD more text')
        slot.run("""INSERT INTO "Sélect" VALUES (2, 2, 'm')""")
        slot.run('ALTER TABLE "Sélect" DROP gone', """INSERT INTO "Sélect" VALUES (3, 'm')""")
        slot.run('ALTER TABLE "Sélect" RENAME more TO less')
        slot.run("""INSERT INTO "Sélect" VALUES (4, '9')""")
        slot.run('ALTER TABLE "Sélect" ALTER less TYPE int USING length(less)')
        slot.run('INSERT INTO "Sélect" VALUES (5, 5)', 'ALTER TABLE "Sélect" RENAME TO "select"')
        slot.run('INSERT INTO "select" VALUES (6, 6)', "COMMIT")
        changes = slot.changes()
    assert _records(changes) == [
        {"a.b": 1, "gone": 1},
        {"a.b": 2, "gone": 2, "more": "m"},
        {"a.b": 3, "more": "m"},
        {"a.b": 4, "less": "9"},
        {"a.b": 5, "less": 5},
        {"a.b": 6, "less": 6},
    ]
    assert [change["table_name"] for change in changes] == ["Sélect"] * 5 + ["select"]


def test_an_annotation_comes_with_the_changes_behind_it(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    emit = "SELECT pg_logical_emit_message(true, 'sequin:transaction_annotations.{}', '{}')"
    with slot_decoder(database) as slot:
        slot.run("BEGIN", "INSERT INTO t VALUES (1)", emit.format("set", '{"user": "ann"}'))
        slot.run("INSERT INTO t VALUES (2), (3)", emit.format("clear", ""))
        slot.run("INSERT INTO t VALUES (4)", "COMMIT", "INSERT INTO t VALUES (5)")
        changes = [change for change in slot.changes() if change["action"] == "insert"]
    assert [change["commit_idx"] for change in changes] == [0, 2, 3, 5, 0]
    ann = '{"user": "ann"}'
    assert [change["annotations"] for change in changes] == [None, ann, ann, None, None]


def test_a_truncate_of_several_tables_is_one_change_for_each(database: Database) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY); "
                     "CREATE TABLE b (id int REFERENCES a); CREATE TABLE c (id int)")  # fmt: skip
    with slot_decoder(database) as slot:
        slot.run("TRUNCATE a, c CASCADE")
        changes = slot.changes()
    assert sorted(change["table_name"] for change in changes) == ["a", "b", "c"]
    assert {change["action"] for change in changes} == {"truncate"}
    assert [change["commit_idx"] for change in changes] == [0, 2, 4]


def test_an_unchanged_toast_value_is_filled_from_the_old_row_or_listed(database: Database) -> None:
    for name in ("a", "b"):
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, n int, body text)")
        database.execute(f"ALTER TABLE {name} ALTER body SET STORAGE EXTERNAL")
    database.execute("ALTER TABLE b REPLICA IDENTITY FULL")
    body = "x" * 9000
    with slot_decoder(database) as slot:
        for name in ("a", "b"):
            slot.run(f"INSERT INTO {name} VALUES (1, 1, '{body}')", f"UPDATE {name} SET n = 2")
        decoded = slot.decoded()
    _, by_default, _, full = decoded.changes.to_pylist()
    assert json.loads(by_default["record"]) == {"id": 1, "n": 2}
    assert by_default["unchanged"] == '["body"]'
    assert json.loads(full["record"]) == {"id": 1, "n": 2, "body": body}
    assert full["unchanged"] is None
    typed = [table.rows.to_pylist()[1] for table in decoded.tables]
    assert [row["unchanged"] for row in typed] == [["body"], None]
    assert [row["record"]["body"] for row in typed] == [None, body]


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP"])
def test_text_of_a_database_in_another_encoding_arrives_as_utf8(
    database: Database, encoding: str
) -> None:
    word = {"LATIN1": "Grüße", "EUC_JP": "日本語"}[encoding]
    with fresh_database(database.dsn, encoding) as other:
        other.execute(f'CREATE TABLE "{word}" (id int PRIMARY KEY, "{word}" text)')
        with slot_decoder(other) as slot:
            slot.run(f"""INSERT INTO "{word}" VALUES (1, '{word}')""")
            (change,) = slot.changes()
    assert change["table_name"] == word
    assert json.loads(change["record"]) == {"id": 1, word: word}


def test_a_row_that_is_not_utf8_is_an_error_and_its_neighbours_are_not(
    database: Database,
) -> None:
    with fresh_database(database.dsn, "SQL_ASCII") as other:
        other.execute("CREATE TABLE t (id int PRIMARY KEY, name text)")
        with slot_decoder(other) as slot:
            slot.run("INSERT INTO t VALUES (1, 'good')")
            slot.run("INSERT INTO t VALUES (2, convert_from('\\xff41', 'SQL_ASCII'))")
            slot.run("INSERT INTO t VALUES (3, 'good too')")
            first, bad, last = slot.changes()
    assert _records([first, last]) == [{"id": 1, "name": "good"}, {"id": 3, "name": "good too"}]
    assert (bad["record"], bad["record_pks"], bad["action"]) == (None, '["2"]', "insert")
    assert "of table public.t, column 'name': this value is not UTF-8" in bad["error"]
