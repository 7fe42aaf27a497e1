"""Maintenance of a lake's tables: files and deletes become few, rows stay, deliveries go on."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.config import DeltaDestination
from sinks import open_sink
from sinks.lakehouse import MaintenancePlan, maintenance
from sinks.lakehouse.iceberg import upkeep
from sinks.lakehouse.maintenance import Maintainer, merge_small_files
from tests.fix_postgres import Database
from tests.iceberg_lake import IcebergLake
from tests.lake_checks import T, deliver_in_pieces, delivered
from tests.lakes import EVERY_LAKE, LAKES, Lake
from tests.slot_batches import SlotBatches
from tests.waiting import until

pytestmark = pytest.mark.sinks

PLAN = MaintenancePlan(interval_s=0.05, target_file_bytes=1 << 20, retain_hours=1)


@pytest.fixture
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", request.param)


@pytest.fixture
def deletes_by_key(tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", "iceberg merge_on_read")


def _files(lake: Lake) -> int:
    table = lake.tables()(T)
    assert table.load() is not None
    return len(table.files())


def _counts(lake: IcebergLake) -> tuple[int, int]:
    """Data files and delete files of the current snapshot."""
    table = lake.table()
    assert table is not None
    files = table.inspect.files()["content"].to_pylist()
    return files.count(0), len(files) - files.count(0)


def _age(folder: Path) -> None:
    """Every file in it was changed two hours ago."""
    for path in folder.rglob("*.*"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))


@pytest.mark.parametrize("lake", LAKES, indirect=True)
def test_small_files_become_one_and_their_deletes_go(lake: Lake, source: SlotBatches) -> None:
    sink = lake.sink()
    deliver_in_pieces(source, sink, 6)
    source.run("UPDATE t SET n = 7 WHERE id IN (3, 33)", "DELETE FROM t WHERE id = 44")
    batch = source.taken()
    delivered(sink, batch)
    before = lake.rows("SELECT * FROM t ORDER BY ALL")
    assert merge_small_files(lake.tables()(T), 1 << 20)
    assert _files(lake) == 1
    assert lake.kind == "delta" or _counts(lake.iceberg) == (1, 0)
    assert not merge_small_files(lake.tables()(T), 1 << 20)
    assert lake.rows("SELECT * FROM t ORDER BY ALL") == before
    delivered(lake.sink(), batch, absorbed=len(batch))
    source.run("UPDATE t SET n = 1 WHERE id = 5")
    delivered(sink, source.taken())
    assert lake.rows("SELECT count(*) FROM t WHERE n = 1") == [(1,)]


@pytest.mark.parametrize("lake", EVERY_LAKE, indirect=True)
def test_deliveries_and_maintenance_go_on_side_by_side(
    lake: Lake, source: SlotBatches, database: Database
) -> None:
    sink = lake.sink(PLAN)
    deliver_in_pieces(source, sink, 10)
    for number in range(20):
        source.run(f"UPDATE t SET n = n + 1 WHERE id % 7 = {number % 7}")
        source.run(f"INSERT INTO t VALUES ({1000 + number}, 1)")
    batch = source.taken()
    for piece in batch.slices(15):
        delivered(sink, piece)
    until("a merge of files", lambda: _files(lake) < 8, 30)
    sink.close()
    assert not any(thread.name == "lakehouse" for thread in threading.enumerate())
    if lake.is_merged:
        here = database.execute("SELECT id, n FROM t ORDER BY id")
        assert lake.rows("SELECT * FROM t ORDER BY id") == here
    else:
        cursors = "SELECT count(*), count(DISTINCT (walbrook_lsn, walbrook_idx)) FROM t"
        assert lake.rows(cursors) == [(100 + len(batch), 100 + len(batch))]


@pytest.mark.parametrize("lake", ["delta copy_on_write"], indirect=True)
def test_files_that_no_version_has_go_after_their_time_and_those_of_a_crash_too(
    lake: Lake, source: SlotBatches
) -> None:
    deliver_in_pieces(source, lake.sink(), 5)
    merge_small_files(lake.tables()(T), 1 << 20)
    left_by_a_crash = lake.root / "public" / "t" / "part-left.zstd.parquet"
    left_by_a_crash.write_bytes(b"PAR1")
    _age(lake.root / "public" / "t")
    maintainer = Maintainer(lake.tables(), PLAN)
    maintainer.wrote(T)
    until("a vacuum", lambda: not left_by_a_crash.exists(), 30)
    maintainer.close()
    assert lake.rows("SELECT count(*) FROM t") == [(50,)]


def test_files_that_no_snapshot_has_go_after_their_time_and_those_of_a_crash_too(
    deletes_by_key: Lake, source: SlotBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = deletes_by_key
    monkeypatch.setattr(upkeep, "SNAPSHOTS_MAX", 10)
    deliver_in_pieces(source, lake.sink(), 12)
    table = lake.iceberg.table()
    assert table is not None
    assert len(table.metadata.snapshots) == 10
    data = lake.root / "public" / "t" / "data"
    left_by_a_crash, young = data / "data-left.parquet", data / "data-young.parquet"
    left_by_a_crash.write_bytes(b"PAR1")
    merge_small_files(lake.tables()(T), 1 << 20)
    _age(lake.root / "public" / "t")
    young.write_bytes(b"PAR1")
    opened = lake.tables()(T)
    opened.load()
    assert opened.vacuum(1) > 0
    assert not left_by_a_crash.exists()
    assert young.exists()
    assert lake.rows("SELECT count(*) FROM t") == [(120,)]
    first = table.metadata.snapshots[1]
    assert len(table.scan(snapshot_id=first.snapshot_id).to_arrow()) > 0


def test_a_file_with_many_deletes_is_rewritten(deletes_by_key: Lake, source: SlotBatches) -> None:
    lake = deletes_by_key
    sink = lake.sink()
    deliver_in_pieces(source, sink, 2)
    source.run("DELETE FROM t WHERE id IN (5, 15)")
    delivered(sink, source.taken())
    assert _counts(lake.iceberg) == (2, 1)
    assert merge_small_files(lake.tables()(T), 1 << 20)
    assert merge_small_files(lake.tables()(T), 1 << 20)
    assert not merge_small_files(lake.tables()(T), 1 << 20)
    assert _counts(lake.iceberg) == (2, 0)
    assert lake.rows("SELECT count(*) FROM t") == [(18,)]


def test_a_merge_does_not_bring_back_what_was_deleted_meanwhile(
    deletes_by_key: Lake, source: SlotBatches
) -> None:
    lake = deletes_by_key
    sink = lake.sink()
    deliver_in_pieces(source, sink, 5)
    table = lake.tables()(T)
    assert table.load() is not None
    files = table.files()
    added = table.write(table.read(files[0]))
    source.run("DELETE FROM t WHERE id < 100 AND id % 2 = 0", "INSERT INTO t VALUES (2, 2)")
    delivered(sink, source.taken())
    table.commit(added, files[:1], None)
    found = [*range(1, 50, 2), 2]
    assert lake.rows("SELECT id FROM t ORDER BY id") == [(number,) for number in sorted(found)]


@pytest.mark.parametrize("lake", ["delta append"], indirect=True)
def test_a_table_that_cannot_be_looked_after_fails_no_delivery(
    lake: Lake, source: SlotBatches
) -> None:
    sink = lake.sink()
    deliver_in_pieces(source, sink, 5)
    for path in (lake.root / "public" / "t").rglob("*.parquet"):
        path.unlink()
    maintainer = Maintainer(lake.tables(), PLAN)
    maintainer.wrote(T)
    maintainer.run_once()
    maintainer.close()
    source.run("INSERT INTO t VALUES (777, 1)")
    delivered(sink, source.taken())


@pytest.mark.parametrize("lake", ["iceberg append", "parquet append"], indirect=True)
def test_a_table_to_which_nothing_is_written_any_more_keeps_no_file_of_old_versions(
    lake: Lake, source: SlotBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def data_files() -> int:
        return sum(name.endswith(".parquet") for name in lake.files("public/t"))

    monkeypatch.setattr(maintenance, "_VACUUM_EVERY", 1.0)
    deliver_in_pieces(source, lake.sink(), 6)
    maintainer = Maintainer(lake.tables(), replace(PLAN, interval_s=2.0))
    maintainer.wrote(T)
    maintainer.run_once()
    assert data_files() == 7, "readers of the old version have not had their time"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    maintainer.run_once()
    maintainer.close()
    assert data_files() == 1
    assert lake.rows("SELECT count(*) FROM t") == [(60,)]


def test_more_files_than_are_merged_at_a_time_are_merged_the_next_time(
    source: SlotBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.of(tmp_path / "lake", "delta append")
    monkeypatch.setattr(maintenance, "_MERGES_MAX", 1)
    deliver_in_pieces(source, lake.sink(), 10)
    table = lake.tables()(T)
    table.load()
    small = 5 * max(file.size for file in table.files())
    maintainer = Maintainer(lake.tables(), replace(PLAN, interval_s=3600, target_file_bytes=small))
    maintainer.wrote(T)
    maintainer.run_once()
    assert _files(lake) > 5
    maintainer.run_once()
    maintainer.close()
    assert _files(lake) <= 3


def test_maintenance_that_is_switched_off_leaves_every_file(
    source: SlotBatches, tmp_path: Path
) -> None:
    lake = Lake.of(tmp_path / "lake", "delta append")
    off = DeltaDestination.model_validate(
        {"type": "delta", "path": lake.root, "maintenance": {"enabled": False, "interval_s": 1}}
    )
    sink = open_sink(off, consumer="orders", batch_size=1, source="shop")
    deliver_in_pieces(source, sink, 6)
    assert not any(thread.name == "lakehouse" for thread in threading.enumerate())
    assert _files(lake) == 6
