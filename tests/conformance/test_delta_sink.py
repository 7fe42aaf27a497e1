"""What only Delta tables have: their log, folders that move, and files that are made at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.lake_checks import delivered, stopped_by
from tests.lakes import Lake
from tests.slot_batches import SlotBatches

pytestmark = pytest.mark.sinks


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", "delta append")


@pytest.fixture
def merged(tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", "delta copy_on_write")


def test_a_table_that_is_gone_is_not_silently_made_again(lake: Lake, source: SlotBatches) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    sink, place = lake.sink(), lake.root / "public" / "t"
    delivered(sink, source.taken())
    place.rename(lake.root / "away")
    source.run("INSERT INTO t VALUES (2)")
    batch = source.taken()
    assert sink.deliver(batch).settled == 0  # it had the table open
    assert stopped_by(lake.sink().deliver(batch), 1).kind == "table_gone"
    assert not place.exists()
    (lake.root / "away").rename(place)
    delivered(sink, batch, absorbed=1)
    assert lake.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,)]


def test_merged_rows_of_a_table_that_was_renamed_are_not_split_between_two(
    merged: Lake, source: SlotBatches
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (2)",
    )  # fmt: skip
    sink = merged.sink()
    delivered(sink, source.taken())
    source.run("ALTER TABLE t RENAME TO v", "INSERT INTO v VALUES (3)")
    renamed = source.taken()
    assert stopped_by(sink.deliver(renamed), len(renamed)).kind == "table_renamed"
    (merged.root / "public" / "t").rename(merged.root / "public" / "v")
    sink.close()
    delivered(sink, renamed, absorbed=len(renamed))
    assert merged.rows("SELECT id FROM v ORDER BY id", "v") == [(1,), (3,)]
    source.run("ALTER TABLE u RENAME TO w", "ALTER TABLE v RENAME TO u", "INSERT INTO u VALUES (4)")
    swapped = source.taken()
    assert stopped_by(sink.deliver(swapped), len(swapped)).kind == "table_renamed"


def test_a_position_outlives_checkpoints_and_the_log_before_them(
    lake: Lake, source: SlotBatches
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(lake.sink(), batch)
    DeltaTable(lake.root / "public" / "t").create_checkpoint()
    for entry in (lake.root / "public" / "t" / "_delta_log").glob("*0.json"):
        entry.unlink()
    delivered(lake.sink(), batch, absorbed=1)


def test_many_changes_become_files_side_by_side_in_one_commit(
    lake: Lake, source: SlotBatches
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 85000)",
    )
    sink, batch = lake.sink(), source.taken()
    delivered(sink, batch)
    table = DeltaTable(lake.root / "public" / "t")
    assert (table.version(), len(table.file_uris())) == (1, min(2, os.cpu_count() or 1))
    assert lake.rows("SELECT count(*), count(DISTINCT id) FROM t") == [(85_000, 85_000)]
    delivered(sink, batch, absorbed=85_000)
