"""What only Iceberg tables have: numbers of columns, deletes by key, manifests."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinks.lakehouse.iceberg import manifests
from tests.iceberg_lake import IcebergLake
from tests.lake_checks import delivered
from tests.slot_batches import SlotBatches

pytestmark = pytest.mark.sinks


@pytest.fixture
def lake(tmp_path: Path) -> IcebergLake:
    return IcebergLake(tmp_path / "lake")


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
