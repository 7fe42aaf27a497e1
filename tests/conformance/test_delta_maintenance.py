"""Maintenance of Delta tables: files become few, rows stay, and deliveries go on meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from sinks.lakehouse import LakehouseSink, LakeNames, MaintenancePlan
from sinks.lakehouse.delta import delta_tables
from sinks.lakehouse.maintenance import Maintainer, merge_small_files
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.sink import Mode
from tests.conformance.test_delta_sink import delivered
from tests.fix_postgres import Database
from tests.lake import query
from tests.slot_batches import SlotBatches, slot_batches
from tests.waiting import until

pytestmark = pytest.mark.sinks

TARGET = LakeTarget("public", "t")
PLAN = MaintenancePlan(interval_s=0.05, target_file_bytes=1 << 20, retain_hours=1)


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches


def _files(root: Path) -> list[str]:
    return DeltaTable(root / TARGET.folder).file_uris()


def _deliver_in_pieces(source: SlotBatches, sink: LakehouseSink, count: int) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    for number in range(count):
        source.run(f"INSERT INTO t SELECT {number} * 10 + g, 0 FROM generate_series(0, 9) g")
    for piece in source.taken().slices(10):
        delivered(sink, piece)


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_small_files_become_one_and_a_repeat_is_still_absorbed(
    mode: Mode, source: SlotBatches, tmp_path: Path
) -> None:
    tables = delta_tables(str(tmp_path), "shop/orders", {})
    sink = LakehouseSink(tables, LakeNames(), mode=mode)
    _deliver_in_pieces(source, sink, 6)
    assert len(_files(tmp_path)) == 6
    assert merge_small_files(tables(TARGET), 1 << 20)
    assert len(_files(tmp_path)) == 1
    assert not merge_small_files(tables(TARGET), 1 << 20)
    found = query("SELECT id FROM t ORDER BY id", t=tmp_path / TARGET.folder)
    assert found == [(number,) for number in range(60)]
    source.run("UPDATE t SET n = 1 WHERE id = 5")
    delivered(sink, source.taken())
    (changed,) = query("SELECT count(*) FROM t WHERE n = 1", t=tmp_path / TARGET.folder)
    assert changed == (1,)


def test_files_that_no_version_has_go_after_their_time_and_those_of_a_crash_too(
    source: SlotBatches, tmp_path: Path
) -> None:
    tables = delta_tables(str(tmp_path), "shop/orders", {})
    _deliver_in_pieces(source, LakehouseSink(tables, LakeNames(), mode="upsert"), 5)
    merge_small_files(tables(TARGET), 1 << 20)
    place = tmp_path / TARGET.folder
    left_by_a_crash = place / "part-left.zstd.parquet"
    left_by_a_crash.write_bytes(b"PAR1")
    an_age_ago = time.time() - 7200
    for path in place.glob("*.parquet"):
        os.utime(path, (an_age_ago, an_age_ago))
    maintainer = Maintainer(tables, PLAN)
    maintainer.wrote(TARGET)
    until("a vacuum", lambda: not left_by_a_crash.exists(), 30)
    maintainer.close()
    assert query("SELECT count(*) FROM t", t=place) == [(50,)]


def test_deliveries_and_maintenance_go_on_side_by_side(
    source: SlotBatches, database: Database, tmp_path: Path
) -> None:
    tables = delta_tables(str(tmp_path), "shop/orders", {})
    sink = LakehouseSink(tables, LakeNames(), mode="upsert", maintenance=PLAN)
    _deliver_in_pieces(source, sink, 20)
    for number in range(30):
        source.run(f"UPDATE t SET n = n + 1 WHERE id % 7 = {number % 7}")
        source.run(f"INSERT INTO t VALUES ({1000 + number}, 1)")
    for piece in source.taken().slices(15):
        delivered(sink, piece)
    until("a merge of files", lambda: len(_files(tmp_path)) < 10, 30)
    sink.close()
    assert not any(thread.name == "lakehouse" for thread in threading.enumerate())
    here = database.execute("SELECT id, n FROM t ORDER BY id")
    assert query("SELECT * FROM t ORDER BY id", t=tmp_path / TARGET.folder) == here


def test_a_table_that_cannot_be_looked_after_fails_no_delivery(
    source: SlotBatches, tmp_path: Path
) -> None:
    tables = delta_tables(str(tmp_path), "shop/orders", {})
    sink = LakehouseSink(tables, LakeNames(), mode="append")
    _deliver_in_pieces(source, sink, 5)
    for path in (tmp_path / TARGET.folder).rglob("*.parquet"):
        path.unlink()
    maintainer = Maintainer(tables, PLAN)
    maintainer.wrote(TARGET)
    maintainer.run_once()
    maintainer.close()
    source.run("INSERT INTO t VALUES (777, 1)")
    delivered(sink, source.taken())
