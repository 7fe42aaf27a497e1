"""Typed Parquet tables on a disk and in a store, with changes of a real source, read by DuckDB."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import duckdb
import pytest

from cdc.errors import OperatorError, PoisonError
from cdc.generation import Generation
from sinks.lakehouse import LakehouseSink, MaintenancePlan
from sinks.lakehouse.maintenance import Maintainer, merge_small_files
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.parquet.places import Stored, StorePlace
from sinks.lakehouse.table import ConflictError
from tests.conformance.test_delta_sink import _EVOLUTION, delivered, stopped_by
from tests.fix_postgres import Database
from tests.fix_s3 import S3
from tests.parquet_lake import ParquetLake
from tests.reload_deliverer import deliver_all
from tests.reload_history import recorded
from tests.slot_batches import SlotBatches, slot_batches
from tests.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "sinks" / "parquet.md"
TARGET = LakeTarget("public", "t")
PLAN = MaintenancePlan(interval_s=0.05, target_file_bytes=1 << 20, retain_hours=1)


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture(params=["disk", "s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> ParquetLake:
    if request.param == "disk":
        return ParquetLake.on_disk(tmp_path / "lake")
    return ParquetLake.in_store(request.getfixturevalue("s3"), tmp_path / "copies")


@pytest.fixture
def on_disk(tmp_path: Path) -> ParquetLake:
    return ParquetLake.on_disk(tmp_path / "lake")


@pytest.mark.parametrize("size", [1, 3, 1000], ids="batches_of_{}".format)
def test_each_file_has_the_columns_that_the_table_had_when_its_rows_changed(
    size: int, source: SlotBatches, lake: ParquetLake
) -> None:
    source.run(*_EVOLUTION)
    batch, sink = source.taken(), lake.sink()
    for piece in batch.slices(size):
        delivered(sink, piece)
    delivered(lake.sink(), batch, absorbed=len(batch))
    found = lake.query(
        "SELECT walbrook_action, id, a, b, label, gone, CAST(c AS VARCHAR), "
        "walbrook_date = CAST(walbrook_committed_at AS DATE) FROM t ORDER BY walbrook_lsn"
    )
    assert found == [
        ("insert", 1, 10, "one", None, "x", None, True),
        ("insert", 2, 20, "two", None, "y", "2026-01-01", True),
        ("update", 1, 10, None, "uno", None, None, True),
        ("insert", 3, 3_000_000_000, None, "three", None, None, True),
        ("delete", 2, None, None, None, None, None, True),
    ]


def test_the_query_of_the_page_reads_a_table_by_its_manifest(
    source: SlotBatches, on_disk: ParquetLake, tmp_path: Path
) -> None:
    source.run("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1), (2)")
    delivered(on_disk.sink(), source.taken())
    (query,) = re.findall(r"```\n(SET VARIABLE.*?)```", PAGE.read_text(), re.DOTALL)
    with duckdb.connect() as connection:
        rows = connection.execute(query.replace("'lake/", f"'{tmp_path}/lake/"))
        assert sorted(rows.to_arrow_table().column("id").to_pylist()) == [1, 2]


def test_a_column_that_changes_its_kind_is_text_for_readers_of_all_versions(
    source: SlotBatches, lake: ParquetLake
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t VALUES (1, 20260101)",
        "ALTER TABLE t ALTER COLUMN v TYPE text",
        "INSERT INTO t VALUES (2, 'words')",
    )
    delivered(lake.sink(), source.taken())
    assert lake.query("SELECT id, v FROM t ORDER BY id") == [(1, "20260101"), (2, "words")]


def test_versions_without_a_common_type_are_read_one_by_one(
    source: SlotBatches, on_disk: ParquetLake
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t VALUES (1, 20260101)",
        "ALTER TABLE t ALTER COLUMN v TYPE date USING v::text::date",
        "INSERT INTO t VALUES (2, '2026-01-02')",
    )
    delivered(on_disk.sink(), source.taken())
    with pytest.raises(duckdb.ConversionException):
        on_disk.query("SELECT v FROM t")
    assert on_disk.query("SELECT v FROM t", where="file.version = 1") == [(20260101,)]
    assert on_disk.query("SELECT v FROM t", where="file.version >= 2") == [(date(2026, 1, 2),)]


def test_a_file_that_no_manifest_names_is_not_seen_and_goes_after_its_time(
    source: SlotBatches, on_disk: ParquetLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    delivered(on_disk.sink(), source.taken())
    (path,) = (name for name in on_disk.objects() if name.endswith(".parquet"))
    folder = Path(on_disk.root) / "public" / "t"
    orphan = folder / path.replace(path[-20:], "000000000000.parquet")
    orphan.write_bytes((folder / path).read_bytes())
    somebody_elses = folder / "archive.parquet"
    somebody_elses.write_bytes(b"PAR1")
    assert on_disk.query("SELECT count(*) FROM t") == [(1,)]
    table = on_disk.tables()(TARGET)
    table.load()
    assert table.vacuum(1) == 0, "it may be of a commit that is under way"
    an_age_ago = time.time() - 7200
    for each in (orphan, somebody_elses, folder / path):
        os.utime(each, (an_age_ago, an_age_ago))
    late = on_disk.tables()(TARGET)
    state = late.load()
    assert state is not None
    assert table.vacuum(1) == 1
    assert not orphan.exists()
    with pytest.raises(ConflictError):  # it could be about to commit the file that was removed
        late.commit([], [], state.moved(state.cursor))
    assert somebody_elses.exists()
    assert on_disk.query("SELECT count(*) FROM t") == [(1,)]


def _deliver_in_pieces(source: SlotBatches, sink: LakehouseSink, count: int) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    for number in range(count):
        source.run(f"INSERT INTO t SELECT {number} * 10 + g, 0 FROM generate_series(0, 9) g")
    for piece in source.taken().slices(10):
        delivered(sink, piece)


def test_small_files_become_one_and_stay_for_readers_of_the_old_manifest(
    source: SlotBatches, lake: ParquetLake
) -> None:
    sink = lake.sink()
    _deliver_in_pieces(source, sink, 6)
    before = [name for name in lake.objects() if name.endswith(".parquet")]
    assert len(before) == 6
    table = lake.tables()(TARGET)
    assert merge_small_files(table, 1 << 20)
    assert not merge_small_files(table, 1 << 20)
    after = [name for name in lake.objects() if name.endswith(".parquet")]
    assert set(before) < set(after)
    assert len(after) == 7
    assert lake.query("SELECT count(*), count(DISTINCT id) FROM t") == [(60, 60)]
    source.run("UPDATE t SET n = 1 WHERE id = 5")
    delivered(sink, source.taken())
    table.load()
    assert table.vacuum(1) == 0
    assert table.vacuum(0) == 6, "their time is over"
    assert len([name for name in lake.objects() if name.endswith(".parquet")]) == 2
    assert lake.query("SELECT count(*) FROM t") == [(61,)]


def test_files_of_different_columns_are_not_merged_into_one(
    source: SlotBatches, on_disk: ParquetLake
) -> None:
    sink = on_disk.sink()
    _deliver_in_pieces(source, sink, 4)
    source.run("ALTER TABLE t RENAME COLUMN n TO m")
    for number in range(4):
        source.run(f"INSERT INTO t VALUES ({1000 + number}, 7)")
    for piece in source.taken().slices(1):
        delivered(sink, piece)
    table = on_disk.tables()(TARGET)
    while merge_small_files(table, 1 << 20):
        pass
    table.load()
    assert sorted(file.rows for file in table.files()) == [4, 40]
    assert on_disk.query("SELECT sum(n), sum(m) FROM t") == [(0, 28)]


def test_files_that_are_moved_away_fail_no_delivery_and_no_merge(
    source: SlotBatches, on_disk: ParquetLake
) -> None:
    sink = on_disk.sink()
    _deliver_in_pieces(source, sink, 6)
    folder = Path(on_disk.root) / "public" / "t"
    moved = sorted(folder.rglob("*.parquet"))[:2]
    for path in moved:
        path.rename(path.with_suffix(".archived"))
    table = on_disk.tables()(TARGET)
    while not merge_small_files(table, 1 << 20):
        pass
    table.load()
    table.vacuum(1)
    source.run("INSERT INTO t VALUES (777, 1)")
    delivered(sink, source.taken())
    assert on_disk.query("SELECT count(*) FROM t") == [(41,)]


def test_deliveries_and_maintenance_go_on_side_by_side(
    source: SlotBatches, lake: ParquetLake
) -> None:
    sink = lake.sink(maintenance=PLAN)
    _deliver_in_pieces(source, sink, 20)
    for number in range(30):
        source.run(f"INSERT INTO t VALUES ({1000 + number}, 1)")
    for piece in source.taken().slices(2):
        delivered(sink, piece)
    table = lake.tables()(TARGET)

    def few() -> bool:
        table.load()
        return len(table.files()) < 10

    until("a merge of files", few, 30)
    sink.close()
    assert lake.query("SELECT count(*), count(DISTINCT id) FROM t") == [(230, 230)]


def test_a_maintainer_removes_what_was_merged_once_its_time_is_over(
    source: SlotBatches, on_disk: ParquetLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    _deliver_in_pieces(source, on_disk.sink(), 6)
    merge_small_files(on_disk.tables()(TARGET), 1 << 20)
    now = time.time()
    monkeypatch.setattr("sinks.lakehouse.parquet.table.time.time", lambda: now + 2 * 3600)
    maintainer = Maintainer(on_disk.tables(), PLAN)
    maintainer.wrote(TARGET)
    maintainer.run_once()
    maintainer.close()
    assert len([name for name in on_disk.objects() if name.endswith(".parquet")]) == 1


def test_of_two_processes_with_the_same_changes_one_is_refused_and_absorbs_them(
    source: SlotBatches, lake: ParquetLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(lake.sink(), batch)
    stale, fresh = lake.tables()(TARGET), lake.tables()(TARGET)
    state = stale.load()
    fresh.load()
    assert state is not None
    rows = fresh.read(fresh.files()[0])
    fresh.commit(fresh.write(rows), [], state.moved(state.cursor))
    with pytest.raises(ConflictError):
        stale.commit(stale.write(rows), [], state.moved(state.cursor))
    assert lake.query("SELECT count(*) FROM t") == [(2,)]
    delivered(lake.sink(), batch, absorbed=len(batch))


def test_a_table_of_another_consumer_is_refused(source: SlotBatches, lake: ParquetLake) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(lake.sink(), batch)
    delivery = lake.sink(owner="shop/other").deliver(batch)
    assert isinstance(delivery.error, OperatorError)
    assert "shop/orders" in delivery.error.what


def test_a_table_that_is_gone_is_not_restarted_silently(
    source: SlotBatches, on_disk: ParquetLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(on_disk.sink(), batch)
    folder = Path(on_disk.root) / "public" / "t"
    folder.rename(folder.with_name("elsewhere"))
    assert stopped_by(on_disk.sink().deliver(batch), 1).kind == "table_gone"
    folder.with_name("elsewhere").rename(folder)
    delivered(on_disk.sink(), batch, absorbed=len(batch))
    assert on_disk.query("SELECT id FROM t") == [(1,)]


def test_a_truncation_empties_every_table_before_the_first_delivery(
    source: SlotBatches, lake: ParquetLake
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)",
    )  # fmt: skip
    delivered(lake.sink(), source.taken())
    stale = lake.sink()
    source.run("INSERT INTO t VALUES (2)")
    batch = source.taken()
    delivered(lake.sink(generation=Generation(1, 1)), batch)
    assert lake.query("SELECT id FROM t") == [(2,)]
    assert lake.query("SELECT id FROM t", "public/u") == []
    assert [name for name in lake.objects("public/u") if name.endswith(".parquet")] == []
    error = stale.deliver(batch).error
    assert isinstance(error, OperatorError)
    assert error.kind == "truncated_since"
    delivered(lake.sink(generation=Generation(1, 1)), batch, absorbed=len(batch))


def test_a_new_generation_lies_beside_the_first_one(source: SlotBatches, lake: ParquetLake) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(lake.sink(), batch)
    second = Generation(2)
    delivered(lake.sink(generation=second), batch)
    assert lake.query("SELECT id FROM t") == [(1,)]
    assert lake.query("SELECT id FROM t", generation=second) == [(1,)]


def test_a_reloaded_table_becomes_what_its_shadow_is_in_one_commit(
    database: Database, lake: ParquetLake, tmp_path: Path
) -> None:
    recorded(database, tmp_path / "changes.arrow")
    for _ in range(2):  # the second sink brings again what the first one had
        deliver_all(lake.sink(), tmp_path / "changes.arrow")
    last = (
        "SELECT id, v FROM (SELECT id, v, walbrook_action AS action, row_number() OVER (PARTITION "
        "BY id ORDER BY walbrook_lsn DESC, walbrook_idx DESC) AS place FROM t WHERE id IS NOT NULL)"
        " WHERE place = 1 AND action <> 'delete' ORDER BY id"
    )
    assert lake.query(last) == database.execute("SELECT id, v FROM t ORDER BY id")
    assert lake.query("SELECT count(*) > 0 FROM t WHERE walbrook_action = 'read'") == [(True,)]
    assert [name for name in lake.objects("_walbrook") if name.startswith("reload-")] == []


def test_a_table_is_partitioned_by_what_is_asked_for(
    source: SlotBatches, on_disk: ParquetLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", "DELETE FROM t")
    delivered(on_disk.sink(partition_by=("walbrook_action",)), source.taken())
    folders = {name.rpartition("/")[0] for name in on_disk.objects()} - {""}
    assert folders == {"v1/walbrook_action=insert", "v1/walbrook_action=delete"}
    found = on_disk.query("SELECT walbrook_action, id FROM t ORDER BY walbrook_lsn")
    assert found == [("insert", 1), ("delete", 1)]


def test_a_probe_makes_nothing(lake: ParquetLake) -> None:
    assert lake.root in lake.sink().probe()
    assert lake.objects("") == []


def test_a_value_that_no_arrow_type_holds_is_refused_alone(
    source: SlotBatches, on_disk: ParquetLake
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n numeric(12,2))",
        "INSERT INTO t VALUES (1, 1.5), (2, 'NaN'), (3, 2.5)",
    )
    delivery = on_disk.sink().deliver(source.taken())
    assert isinstance(delivery.error, PoisonError)
    assert delivery.settled == 1, "the message before it"
    assert on_disk.query("SELECT id, CAST(n AS VARCHAR) FROM t") == [(1, "1.50")]


def test_a_store_that_refuses_the_account_is_an_operator_error_without_secrets(
    source: SlotBatches, s3: S3, tmp_path: Path
) -> None:
    lake = ParquetLake.in_store(s3, tmp_path)
    lake.options.update(AWS_ACCESS_KEY_ID=s3.stranger.key, AWS_SECRET_ACCESS_KEY=s3.stranger.secret)
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    error = lake.sink().deliver(source.taken()).error
    assert isinstance(error, OperatorError), error
    assert "storage_options" in error.fix
    assert s3.stranger.secret not in error.full_text


def test_a_bucket_that_is_not_there_and_an_unknown_option_are_operator_errors(
    source: SlotBatches, s3: S3, tmp_path: Path
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch, lake = source.taken(), ParquetLake.in_store(s3, tmp_path)
    lake.root = "s3://nobodys-bucket/lake"
    assert isinstance(lake.sink().deliver(batch).error, OperatorError)
    lake.options["AWS_NO_SUCH"] = "1"
    assert isinstance(lake.sink().deliver(batch).error, OperatorError)


def test_a_store_without_conditions_is_refused_and_keeps_no_manifest(
    source: SlotBatches, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = ParquetLake.in_store(s3, tmp_path)
    put = StorePlace.put

    def unconditional(self: StorePlace, path: str, content: bytes, known: Stored | None) -> Stored:
        try:
            return put(self, path, content, known)
        except ConflictError:
            return put(self, path, content, self.get(path))

    monkeypatch.setattr(StorePlace, "put", unconditional)
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch, sink = source.taken(), lake.sink()
    for _ in range(2):
        error = sink.deliver(batch).error
        assert isinstance(error, OperatorError)
        assert error.kind == "no_conditional_put"
    assert lake.objects() == []
