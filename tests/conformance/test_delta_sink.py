"""What only Delta tables have: their log, folders that move, and files that are made at once."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from sinks.lakehouse.maintenance import merge_small_files
from sinks.lakehouse.table import ConflictError
from tests.lake_checks import T, deliver_in_pieces, delivered, stopped_by
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


def test_of_two_compactions_of_current_rows_at_once_one_is_refused(
    merged: Lake, source: SlotBatches
) -> None:
    deliver_in_pieces(source, merged.sink(), 6)
    late = DeltaTable(merged.root / "public" / "t")
    assert merge_small_files(merged.tables()(T), 1 << 20)
    with pytest.raises(CommitFailedError):
        late.optimize.compact()
    assert merged.rows("SELECT count(*), count(DISTINCT id) FROM t") == [(60, 60)]


@pytest.mark.parametrize("way", ["append", "copy_on_write"])
def test_a_merge_of_files_that_somebody_has_compacted_is_refused(
    way: str, source: SlotBatches, tmp_path: Path
) -> None:
    lake = Lake.of(tmp_path / "lake", f"delta {way}")
    deliver_in_pieces(source, lake.sink(), 6)
    late = lake.tables()(T)
    late.load()
    files = late.files()
    added = late.write(pa.concat_tables([late.read(file) for file in files]))
    assert DeltaTable(lake.root / "public" / "t").optimize.compact()["numFilesRemoved"] == 6
    with pytest.raises(ConflictError):
        late.commit(added, files, None)
    assert lake.rows("SELECT count(*), count(DISTINCT id) FROM t") == [(60, 60)]


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
