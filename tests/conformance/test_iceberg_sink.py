"""The iceberg sink on real tables, with changes of a real source, read by DuckDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.errors import PoisonError
from sinks.lakehouse.iceberg import manifests
from tests.conformance.messages import batch as plain_batch
from tests.conformance.test_delta_sink import stopped_by
from tests.fix_postgres import Database
from tests.iceberg_lake import WAYS, IcebergLake, Way
from tests.slot_batches import SlotBatches, slot_batches

MERGED = ("merge_on_read", pytest.param("copy_on_write", marks=pytest.mark.sinks))


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture
def lake(tmp_path: Path) -> IcebergLake:
    return IcebergLake(tmp_path / "lake")


def delivered(lake_sink: object, batch: MessageBatch, *, absorbed: int = 0) -> None:
    delivery = lake_sink.deliver(batch)  # type: ignore[attr-defined]
    assert delivery.error is None, delivery.error.full_text
    assert (delivery.settled, delivery.absorbed) == (len(batch), absorbed)


_EVOLUTION = (
    "CREATE TABLE t (id int PRIMARY KEY, a int, b text, gone text, small smallint)",
    "INSERT INTO t VALUES (1, 10, 'one', 'x', 1)",
    "ALTER TABLE t ADD COLUMN c date",
    "INSERT INTO t VALUES (2, 20, 'two', 'y', 2, '2026-01-01')",
    "ALTER TABLE t RENAME COLUMN b TO label",
    "ALTER TABLE t DROP COLUMN gone",
    "UPDATE t SET label = 'uno' WHERE id = 1",
    "ALTER TABLE t ALTER COLUMN a TYPE bigint",
    "INSERT INTO t (id, a, label) VALUES (3, 3000000000, 'three')",
    "DELETE FROM t WHERE id = 2",
    "ALTER TABLE t ALTER COLUMN small TYPE int",
    "UPDATE t SET small = 70000 WHERE id = 1",
)


@pytest.mark.parametrize("way", MERGED)
@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.sinks), 1000], ids="batches_of_{}".format
)
def test_a_merged_table_follows_new_dropped_renamed_and_widened_columns(
    size: int, way: Way, source: SlotBatches, lake: IcebergLake
) -> None:
    source.run(*_EVOLUTION)
    sink, batch = lake.sink(way), source.taken()
    for piece in batch.slices(size):
        delivered(sink, piece)
    assert [row[:2] for row in lake.rows("DESCRIBE t")] == [
        ("id", "INTEGER"), ("a", "BIGINT"), ("label", "VARCHAR"), ("small", "INTEGER"),
        ("c", "DATE"),
    ]  # fmt: skip
    assert lake.rows("SELECT * FROM t ORDER BY id") == [
        (1, 10, "uno", 70000, None),
        (3, 3_000_000_000, "three", None, None),
    ]
    delivered(sink, batch, absorbed=len(batch))


@pytest.mark.sinks
@pytest.mark.parametrize("size", [1, 1000], ids="batches_of_{}".format)
def test_a_history_keeps_dropped_columns_and_gains_the_others(
    size: int, source: SlotBatches, lake: IcebergLake
) -> None:
    source.run(*_EVOLUTION)
    sink = lake.sink()
    for piece in source.taken().slices(size):
        delivered(sink, piece)
    found = lake.rows(
        "SELECT walbrook_action, id, a, label, gone, CAST(c AS VARCHAR) FROM t "
        "ORDER BY walbrook_lsn"
    )
    assert found == [
        ("insert", 1, 10, "one", "x", None),
        ("insert", 2, 20, "two", "y", "2026-01-01"),
        ("update", 1, 10, "uno", None, None),
        ("insert", 3, 3_000_000_000, "three", None, None),
        ("delete", 2, None, None, None, None),
        ("update", 1, 10, "uno", None, None),
    ]


@pytest.mark.sinks
def test_columns_are_altered_by_their_numbers_without_writing_a_file(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, a int, b text)", "INSERT INTO t VALUES (1, 2)")
    sink = lake.sink("merge_on_read")
    delivered(sink, source.taken())
    source.run(
        "ALTER TABLE t DROP COLUMN b",
        "ALTER TABLE t RENAME COLUMN a TO b",
        "ALTER TABLE t ALTER COLUMN b TYPE bigint",
        "INSERT INTO t VALUES (2, 3000000000)",
    )
    delivered(sink, source.taken())
    assert lake.rows("SELECT id, b FROM t ORDER BY id") == [(1, 2), (2, 3_000_000_000)]
    assert len(list(lake.root.glob("public/t/data/*.parquet"))) == 2


_UNLIKE = (
    "CREATE TABLE t (id int PRIMARY KEY, noon timestamp)",
    "INSERT INTO t VALUES (1, '2026-01-02 03:04:05')",
    "ALTER TABLE t ALTER COLUMN noon TYPE text USING 'noon'",
    "INSERT INTO t VALUES (2, 'later')",
    "ALTER TABLE t ALTER COLUMN noon TYPE int USING 5",
    "INSERT INTO t VALUES (3, 7)",
)


@pytest.mark.sinks
def test_a_column_of_a_history_that_cannot_be_widened_becomes_text(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run(*_UNLIKE)
    delivered(lake.sink(), source.taken())
    found = lake.rows("SELECT id, noon FROM t ORDER BY id")
    assert found == [(1, "2026-01-02 03:04:05.000000"), (2, "later"), (3, "7")]


@pytest.mark.sinks
def test_a_merged_table_whose_column_cannot_be_widened_is_an_operator_error_that_names_it(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)", *_UNLIKE)
    batch = source.taken()
    stopped = stopped_by(lake.sink("merge_on_read").deliver(batch), len(batch))
    assert (stopped.table, stopped.kind) == ("public.t", "cannot_widen")
    assert f"column noon of the table at {lake.root}/public/t" in stopped.what
    assert lake.rows("SELECT id FROM other", "other") == [(1,)]


_VALUES = {
    "boolean": "true",
    "smallint": "-32768",
    "bigint": "9223372036854775807",
    "real": "1.5",
    "numeric": "'NaN'",
    "numeric(12,4)": "-22.2200",
    "double precision": "'-Infinity'",
    "character varying(40)": "E'q\"u\\\\o\\tte\\n \\\\N'",
    "bytea": r"'\x000102ff'",
    "date": "'2024-02-29'",
    "timestamp without time zone": "'2026-01-02 03:04:05.678901'",
    "timestamp with time zone": "'2026-01-02 03:04:05.678901+01'",
    "json": """'{"a":1,  "a":2}'""",
    "integer[]": "'{7,NULL,9}'",
    "text[]": """'{"a,b","q\\"x",NULL,""}'""",
    "uuid": "'00000000-0000-0000-0000-000000000001'",
    "smallint[]": "'{1,-2}'",
    "pair": "ROW(3, 'x')",
}


@pytest.mark.parametrize("way", WAYS)
def test_values_of_every_type_arrive_with_their_own_columns(
    way: Way, source: SlotBatches, lake: IcebergLake
) -> None:
    members = ", ".join(f"c{at} {kind}" for at, kind in enumerate(_VALUES))
    source.run(
        "CREATE TYPE pair AS (n smallint, label text)",
        f'CREATE TABLE "Odd ""t" (id int PRIMARY KEY, {members}, eternal date)',
        f'INSERT INTO "Odd ""t" VALUES (1, {", ".join(_VALUES.values())}, \'infinity\')',
        'INSERT INTO "Odd ""t" (id) VALUES (2)',
    )
    sink = lake.sink(way)
    delivered(sink, source.taken())
    source.run("""UPDATE "Odd ""t" SET c0 = NOT c0""")
    delivered(sink, source.taken())
    names = ", ".join(f"c{at}" for at in range(len(_VALUES)))
    newest = "" if way != "append" else "WHERE walbrook_action = 'update' "
    name = "Odd~20~22t"
    first, second = lake.rows(f'SELECT {names} FROM "{name}" {newest}ORDER BY id', name)
    assert second == (None,) * len(_VALUES)
    assert repr(first[:8]) == (
        "(False, -32768, 9223372036854775807, 1.5, 'NaN', Decimal('-22.2200'), -inf, "
        "'q\"u\\\\o\\tte\\n \\\\N')"
    )
    assert first[8] == b"\x00\x01\x02\xff"
    assert [str(value) for value in first[9:12]] == [
        "2024-02-29", "2026-01-02 03:04:05.678901", "2026-01-02 02:04:05.678901+00:00",
    ]  # fmt: skip
    assert first[12] == '{"a":1,  "a":2}'
    assert first[13:15] == ([7, None, 9], ["a,b", 'q"x', None, ""])
    assert first[15:] == (
        "00000000-0000-0000-0000-000000000001", [1, -2], {"n": 3, "label": "x"},
    )  # fmt: skip
    assert lake.rows(f"""SELECT count(*) FROM "{name}" WHERE eternal > '5000-01-01'""", name) == [
        (2 if way == "append" else 1,)
    ]


@pytest.mark.sinks
def test_a_value_that_no_arrow_type_holds_is_refused_alone_and_quoted_nowhere(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n numeric(4,1))")
    for number in ("1", "2", "'NaN'", "4"):
        source.run(f"INSERT INTO t SELECT coalesce(max(id), 0) + 1, {number} FROM t")
    batch, sink = source.taken(), lake.sink()
    delivery = sink.deliver(batch)
    assert delivery.settled == 2
    assert isinstance(delivery.error, PoisonError)
    assert "NaN" not in str(delivery.error)
    delivered(sink, batch.slice(3))
    assert lake.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,), (4,)]


@pytest.mark.parametrize("way", MERGED)
def test_key_changes_truncates_and_unchanged_values_are_merged(
    way: Way, source: SlotBatches, database: Database, lake: IcebergLake
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT g, g, repeat(g::text, 3000) FROM generate_series(1, 20) g",
    )
    sink = lake.sink(way)
    delivered(sink, source.taken())
    for statement in (
        "UPDATE t SET n = 100 WHERE id < 5",  # big is not sent
        "UPDATE t SET id = id + 1000 WHERE id BETWEEN 3 AND 7",  # nor with a key change
        "DELETE FROM t WHERE id = 1",
        "BEGIN; UPDATE t SET n = 5 WHERE id = 8; UPDATE t SET id = 9000 WHERE id = 8; COMMIT",
    ):
        source.run(statement)
        delivered(sink, source.taken())
        here = database.execute("SELECT id, n, big FROM t ORDER BY id")
        assert lake.rows("SELECT * FROM t ORDER BY id") == here
    source.run("TRUNCATE t", "INSERT INTO t VALUES (7, 7, 'seven')")
    delivered(sink, source.taken())
    assert lake.rows("SELECT * FROM t") == [(7, 7, "seven")]
    source.run("TRUNCATE t")
    delivered(sink, source.taken())
    assert lake.rows("SELECT * FROM t") == []


@pytest.mark.sinks
def test_new_keys_need_no_deletes_and_old_ones_are_deleted_by_key(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    sink = lake.sink("merge_on_read")
    for start in (0, 100, 200):
        source.run(f"INSERT INTO t SELECT g, g FROM generate_series({start}, {start + 99}) g")
        delivered(sink, source.taken())
    data = lake.root / "public" / "t" / "data"
    assert not list(data.glob("deletes-*"))
    source.run("UPDATE t SET n = -1 WHERE id IN (50, 250)", "INSERT INTO t VALUES (300, 300)")
    delivered(sink, source.taken())
    assert len(list(data.glob("deletes-*"))) == 1
    table = lake.table()
    assert table is not None
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["added-equality-deletes"] == "2"
    assert snapshot.summary["total-data-files"] == "4"
    assert lake.rows("SELECT id FROM t WHERE n = -1 ORDER BY id") == [(50,), (250,)]
    assert lake.rows("SELECT count(*), count(DISTINCT id) FROM t") == [(301, 301)]


@pytest.mark.sinks
def test_a_table_without_a_key_is_refused_by_upsert_and_has_a_history(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run(
        "CREATE TABLE bag (x int)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag VALUES (1), (1)",
        "UPDATE bag SET x = 2",
    )
    batch = source.taken()
    assert "mode: append" in stopped_by(lake.sink("merge_on_read").deliver(batch), len(batch)).fix
    delivered(lake.sink(), batch, absorbed=len(batch))
    assert len(lake.rows("SELECT x FROM bag", "bag")) == 4


@pytest.mark.sinks
def test_a_changed_key_leaves_no_delete_that_goes_by_a_column_that_is_gone(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL UNIQUE)",
        "INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c')",
    )
    sink = lake.sink("merge_on_read")
    delivered(sink, source.taken())
    source.run("DELETE FROM t WHERE id = 2")
    delivered(sink, source.taken())
    source.run(
        "ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (code)",
        "ALTER TABLE t DROP COLUMN id", "DELETE FROM t WHERE code = 'a'",
    )  # fmt: skip
    delivered(sink, source.taken())
    assert lake.rows("SELECT * FROM t") == [("c",)]


@pytest.mark.sinks
def test_a_table_that_another_sink_has_written_is_refused(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(lake.sink(), batch)
    stopped = stopped_by(lake.sink(owner="shop/copy").deliver(batch), len(batch))
    assert "shop/copy has not written" in stopped.what


@pytest.mark.sinks
def test_a_history_is_partitioned_by_the_date_of_the_commit(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    batch = source.taken()
    place = batch.rows.schema.get_field_index("commit_timestamp")
    times = pa.array([1_790_000_000_000_000, 1_790_090_000_000_000], batch.rows.field(place).type)
    rows = batch.rows.set_column(place, batch.rows.schema.field(place), times)
    delivered(lake.sink(), MessageBatch(rows, batch.shape))
    table = lake.table()
    assert table is not None
    found = [str(each["walbrook_date"]) for each in table.inspect.files()["partition"].to_pylist()]
    assert sorted(found) == ["2026-09-21", "2026-09-22"]
    assert lake.rows("SELECT id FROM t WHERE walbrook_date = '2026-09-22'") == [(2,)]


def test_gaps_are_rows_of_a_table_of_their_own(lake: IcebergLake) -> None:
    batch = plain_batch(0, 1)
    rows = batch.rows.set_column(
        batch.rows.schema.get_field_index("action"), "action", pa.array(["gap"])
    )
    sink, gap = lake.sink(), MessageBatch(rows, batch.shape)
    delivered(sink, gap)
    delivered(sink, gap, absorbed=1)
    own = "_walbrook_orders"
    found = lake.rows("SELECT commit_lsn, commit_idx FROM gaps", "gaps", namespace=own)
    assert [Cursor(int(str(lsn)), int(str(idx))) for lsn, idx in found] == [gap.cursor(0)]


@pytest.mark.sinks
def test_many_commits_keep_few_manifests(
    source: SlotBatches, lake: IcebergLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_MANIFESTS_MAX", 4)
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    for number in range(12):
        source.run(
            f"INSERT INTO t VALUES ({number % 5}, {number}) "
            "ON CONFLICT (id) DO UPDATE SET n = EXCLUDED.n"
        )
    sink = lake.sink("merge_on_read")
    for piece in source.taken().slices(1):
        delivered(sink, piece)
    table = lake.table()
    assert table is not None
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(table.io)) <= 10
    assert lake.rows("SELECT * FROM t ORDER BY id") == [(0, 10), (1, 11), (2, 7), (3, 8), (4, 9)]
