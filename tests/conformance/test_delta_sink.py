"""The delta sink on real tables, with changes of a real source, read by DuckDB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.errors import OperatorError, PoisonError
from sinks.base import Delivery, StoppedTable
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from sinks.lakehouse.sink import Mode
from tests.conformance.messages import batch as plain_batch
from tests.fix_postgres import Database
from tests.fix_s3 import S3
from tests.lake import query
from tests.slot_batches import SlotBatches, slot_batches

Open = Callable[..., LakehouseSink]


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def opened(root: Path) -> Open:
    def open_one(mode: Mode = "append", owner: str = "shop/orders") -> LakehouseSink:
        return LakehouseSink(delta_tables(str(root), owner, {}), LakeNames(), mode=mode)

    return open_one


def delivered(sink: LakehouseSink, batch: MessageBatch, *, absorbed: int = 0) -> None:
    delivery = sink.deliver(batch)
    assert delivery.error is None, delivery.error.full_text
    assert (delivery.settled, delivery.absorbed) == (len(batch), absorbed)


def stopped_by(delivery: Delivery, size: int) -> StoppedTable:
    """The one table whose changes wait, of a delivery that settled all ``size`` messages."""
    assert delivery.error is None, delivery.error.full_text
    assert delivery.settled == size
    assert delivery.stopped is not None
    (stopped,) = delivery.stopped
    return stopped


def columns_of(place: Path) -> list[tuple[object, ...]]:
    return [row[:2] for row in query("DESCRIBE t", t=place)]


_EVOLUTION = (
    "CREATE TABLE t (id int PRIMARY KEY, a int, b text, gone text)",
    "INSERT INTO t VALUES (1, 10, 'one', 'x')",
    "ALTER TABLE t ADD COLUMN c date",
    "INSERT INTO t VALUES (2, 20, 'two', 'y', '2026-01-01')",
    "ALTER TABLE t RENAME COLUMN b TO label",
    "ALTER TABLE t DROP COLUMN gone",
    "UPDATE t SET label = 'uno' WHERE id = 1",
    "ALTER TABLE t ALTER COLUMN a TYPE bigint",
    "INSERT INTO t (id, a, label) VALUES (3, 3000000000, 'three')",
    "DELETE FROM t WHERE id = 2",
)


@pytest.mark.parametrize(
    "size",
    [pytest.param(1, marks=pytest.mark.sinks), pytest.param(3, marks=pytest.mark.sinks), 1000],
    ids="batches_of_{}".format,
)
def test_a_merged_table_follows_new_dropped_renamed_and_widened_columns(
    size: int, source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run(*_EVOLUTION)
    sink, batch = opened("upsert"), source.taken()
    for piece in batch.slices(size):
        delivered(sink, piece)
    place = root / "public" / "t"
    assert columns_of(place) == [
        ("id", "INTEGER"), ("a", "BIGINT"), ("label", "VARCHAR"), ("c", "DATE"),
    ]  # fmt: skip
    assert query("SELECT * FROM t ORDER BY id", t=place) == [
        (1, 10, "uno", None),
        (3, 3_000_000_000, "three", None),
    ]
    delivered(sink, batch, absorbed=len(batch))


@pytest.mark.sinks
@pytest.mark.parametrize("size", [1, 3, 1000], ids="batches_of_{}".format)
def test_a_history_keeps_dropped_columns_and_gains_the_others(
    size: int, source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run(*_EVOLUTION)
    sink = opened()
    for piece in source.taken().slices(size):
        delivered(sink, piece)
    found = query(
        "SELECT walbrook_action, id, a, label, gone, CAST(c AS VARCHAR) FROM t "
        "ORDER BY walbrook_lsn",
        t=root / "public" / "t",
    )
    assert found == [
        ("insert", 1, 10, "one", "x", None),
        ("insert", 2, 20, "two", "y", "2026-01-01"),
        ("update", 1, 10, "uno", None, None),
        ("insert", 3, 3_000_000_000, "three", None, None),
        ("delete", 2, None, None, None, None),
    ]


@pytest.mark.sinks
@pytest.mark.parametrize("size", [1, 1000], ids="batches_of_{}".format)
def test_a_dropped_column_of_a_history_is_not_taken_for_a_new_one(
    size: int, source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, gone text)",
        "INSERT INTO t VALUES (1, 'old')",
        "ALTER TABLE t DROP COLUMN gone",
        "INSERT INTO t VALUES (2)",
        "ALTER TABLE t ADD COLUMN other text",
        "INSERT INTO t VALUES (3, 'new')",
        "ALTER TABLE t ADD COLUMN gone int",
        "INSERT INTO t VALUES (4, 'newer', 7)",
    )
    sink, batch = opened(), source.taken()
    for piece in batch.slices(size):
        delivered(sink, piece)
    delivered(opened(), batch, absorbed=len(batch))
    place = root / "public" / "t"
    assert query("SELECT id, gone_2, other, gone FROM t ORDER BY id", t=place) == [
        (1, "old", None, None),
        (2, None, None, None),
        (3, None, "new", None),
        (4, None, "newer", 7),
    ]


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
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run(*_UNLIKE)
    delivered(opened(), source.taken())
    found = query("SELECT id, noon FROM t ORDER BY id", t=root / "public" / "t")
    assert found == [(1, "2026-01-02 03:04:05.000000"), (2, "later"), (3, "7")]


@pytest.mark.sinks
def test_a_merged_table_whose_column_cannot_be_widened_is_an_operator_error_that_names_it(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)", *_UNLIKE)
    batch = source.taken()
    stopped = stopped_by(opened("upsert").deliver(batch), len(batch))
    assert (stopped.table, stopped.kind) == ("public.t", "cannot_widen")
    assert f"column noon of the table at {root}/public/t" in stopped.what
    assert query("SELECT id FROM t", t=root / "public" / "other") == [(1,)]


_VALUES = {
    "boolean": "true",
    "smallint": "-32768",
    "bigint": "9223372036854775807",
    "real": "1.5",
    "numeric": "'NaN'",
    "numeric(12,4)": "22.2200",
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
}


def test_values_of_every_type_arrive_with_their_own_columns(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    members = ", ".join(f"c{at} {kind}" for at, kind in enumerate(_VALUES))
    source.run(
        f'CREATE TABLE "Odd ""t" (id int PRIMARY KEY, {members})',
        f'INSERT INTO "Odd ""t" VALUES (1, {", ".join(_VALUES.values())})',
        'INSERT INTO "Odd ""t" (id) VALUES (2)',
    )
    batch = source.taken()
    place = root / "public" / "Odd~20~22t"
    for mode in ("append", "upsert"):
        sink = LakehouseSink(
            delta_tables(str(root / mode), "shop/orders", {}), LakeNames(), mode=mode
        )
        delivered(sink, batch)
        place = root / mode / "public" / "Odd~20~22t"
        names = ", ".join(f"c{at}" for at in range(len(_VALUES)))
        first, second = query(f"SELECT {names} FROM t ORDER BY id", t=place)
        assert second == (None,) * len(_VALUES)
        assert repr(first[:8]) == (
            "(True, -32768, 9223372036854775807, 1.5, 'NaN', Decimal('22.2200'), -inf, "
            "'q\"u\\\\o\\tte\\n \\\\N')"
        )
        assert first[8] == b"\x00\x01\x02\xff"
        assert [str(value) for value in first[9:12]] == [
            "2024-02-29", "2026-01-02 03:04:05.678901", "2026-01-02 02:04:05.678901+00:00",
        ]  # fmt: skip
        assert first[12] == '{"a":1,  "a":2}'
        assert first[13:15] == ([7, None, 9], ["a,b", 'q"x', None, ""])
        assert first[15] == "00000000-0000-0000-0000-000000000001"


@pytest.mark.sinks
def test_a_value_that_no_arrow_type_holds_is_refused_alone_and_quoted_nowhere(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n numeric(4,1))")
    for number in ("1", "2", "'NaN'", "4"):
        source.run(f"INSERT INTO t SELECT coalesce(max(id), 0) + 1, {number} FROM t")
    batch, sink = source.taken(), opened()
    delivery = sink.deliver(batch)
    assert delivery.settled == 2
    assert isinstance(delivery.error, PoisonError)
    assert "column n of public.t" in delivery.error.what
    assert "NaN" not in str(delivery.error)
    delivered(sink, batch.slice(3))
    assert query("SELECT id FROM t ORDER BY id", t=root / "public" / "t") == [(1,), (2,), (4,)]


def test_key_changes_truncates_and_unchanged_values_are_merged(
    source: SlotBatches, database: Database, root: Path, opened: Open
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT g, g, repeat(g::text, 3000) FROM generate_series(1, 20) g",
    )
    sink = opened("upsert")
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
        assert query("SELECT * FROM t ORDER BY id", t=root / "public" / "t") == here
    source.run("TRUNCATE t", "INSERT INTO t VALUES (7, 7, 'seven')")
    delivered(sink, source.taken())
    assert query("SELECT * FROM t", t=root / "public" / "t") == [(7, 7, "seven")]
    source.run("TRUNCATE t")
    delivered(sink, source.taken())
    assert query("SELECT * FROM t", t=root / "public" / "t") == []


@pytest.mark.sinks
def test_only_files_that_may_hold_a_touched_key_are_rewritten(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    sink = opened("upsert")
    for start in range(0, 500, 100):
        source.run(f"INSERT INTO t SELECT g, g FROM generate_series({start}, {start + 99}) g")
        delivered(sink, source.taken())
    place = root / "public" / "t"
    before = set(DeltaTable(place).file_uris())
    source.run("UPDATE t SET n = -1 WHERE id = 250")
    delivered(sink, source.taken())
    after = set(DeltaTable(place).file_uris())
    assert (len(before - after), len(after - before)) == (1, 1)
    assert query("SELECT id FROM t WHERE n = -1", t=place) == [(250,)]


def test_a_table_without_a_key_is_refused_by_upsert_and_has_a_history(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run(
        "CREATE TABLE bag (x int)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag VALUES (1), (1)",
        "UPDATE bag SET x = 2",
    )
    batch = source.taken()
    assert "mode: append" in stopped_by(opened("upsert").deliver(batch), len(batch)).fix
    delivered(opened(), batch, absorbed=len(batch))
    assert len(query("SELECT x FROM t", t=root / "public" / "bag")) == 4


@pytest.mark.sinks
@pytest.mark.parametrize("column", ["ID", "Walbrook_action"])
def test_a_column_whose_name_is_taken_is_an_operator_error(
    column: str, source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    sink = opened()
    delivered(sink, source.taken())
    source.run(f'ALTER TABLE t ADD COLUMN "{column}" int', "INSERT INTO t VALUES (2, 2)")
    batch = source.taken()
    assert column.lower() in stopped_by(sink.deliver(batch), len(batch)).what
    assert query("SELECT id FROM t", t=root / "public" / "t") == [(1,)]


@pytest.mark.sinks
def test_a_table_that_another_sink_has_written_is_refused(
    source: SlotBatches, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(opened(), batch)
    refused = opened(owner="shop/copy").deliver(batch)
    assert isinstance(refused.error, OperatorError)
    assert "shop/copy has not written" in refused.error.what


@pytest.mark.sinks
def test_a_table_that_is_gone_is_not_restarted_silently(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    sink, place = opened(), root / "public" / "t"
    delivered(sink, source.taken())
    place.rename(root / "away")
    source.run("INSERT INTO t VALUES (2)")
    batch = source.taken()
    assert sink.deliver(batch).settled == 0  # it had the table open
    assert stopped_by(opened().deliver(batch), 1).kind == "table_gone"
    assert not place.exists()
    (root / "away").rename(place)
    delivered(sink, batch, absorbed=1)
    assert query("SELECT id FROM t ORDER BY id", t=place) == [(1,), (2,)]


@pytest.mark.sinks
def test_merged_rows_of_a_table_that_was_renamed_are_not_split_between_two(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (2)",
    )  # fmt: skip
    sink = opened("upsert")
    delivered(sink, source.taken())
    source.run("ALTER TABLE t RENAME TO v", "INSERT INTO v VALUES (3)")
    renamed = source.taken()
    assert stopped_by(sink.deliver(renamed), len(renamed)).kind == "table_renamed"
    (root / "public" / "t").rename(root / "public" / "v")
    sink.close()
    delivered(sink, renamed, absorbed=len(renamed))
    assert query("SELECT id FROM t ORDER BY id", t=root / "public" / "v") == [(1,), (3,)]
    source.run("ALTER TABLE u RENAME TO w", "ALTER TABLE v RENAME TO u", "INSERT INTO u VALUES (4)")
    swapped = source.taken()
    assert stopped_by(sink.deliver(swapped), len(swapped)).kind == "table_renamed"


@pytest.mark.sinks
def test_a_history_is_partitioned_by_the_date_of_the_commit(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    batch = source.taken()
    place = batch.rows.schema.get_field_index("commit_timestamp")
    times = pa.array([1_790_000_000_000_000, 1_790_090_000_000_000], batch.rows.field(place).type)
    rows = batch.rows.set_column(place, batch.rows.schema.field(place), times)
    delivered(opened(), MessageBatch(rows, batch.shape))
    folders = {path.name for path in (root / "public" / "t").glob("walbrook_date=*")}
    assert folders == {"walbrook_date=2026-09-21", "walbrook_date=2026-09-22"}
    assert query("SELECT id, CAST(walbrook_date AS VARCHAR) FROM t ORDER BY 1",
                 t=root / "public" / "t") == [(1, "2026-09-21"), (2, "2026-09-22")]  # fmt: skip


def test_gaps_are_rows_of_a_table_of_their_own(root: Path, opened: Open) -> None:
    batch = plain_batch(0, 1)
    rows = batch.rows.set_column(
        batch.rows.schema.get_field_index("action"), "action", pa.array(["gap"])
    )
    sink, gap = opened(), MessageBatch(rows, batch.shape)
    delivered(sink, gap)
    delivered(sink, gap, absorbed=1)
    found = query("SELECT commit_lsn, commit_idx, gap FROM t", t=root / "_walbrook" / "gaps")
    assert [Cursor(int(str(lsn)), int(str(idx))) for lsn, idx, _ in found] == [gap.cursor(0)]


@pytest.mark.sinks
def test_a_position_outlives_checkpoints_and_the_log_before_them(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(opened(), batch)
    table = DeltaTable(root / "public" / "t")
    table.create_checkpoint()
    for entry in (root / "public" / "t" / "_delta_log").glob("*0.json"):
        entry.unlink()
    delivered(opened(), batch, absorbed=1)


@pytest.mark.sinks
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_tables_in_an_object_store_hold_every_change_once(
    mode: Mode, source: SlotBatches, s3: S3
) -> None:
    options = {
        "AWS_ENDPOINT_URL": f"http://{s3.endpoint}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "eu-central-1",
    }
    url = f"s3://{s3.bucket}/lake"
    source.run(*_EVOLUTION)
    batch = source.taken()
    for start in (0, 2):  # the second sink brings again what the first one had
        sink = LakehouseSink(delta_tables(url, "shop/orders", options), LakeNames(), mode=mode)
        for piece in batch.slice(0, start + 3).slices(2):
            assert sink.deliver(piece).error is None
    delivered(
        LakehouseSink(delta_tables(url, "shop/orders", options), LakeNames(), mode=mode),
        batch.slice(0, 5),
        absorbed=5,
    )
    rows = DeltaTable(f"{url}/public/t", storage_options=options).to_pyarrow_table()
    assert rows.num_rows == (5 if mode == "append" else 2)


@pytest.mark.sinks
def test_a_store_that_refuses_the_account_is_an_operator_error_without_secrets(
    source: SlotBatches, s3: S3
) -> None:
    options = {
        "AWS_ENDPOINT_URL": f"http://{s3.endpoint}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": s3.stranger.key,
        "AWS_SECRET_ACCESS_KEY": s3.stranger.secret,
    }
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    tables = delta_tables(f"s3://{s3.bucket}/lake", "shop/orders", options)
    delivery = LakehouseSink(tables, LakeNames(), mode="append").deliver(source.taken())
    assert isinstance(delivery.error, OperatorError), delivery.error
    assert "storage_options" in delivery.error.fix
    assert s3.stranger.secret not in delivery.error.full_text


def test_a_missing_package_is_reported_by_the_name_of_its_extra() -> None:
    code = (
        "import sys; sys.modules['deltalake'] = None\n"
        "from cdc.config.destination import DeltaDestination\n"
        "from sinks import open_sink\n"
        "open_sink(DeltaDestination(path='x'), consumer='c', batch_size=1)"
    )
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'walbrook[lakehouse]'" in failed.stderr


@pytest.mark.sinks
def test_many_changes_become_files_side_by_side_in_one_commit(
    source: SlotBatches, root: Path, opened: Open
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 85000)",
    )
    sink, batch = opened(), source.taken()
    delivered(sink, batch)
    table = DeltaTable(root / "public" / "t")
    assert (table.version(), len(table.file_uris())) == (1, min(2, os.cpu_count() or 1))
    (found,) = query("SELECT count(*), count(DISTINCT id) FROM t", t=root / "public" / "t")
    assert found == (85_000, 85_000)
    delivered(sink, batch, absorbed=85_000)
