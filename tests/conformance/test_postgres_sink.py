"""The postgres sink on a real server, with changes of a real source."""

from __future__ import annotations

import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import OperatorError, PoisonError, TransientError
from tests.conformance.postgres_sink import Open, as_gap, columns_of, delivered, id_of
from tests.conformance.postgres_sink import opened as opened
from tests.fix_postgres import Database
from tests.slot_batches import SlotBatches

VALUES = {
    "boolean": "true",
    "bigint": "9223372036854775807",
    "numeric": "'NaN'",
    "numeric(12,4)": "22.2200",
    "double precision": "'-Infinity'",
    "character(4)": "'ab'",
    "character varying(20)": "E'q\"u\\\\o\\tte\\n'",
    "bytea": r"'\x000102ff'",
    "date": "'0044-03-15 BC'",
    "time without time zone": "'24:00:00'",
    "timestamp(3) with time zone": "'21016-01-01 00:00:00.123+00'",
    "interval": "'-1 mons +3 days -04:05:06'",
    "json": """'{"a":1,  "a":2}'""",
    "jsonb": "'null'",
    "integer[]": "'[0:2]={7,NULL,9}'",
    "text[]": """'{"a,b","q\\"x","NULL",NULL,""}'""",
    "int4range": "'[1,6)'",
    "uuid": "'00000000-0000-0000-0000-000000000001'",
    "inet": "'10.0.0.1/8'",
    "tsvector": "'a:1 b:2'",
    "point": "'(1.5,2)'",
    "bit varying(5)": "'101'",
}


def test_values_of_every_type_arrive_as_the_source_has_them(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    members = ", ".join(f'"{kind}" {kind}' for kind in VALUES)
    source.run(f'CREATE TABLE "Odd ""t" (id int PRIMARY KEY, {members})')
    source.run(f'INSERT INTO "Odd ""t" VALUES (1, {", ".join(VALUES.values())})')
    source.run('INSERT INTO "Odd ""t" VALUES (2)')
    delivered(opened(), source.taken())
    query = 'SELECT t::text FROM "Odd ""t" t ORDER BY id'
    assert there.execute(query) == database.execute(query)
    assert columns_of(there, '"Odd ""t"') == columns_of(database, '"Odd ""t"')


@pytest.mark.sinks
def test_a_type_that_the_destination_lacks_is_text_with_a_comment_and_a_domain_is_its_base(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN small AS numeric(4,1)",
        "CREATE TABLE t (id int PRIMARY KEY, m mood, ms mood[], s small)",
        "INSERT INTO t VALUES (1, 'ok', '{ok,NULL}', 7.5)",
    )
    delivered(opened(), source.taken())
    assert columns_of(there, "t") == [
        ("id", "integer"),
        ("m", "text"),
        ("ms", "text"),
        ("s", "numeric(4,1)"),
    ]
    assert there.execute("SELECT * FROM t") == [(1, "ok", "{ok,NULL}", 7.5)]
    assert there.execute("SELECT col_description('t'::regclass, 2)") == [
        ("text in place of mood, which this database does not have",)
    ]


@pytest.mark.sinks
def test_a_type_that_the_destination_has_by_name_is_used(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    there.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    source.run(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE t (id int PRIMARY KEY, m mood)",
        "INSERT INTO t VALUES (1, 'ok')",
    )
    delivered(opened(), source.taken())
    assert columns_of(there, "t") == [("id", "integer"), ("m", "mood")]


_EVOLUTION = (
    "CREATE TABLE t (id int PRIMARY KEY, a int, b text, gone text)",
    "INSERT INTO t VALUES (1, 10, 'one', 'x')",
    "ALTER TABLE t ADD COLUMN c date",
    "INSERT INTO t VALUES (2, 20, 'two', 'y', '2026-01-01')",
    "ALTER TABLE t RENAME COLUMN b TO label",
    "ALTER TABLE t DROP COLUMN gone",
    "UPDATE t SET label = 'uno' WHERE id = 1",
    "ALTER TABLE t ALTER COLUMN a TYPE text USING a::text",
    "INSERT INTO t (id, a, label) VALUES (3, 'thirty', 'three')",
    "DELETE FROM t WHERE id = 2",
)


@pytest.mark.parametrize("size", [1, 3, 1000], ids="batches_of_{}".format)
def test_a_mirror_is_altered_with_its_table_in_the_middle_of_a_batch(
    size: int, source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    source.run(*_EVOLUTION)
    sink = opened()
    for piece in source.taken().slices(size):
        delivered(sink, piece)
    query = "SELECT t::text FROM t ORDER BY id"
    assert there.execute(query) == database.execute(query)
    assert sorted(columns_of(there, "t")) == sorted(columns_of(database, "t"))


def test_a_history_keeps_dropped_columns_and_gains_the_others(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run(*_EVOLUTION)
    delivered(opened("append"), source.taken())
    found = there.execute(
        "SELECT walbrook_action, id, a, label, gone, c::text FROM t ORDER BY walbrook_lsn"
    )
    assert found == [
        ("insert", 1, "10", "one", "x", None),
        ("insert", 2, "20", "two", "y", "2026-01-01"),
        ("update", 1, "10", "uno", None, None),
        ("insert", 3, "thirty", "three", None, None),
        ("delete", 2, None, None, None, None),
    ]


def test_a_table_that_is_renamed_is_renamed_at_the_destination(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    sink = opened()
    delivered(sink, source.taken())
    source.run("ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES (2)")
    delivered(sink, source.taken())
    assert there.execute("SELECT * FROM u ORDER BY id") == [(1,), (2,)]
    assert there.execute("SELECT to_regclass('t')") == [(None,)]


@pytest.mark.sinks
@pytest.mark.parametrize("in_one_batch", [True, False])
def test_tables_whose_names_are_swapped_keep_their_rows(
    in_one_batch: bool, source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE a (id int PRIMARY KEY, x text)", "CREATE TABLE b (id int PRIMARY KEY)")
    source.run("INSERT INTO a VALUES (1, 'x')", "INSERT INTO b VALUES (2), (3)")
    sink = opened()
    delivered(sink, source.taken())
    source.run(
        "BEGIN; ALTER TABLE a RENAME TO c; ALTER TABLE b RENAME TO a; ALTER TABLE c RENAME TO b; "
        "COMMIT",
        "INSERT INTO b VALUES (4, 'y')",
    )
    if not in_one_batch:
        delivered(sink, source.taken())
        sink = opened()
    source.run("DELETE FROM a WHERE id = 2", "UPDATE b SET x = 'z' WHERE id = 1")
    delivered(sink, source.taken())
    for table in ("a", "b"):
        query = f"SELECT * FROM {table} ORDER BY id"
        assert there.execute(query) == database.execute(query)
    kept = "SELECT count(*) FROM pg_class WHERE relname LIKE '%_walbrook_%' AND relkind = 'r'"
    assert there.execute(kept) == [(0,)]


@pytest.mark.sinks
def test_a_table_that_takes_the_name_of_one_that_was_dropped_is_not_mixed_with_it(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE t_new (id int PRIMARY KEY)")
    source.run("INSERT INTO t VALUES (1)", "INSERT INTO t_new VALUES (2)")
    sink = opened()
    delivered(sink, source.taken())
    source.run("BEGIN; DROP TABLE t; ALTER TABLE t_new RENAME TO t; COMMIT")
    source.run("INSERT INTO t VALUES (3)")
    delivered(sink, source.taken())
    assert there.execute("SELECT id FROM t ORDER BY id") == [(2,), (3,)]
    ((kept,),) = there.execute("SELECT relname FROM pg_class WHERE relname LIKE 't_walbrook_%'")
    assert there.execute(f"SELECT id FROM {kept}") == [(1,)]


@pytest.mark.sinks
def test_names_swapped_between_columns_stay_with_their_values(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, a text, b text)")
    source.run("INSERT INTO t VALUES (1, 'a', 'b')")
    sink = opened()
    delivered(sink, source.taken())  # the catalog is asked as it is read
    source.run(
        "BEGIN; ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; "
        "ALTER TABLE t RENAME x TO b; COMMIT",
        "INSERT INTO t VALUES (2, 'b2', 'a2')",
    )
    delivered(sink, source.taken())
    query = "SELECT id, a, b FROM t ORDER BY id"
    assert there.execute(query) == database.execute(query)


@pytest.mark.sinks
def test_foreign_keys_of_the_destination_hold_at_each_statement(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    tables = (
        "CREATE TABLE z_parent (id int PRIMARY KEY);"
        "CREATE TABLE a_child (id int PRIMARY KEY, parent int REFERENCES z_parent)"
    )
    there.execute(tables)
    source.run(tables)
    sink = opened()
    source.run("INSERT INTO z_parent VALUES (1), (2)", "INSERT INTO a_child VALUES (1, 1), (2, 2)")
    delivered(sink, source.taken())
    source.run("DELETE FROM a_child WHERE id = 1", "DELETE FROM z_parent WHERE id = 1")
    delivered(sink, source.taken())
    source.run("TRUNCATE z_parent, a_child", "INSERT INTO z_parent VALUES (7)")
    source.run("INSERT INTO a_child VALUES (7, 7)")
    delivered(sink, source.taken())
    for table in ("z_parent", "a_child"):
        assert there.execute(f"SELECT * FROM {table}") == database.execute(f"SELECT * FROM {table}")


def test_a_row_that_the_destination_refuses_is_alone_and_quotes_no_value(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    table = "CREATE TABLE t (id int PRIMARY KEY, word text{})"
    there.execute(table.format(" CHECK (word <> 'secret')"))
    source.run(table.format(""))
    source.run(
        "INSERT INTO t SELECT i, CASE WHEN i = 37 THEN 'secret' ELSE 'fine' END "
        "FROM generate_series(1, 100) i"
    )
    batch, sink = source.taken(), opened()
    delivery = sink.deliver(batch)
    assert delivery.settled == 36
    assert isinstance(delivery.error, PoisonError)
    assert str(batch.cursor(36)) in delivery.error.what
    assert "t_word_check" in delivery.error.what
    assert "secret" not in str(delivery.error)
    assert "secret" in delivery.error.detail
    assert there.execute("SELECT max(id) FROM t") == [(36,)]
    delivered(sink, batch.slice(37))
    assert there.execute("SELECT count(*) FROM t") == [(99,)]


@pytest.mark.sinks
def test_a_table_that_refuses_every_row_is_waited_for_after_five(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    there.execute("CREATE TABLE t (id int PRIMARY KEY, more int NOT NULL)")
    source.run("CREATE TABLE t (id int PRIMARY KEY)")
    source.run("INSERT INTO t SELECT * FROM generate_series(1, 20)")
    batch, sink = source.taken(), opened()
    for at in range(5):
        assert isinstance(sink.deliver(batch.slice(at)).error, PoisonError)
    for _ in range(2):
        waits = sink.deliver(batch.slice(5))
        assert isinstance(waits.error, TransientError)
        assert "in a row and took none" in waits.error.what
    there.execute("ALTER TABLE t ALTER more DROP NOT NULL")
    delivered(sink, batch.slice(5))


@pytest.mark.parametrize("mode", ["mirror", "append", "events"])
def test_a_replay_is_absorbed_however_it_is_cut_and_by_any_process(
    mode: str, source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT * FROM generate_series(1, 90)"
    )
    batch, first, other = source.taken(), opened(mode), opened(mode)
    assert first.deliver(batch.slice(0, 40)).top == ORIGIN
    assert other.deliver(batch.slice(20, 40)).absorbed == 20
    delivery = first.deliver(batch.slice(10))
    assert (delivery.settled, delivery.absorbed, delivery.top) == (80, 50, batch.cursor(59))
    table = "walbrook_events" if mode == "events" else "t"
    assert there.execute(f"SELECT count(*) FROM {table}") == [(90,)]


@pytest.mark.sinks
@pytest.mark.parametrize(
    ("mode", "on_rewind", "rows"),
    [
        ("append", "generation", [(1, n) for n in range(1, 6)] + [(2, n) for n in range(3, 6)]),
        ("append", "replace", [(1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]),
        ("events", "generation", [(1, n) for n in range(1, 6)] + [(2, n) for n in range(3, 6)]),
        ("events", "replace", [(1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]),
    ],
)
def test_rows_that_come_again_after_a_rewind_are_distinguished_or_replaced(
    mode: str, on_rewind: str, rows: list[tuple[int, int]], source: SlotBatches, there: Database,
    opened: Open,
) -> None:  # fmt: skip
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT * FROM generate_series(1, 5)"
    )
    batch, old = source.taken(), opened(mode, epoch="one", on_rewind=on_rewind)
    delivered(old, batch)
    new = opened(mode, epoch="two", on_rewind=on_rewind)
    delivered(new, batch.slice(2, 1))
    delivered(new, batch.slice(2), absorbed=1)
    stale = old.deliver(batch)
    assert isinstance(stale.error, TransientError)
    table, number = ("t", "id") if mode == "append" else ("walbrook_events", "(record->>'id')::int")
    found = there.execute(f"SELECT walbrook_generation, {number} FROM {table} ORDER BY 1, 2")
    assert found == rows


@pytest.mark.sinks
@pytest.mark.parametrize(("mode", "given"), [("append", "true"), ("events", "action <> 'gap'")])
def test_a_gap_that_comes_first_after_a_rewind_leaves_no_row_twice(
    mode: str, given: str, source: SlotBatches, there: Database, opened: Open
) -> None:
    """As when the log gave up what the consumer was rewound to: the gap comes alone."""
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT * FROM generate_series(1, 5)"
    )
    batch = source.taken()
    delivered(opened(mode, epoch="one", on_rewind="replace"), batch)
    new = opened(mode, epoch="two", on_rewind="replace")
    delivered(new, as_gap(batch.slice(2, 1)))
    delivered(new, batch.slice(3))
    table, number = ("t", "id") if mode == "append" else ("walbrook_events", "(record->>'id')::int")
    found = there.execute(f"SELECT {number} FROM {table} WHERE {given} ORDER BY 1")
    assert found == [(1,), (2,), (4,), (5,)]


@pytest.mark.sinks
def test_a_mirror_that_is_rewound_over_schema_changes_ends_as_the_source(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    source.run(*_EVOLUTION)
    batch = source.taken()
    delivered(opened(epoch="one"), batch)
    again = opened(epoch="two")
    for piece in batch.slices(2):
        delivered(again, piece)
    query = "SELECT t::text FROM t ORDER BY id"
    assert there.execute(query) == database.execute(query)


@pytest.mark.sinks
def test_rows_that_changed_their_keys_twice_are_whole_after_a_rewind(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    """The large value is not sent again, and stands under the last key only."""
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, 1, repeat('x', 5000) FROM generate_series(1, 5) AS i",
        *(f"UPDATE t SET id = id + 100, n = {n} WHERE id % 100 <= 3" for n in (2, 3, 4)),
        "DELETE FROM t WHERE id = 302",
    )
    batch = source.taken()
    delivered(opened(epoch="one"), batch)
    again = opened(epoch="two")
    for piece in batch.slice(5).slices(2):
        delivered(again, piece)
    query = "SELECT t::text FROM t ORDER BY id"
    assert there.execute(query) == database.execute(query)


def test_a_row_that_moves_to_the_key_of_one_that_has_gone_takes_its_place(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    """As after a repair: the delete was lost with the slot, and has not been found yet."""
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, 1, repeat('x', 5000) FROM generate_series(1, 4) AS i",
    )
    sink = opened()
    delivered(sink, source.taken())
    there.execute("INSERT INTO t VALUES (101, 0, 'gone'), (103, 0, 'gone'), (105, 0, 'stays')")
    source.run("UPDATE t SET id = id + 100, n = 2 WHERE id <= 3")
    delivered(sink, source.taken())
    query = "SELECT t::text FROM t ORDER BY id"
    stays = [("(105,0,stays)",)]
    assert there.execute(query) == sorted(database.execute(query) + stays, key=id_of)


def test_a_table_belongs_to_one_sink_and_a_sink_has_one_mode(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(opened(), batch)
    stranger = opened(consumer="other").deliver(batch)
    assert isinstance(stranger.error, OperatorError)
    assert "public.t is written by shop/orders" in stranger.error.what
    other_mode = opened("append").deliver(batch)
    assert isinstance(other_mode.error, OperatorError)
    assert "in mode mirror, not append" in other_mode.error.what
    assert stranger.settled == other_mode.settled == 0


def test_a_table_without_a_key_is_refused_by_a_mirror_and_taken_by_a_history(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (n int)", "INSERT INTO t VALUES (1), (1)")
    batch = source.taken()
    delivery = opened().deliver(batch)
    assert isinstance(delivery.error, OperatorError)
    assert "public.t has no key" in delivery.error.what
    assert "REPLICA IDENTITY FULL" in delivery.error.fix
    delivered(opened("append", consumer="history"), batch)
    assert there.execute("SELECT count(*) FROM t") == [(2,)]


def test_an_existing_table_without_the_key_is_refused(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    there.execute("CREATE TABLE t (id int)")
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    delivery = opened().deliver(source.taken())
    assert isinstance(delivery.error, OperatorError)
    assert "no unique index over the key (id)" in delivery.error.what


@pytest.mark.sinks
def test_updates_that_leave_out_a_large_value_pass_a_table_that_must_have_it(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    made = "CREATE TABLE t (id int PRIMARY KEY, n int, big text NOT NULL CHECK (big <> ''))"
    there.execute(made)
    source.run(
        made,
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, 1, repeat('x', 5000) FROM generate_series(1, 3) AS i",
    )
    sink = opened()
    delivered(sink, source.taken())
    source.run("UPDATE t SET n = 2 WHERE id = 1", "UPDATE t SET id = 4, n = 3 WHERE id = 2")
    delivered(sink, source.taken())
    query = "SELECT t::text FROM t ORDER BY id"
    assert there.execute(query) == database.execute(query)


@pytest.mark.sinks
def test_a_child_that_changes_its_parent_and_loses_the_old_one_arrives(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    tables = (
        "CREATE TABLE parent (id int PRIMARY KEY);"
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)"
    )
    there.execute(tables)
    source.run(tables, "INSERT INTO parent VALUES (1)", "INSERT INTO child VALUES (1, 1)")
    sink = opened()
    delivered(sink, source.taken())
    source.run("INSERT INTO parent VALUES (2)", "UPDATE child SET parent = 2")
    source.run("DELETE FROM parent WHERE id = 1")
    delivered(sink, source.taken())
    for table in ("parent", "child"):
        assert there.execute(f"SELECT * FROM {table}") == database.execute(f"SELECT * FROM {table}")


@pytest.mark.sinks
def test_a_table_without_a_key_is_not_repeated_after_a_rewind(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (n int)",
        "ALTER TABLE b REPLICA IDENTITY FULL",
        "INSERT INTO a VALUES (1)",
        "INSERT INTO b VALUES (1)",
    )
    batch = source.taken()
    delivered(opened(epoch="one"), batch)
    again = opened(epoch="two")
    delivered(again, batch.slice(0, 1))
    refused = again.deliver(batch.slice(1))
    assert isinstance(refused.error, OperatorError)
    assert "public.b has no key" in refused.error.what
    had = batch.cursor(-1)
    behind = Cursor(had.lsn, had.idx + 1)
    assert f"walbrook skip-to with the sink's name and {behind}" in refused.error.fix
    source.run("INSERT INTO b VALUES (2)")
    delivered(again, source.taken())
    assert there.execute("SELECT * FROM b ORDER BY n") == [(1,), (2,)]
