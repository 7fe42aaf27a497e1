"""Tables of every format of a lake, with changes of a real source, read by DuckDB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.errors import PoisonError
from sinks.lakehouse.names import GAPS
from tests.conformance.messages import batch as plain_batch
from tests.fix_postgres import Database
from tests.lake_checks import EVOLUTION, UNLIKE, T, delivered, stopped_by
from tests.lakes import Lake
from tests.slot_batches import SlotBatches

FURTHER = pytest.mark.sinks
HISTORIES = ("delta append", "iceberg append")
MERGED = (
    "delta copy_on_write", "iceberg merge_on_read",
    pytest.param("iceberg copy_on_write", marks=FURTHER),
)  # fmt: skip
SIZES = (pytest.param(1, marks=FURTHER), pytest.param(3, marks=FURTHER), 1000)


@pytest.fixture
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", request.param)


@pytest.mark.parametrize("lake", MERGED, indirect=True)
@pytest.mark.parametrize("size", SIZES, ids="batches_of_{}".format)
def test_a_merged_table_follows_new_dropped_renamed_and_widened_columns(
    size: int, lake: Lake, source: SlotBatches
) -> None:
    source.run(*EVOLUTION)
    sink, batch = lake.sink(), source.taken()
    for piece in batch.slices(size):
        delivered(sink, piece)
    assert lake.columns() == [
        ("id", "INTEGER"), ("a", "BIGINT"), ("label", "VARCHAR"), ("small", "INTEGER"),
        ("c", "DATE"),
    ]  # fmt: skip
    assert lake.rows("SELECT * FROM t ORDER BY id") == [
        (1, 10, "uno", 70000, None),
        (3, 3_000_000_000, "three", None, None),
    ]
    delivered(sink, batch, absorbed=len(batch))


@FURTHER
@pytest.mark.parametrize("lake", HISTORIES, indirect=True)
@pytest.mark.parametrize("size", [1, 3, 1000], ids="batches_of_{}".format)
def test_a_history_keeps_dropped_columns_and_gains_the_others(
    size: int, lake: Lake, source: SlotBatches
) -> None:
    source.run(*EVOLUTION)
    sink = lake.sink()
    for piece in source.taken().slices(size):
        delivered(sink, piece)
    found = lake.rows(
        "SELECT walbrook_action, id, a, label, gone, small, CAST(c AS VARCHAR) FROM t "
        "ORDER BY walbrook_lsn"
    )
    assert found == [
        ("insert", 1, 10, "one", "x", 1, None),
        ("insert", 2, 20, "two", "y", 2, "2026-01-01"),
        ("update", 1, 10, "uno", None, 1, None),
        ("insert", 3, 3_000_000_000, "three", None, None, None),
        ("delete", 2, None, None, None, None, None),
        ("update", 1, 10, "uno", None, 70000, None),
    ]


@FURTHER
@pytest.mark.parametrize("lake", HISTORIES, indirect=True)
@pytest.mark.parametrize("size", [1, 1000], ids="batches_of_{}".format)
def test_a_dropped_column_of_a_history_is_not_taken_for_a_new_one(
    size: int, lake: Lake, source: SlotBatches
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
    sink, batch = lake.sink(), source.taken()
    for piece in batch.slices(size):
        delivered(sink, piece)
    delivered(lake.sink(), batch, absorbed=len(batch))
    assert lake.rows("SELECT id, gone_2, other, gone FROM t ORDER BY id") == [
        (1, "old", None, None),
        (2, None, None, None),
        (3, None, "new", None),
        (4, None, "newer", 7),
    ]


@FURTHER
@pytest.mark.parametrize("lake", HISTORIES, indirect=True)
def test_a_column_of_a_history_that_cannot_be_widened_becomes_text(
    lake: Lake, source: SlotBatches
) -> None:
    source.run(*UNLIKE)
    delivered(lake.sink(), source.taken())
    found = lake.rows("SELECT id, noon FROM t ORDER BY id")
    assert found == [(1, "2026-01-02 03:04:05.000000"), (2, "later"), (3, "7")]


@FURTHER
@pytest.mark.parametrize("lake", MERGED, indirect=True)
def test_a_merged_table_whose_column_cannot_be_widened_stops_alone_and_its_error_names_it(
    lake: Lake, source: SlotBatches
) -> None:
    source.run("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)", *UNLIKE)
    batch = source.taken()
    stopped = stopped_by(lake.sink().deliver(batch), len(batch))
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


@pytest.mark.parametrize("lake", [*HISTORIES, *MERGED], indirect=True)
def test_values_of_every_type_arrive_with_their_own_columns(
    lake: Lake, source: SlotBatches
) -> None:
    members = ", ".join(f"c{at} {kind}" for at, kind in enumerate(_VALUES))
    source.run(
        "CREATE TYPE pair AS (n smallint, label text)",
        f'CREATE TABLE "Odd ""t" (id int PRIMARY KEY, {members}, eternal date)',
        f'INSERT INTO "Odd ""t" VALUES (1, {", ".join(_VALUES.values())}, \'infinity\')',
        'INSERT INTO "Odd ""t" (id) VALUES (2)',
    )
    sink = lake.sink()
    delivered(sink, source.taken())
    source.run("""UPDATE "Odd ""t" SET c0 = NOT c0""")
    delivered(sink, source.taken())
    names = ", ".join(f"c{at}" for at in range(len(_VALUES)))
    newest = "" if lake.is_merged else "WHERE walbrook_action = 'update' "
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
        (1 if lake.is_merged else 2,)
    ]


@FURTHER
@pytest.mark.parametrize("lake", [*HISTORIES, "parquet append"], indirect=True)
def test_a_value_that_no_arrow_type_holds_is_refused_alone_and_quoted_nowhere(
    lake: Lake, source: SlotBatches
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n numeric(4,1))")
    for number in ("1", "2", "'NaN'", "4"):
        source.run(f"INSERT INTO t SELECT coalesce(max(id), 0) + 1, {number} FROM t")
    batch, sink = source.taken(), lake.sink()
    delivery = sink.deliver(batch)
    assert delivery.settled == 2
    assert isinstance(delivery.error, PoisonError)
    assert "column n of public.t" in delivery.error.what
    assert "NaN" not in str(delivery.error)
    delivered(sink, batch.slice(3))
    assert lake.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,), (4,)]


@pytest.mark.parametrize("lake", MERGED, indirect=True)
def test_key_changes_truncates_and_unchanged_values_are_merged(
    lake: Lake, source: SlotBatches, database: Database
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT g, g, repeat(g::text, 3000) FROM generate_series(1, 20) g",
    )
    sink = lake.sink()
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


@FURTHER
@pytest.mark.parametrize("lake", ["delta copy_on_write", "iceberg copy_on_write"], indirect=True)
def test_only_files_that_may_hold_a_touched_key_are_rewritten(
    lake: Lake, source: SlotBatches
) -> None:
    def files() -> set[str]:
        table = lake.tables()(T)
        table.load()
        return {file.path for file in table.files()}

    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    sink = lake.sink()
    for start in range(0, 500, 100):
        source.run(f"INSERT INTO t SELECT g, g FROM generate_series({start}, {start + 99}) g")
        delivered(sink, source.taken())
    before = files()
    source.run("UPDATE t SET n = -1 WHERE id = 250")
    delivered(sink, source.taken())
    assert (len(before - files()), len(files() - before)) == (1, 1)
    assert lake.rows("SELECT id FROM t WHERE n = -1") == [(250,)]


@pytest.mark.parametrize("lake", MERGED[:2], indirect=True)
def test_a_table_without_a_key_is_refused_by_upsert_and_has_a_history(
    lake: Lake, source: SlotBatches
) -> None:
    source.run(
        "CREATE TABLE bag (x int)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag VALUES (1), (1)",
        "UPDATE bag SET x = 2",
    )
    batch = source.taken()
    assert "mode: append" in stopped_by(lake.sink().deliver(batch), len(batch)).fix
    history = Lake.of(lake.root, f"{lake.kind} append")
    delivered(history.sink(), batch, absorbed=len(batch))
    assert len(history.rows("SELECT x FROM bag", "bag")) == 4


@FURTHER
@pytest.mark.parametrize("lake", HISTORIES, indirect=True)
@pytest.mark.parametrize("column", ["ID", "Walbrook_action"])
def test_a_column_whose_name_is_taken_is_an_operator_error(
    column: str, lake: Lake, source: SlotBatches
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    sink = lake.sink()
    delivered(sink, source.taken())
    source.run(f'ALTER TABLE t ADD COLUMN "{column}" int', "INSERT INTO t VALUES (2, 2)")
    batch = source.taken()
    assert column.lower() in stopped_by(sink.deliver(batch), len(batch)).what
    assert lake.rows("SELECT id FROM t") == [(1,)]


@FURTHER
@pytest.mark.parametrize("lake", [*HISTORIES, "parquet append"], indirect=True)
def test_a_table_that_another_sink_has_written_is_refused(lake: Lake, source: SlotBatches) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(lake.sink(), batch)
    delivery = Lake.of(lake.root, f"{lake.kind} append", "shop/copy").sink().deliver(batch)
    if lake.kind == "iceberg":  # what a consumer keeps for itself is in a namespace of its own
        assert "shop/copy has not written" in stopped_by(delivery, len(batch)).what
    else:
        assert delivery.error is not None
        assert delivery.settled == 0
        assert "shop/copy" in delivery.error.what


@FURTHER
@pytest.mark.parametrize("lake", [*HISTORIES, "parquet append"], indirect=True)
def test_a_history_is_partitioned_by_the_date_of_the_commit(
    lake: Lake, source: SlotBatches
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    batch = source.taken()
    place = batch.rows.schema.get_field_index("commit_timestamp")
    times = pa.array([1_790_000_000_000_000, 1_790_090_000_000_000], batch.rows.field(place).type)
    rows = batch.rows.set_column(place, batch.rows.schema.field(place), times)
    delivered(lake.sink(), MessageBatch(rows, batch.shape))
    table = lake.tables()(T)
    table.load()
    assert len({file.partition["walbrook_date"] for file in table.files()}) == 2
    assert lake.rows("SELECT id FROM t WHERE walbrook_date = '2026-09-22'") == [(2,)]
    dates = lake.rows("SELECT id, CAST(walbrook_date AS VARCHAR) FROM t ORDER BY 1")
    assert dates == [(1, "2026-09-21"), (2, "2026-09-22")]


@pytest.mark.parametrize("lake", [*HISTORIES, "parquet append"], indirect=True)
def test_gaps_are_rows_of_a_table_of_their_own(lake: Lake) -> None:
    batch = plain_batch(0, 1)
    rows = batch.rows.set_column(
        batch.rows.schema.get_field_index("action"), "action", pa.array(["gap"])
    )
    sink, gap = lake.sink(), MessageBatch(rows, batch.shape)
    delivered(sink, gap)
    delivered(sink, gap, absorbed=1)
    table = lake.tables()(GAPS)
    table.load()
    (noted,) = [row for file in table.files() for row in table.read(file).to_pylist()]
    assert Cursor(noted["commit_lsn"], noted["commit_idx"]) == gap.cursor(0)


@pytest.mark.parametrize(
    ("package", "destination"),
    [("deltalake", "DeltaDestination"), ("pyiceberg", "IcebergDestination")],
)
def test_a_missing_package_is_named_with_its_extra(package: str, destination: str) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None\n"
        f"from cdc.config.destination import {destination}\n"
        "from sinks import open_sink\n"
        f"open_sink({destination}(path='x'), consumer='c', batch_size=1)"
    )
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'walbrook[lakehouse]'" in failed.stderr
