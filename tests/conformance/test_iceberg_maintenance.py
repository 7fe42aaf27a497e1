"""Maintenance of Iceberg tables: files and deletes become few, rows stay, deliveries go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sinks.lakehouse import LakehouseSink, MaintenancePlan
from sinks.lakehouse.iceberg import upkeep
from sinks.lakehouse.maintenance import merge_small_files
from sinks.lakehouse.names import LakeTarget
from tests.conformance.test_iceberg_sink import delivered
from tests.fix_postgres import Database
from tests.iceberg_lake import WAYS, IcebergLake, Way
from tests.slot_batches import SlotBatches, slot_batches
from tests.waiting import until

pytestmark = pytest.mark.sinks

TARGET = LakeTarget("public", "t")
PLAN = MaintenancePlan(interval_s=0.05, target_file_bytes=1 << 20, retain_hours=1)


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture
def lake(tmp_path: Path) -> IcebergLake:
    return IcebergLake(tmp_path / "lake")


def _counts(lake: IcebergLake) -> tuple[int, int]:
    """Data files and delete files of the current snapshot."""
    table = lake.table()
    assert table is not None
    files = table.inspect.files()["content"].to_pylist()
    return files.count(0), len(files) - files.count(0)


def _deliver_in_pieces(source: SlotBatches, sink: LakehouseSink, count: int) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    for number in range(count):
        source.run(f"INSERT INTO t SELECT {number} * 10 + g, 0 FROM generate_series(0, 9) g")
    for piece in source.taken().slices(10):
        delivered(sink, piece)


@pytest.mark.parametrize("way", WAYS)
def test_small_files_become_one_and_their_deletes_go(
    way: Way, source: SlotBatches, lake: IcebergLake
) -> None:
    sink = lake.sink(way)
    _deliver_in_pieces(source, sink, 6)
    source.run("UPDATE t SET n = 7 WHERE id IN (3, 33)", "DELETE FROM t WHERE id = 44")
    delivered(sink, source.taken())
    before = lake.rows("SELECT * FROM t ORDER BY ALL")
    assert merge_small_files(lake.tables()(TARGET), 1 << 20)
    assert _counts(lake) == (1, 0)
    assert lake.rows("SELECT * FROM t ORDER BY ALL") == before
    source.run("UPDATE t SET n = 1 WHERE id = 5")
    delivered(sink, source.taken())
    assert lake.rows("SELECT count(*) FROM t WHERE n = 1") == [(1,)]


def test_a_file_with_many_deletes_is_rewritten(source: SlotBatches, lake: IcebergLake) -> None:
    sink = lake.sink("merge_on_read")
    _deliver_in_pieces(source, sink, 2)
    source.run("DELETE FROM t WHERE id IN (5, 15)")
    delivered(sink, source.taken())
    assert _counts(lake) == (2, 1)
    assert merge_small_files(lake.tables()(TARGET), 1 << 20)
    assert merge_small_files(lake.tables()(TARGET), 1 << 20)
    assert not merge_small_files(lake.tables()(TARGET), 1 << 20)
    assert _counts(lake) == (2, 0)
    assert lake.rows("SELECT count(*) FROM t") == [(18,)]


def test_a_merge_does_not_bring_back_what_was_deleted_meanwhile(
    source: SlotBatches, lake: IcebergLake
) -> None:
    sink = lake.sink("merge_on_read")
    _deliver_in_pieces(source, sink, 5)
    table = lake.tables()(TARGET)
    assert table.load() is not None
    files = table.files()
    added = table.write(table.read(files[0]))
    source.run("DELETE FROM t WHERE id < 100 AND id % 2 = 0", "INSERT INTO t VALUES (2, 2)")
    delivered(sink, source.taken())
    table.commit(added, files[:1], None)
    found = [*range(1, 50, 2), 2]
    assert lake.rows("SELECT id FROM t ORDER BY id") == [(number,) for number in sorted(found)]


def test_files_that_no_snapshot_has_go_after_their_time_and_those_of_a_crash_too(
    source: SlotBatches, lake: IcebergLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SNAPSHOTS_MAX", 10)
    sink = lake.sink("merge_on_read")
    _deliver_in_pieces(source, sink, 12)
    table = lake.table()
    assert table is not None
    assert len(table.metadata.snapshots) == 10
    place = lake.root / "public" / "t"
    left_by_a_crash = place / "data" / "data-left.parquet"
    left_by_a_crash.write_bytes(b"PAR1")
    young = place / "data" / "data-young.parquet"
    merge_small_files(lake.tables()(TARGET), 1 << 20)
    for path in place.rglob("*.*"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    young.write_bytes(b"PAR1")
    opened = lake.tables()(TARGET)
    opened.load()
    assert opened.vacuum(1) > 0
    assert not left_by_a_crash.exists()
    assert young.exists()
    assert lake.rows("SELECT count(*) FROM t") == [(120,)]
    first = table.metadata.snapshots[1]
    assert len(table.scan(snapshot_id=first.snapshot_id).to_arrow()) > 0


def test_deliveries_and_maintenance_go_on_side_by_side(
    source: SlotBatches, database: Database, lake: IcebergLake
) -> None:
    sink = lake.sink("merge_on_read", plan=PLAN)
    _deliver_in_pieces(source, sink, 10)
    for number in range(20):
        source.run(f"UPDATE t SET n = n + 1 WHERE id % 7 = {number % 7}")
        source.run(f"INSERT INTO t VALUES ({1000 + number}, 1)")
    for piece in source.taken().slices(15):
        delivered(sink, piece)
    until("a merge of files", lambda: _counts(lake)[0] < 8, 30)
    sink.close()
    here = database.execute("SELECT id, n FROM t ORDER BY id")
    assert lake.rows("SELECT * FROM t ORDER BY id") == here
