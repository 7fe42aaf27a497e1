"""``spark.readStream.format("walbrook")`` in somebody's own Spark job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from cdc.cursor import Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.log.flight.server import LogServer
from cdc.log.flight.wire import TOKEN_VARIABLE
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.replication.wire.seal import Sealer
from tests import pgoutput
from tests.unit.replication.annotated import set_annotation
from tests.wire_messages import transaction, wire

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
TRANSACTIONS, ROWS, ANNOTATED = 40, 250, 100


@pytest.fixture(scope="module")
def token() -> Iterator[str]:
    """In the environment, where Spark's Python processes find it: they are started with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, "a token of this test run")
        yield "a token of this test run"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 40 transactions of 250 rows and a batch without any, in several segments.

    One row of each transaction is the message that annotates those behind it.
    """
    directory = tmp_path_factory.mktemp("log")
    writer, sealer = LogWriter(directory, limits=SegmentLimits(bytes=100_000)), Sealer()
    sealer.seal(wire(ITEM, *transaction(1)))
    for number in range(1, TRANSACTIONS + 1):
        rows = [pgoutput.insert(1, [str(number * 1000 + i), "n"]) for i in range(ROWS)]
        rows[ANNOTATED] = set_annotation(b'{"number":%d}' % number)
        sealed = sealer.seal(wire(*transaction(number * 100, *rows)))
        assert sealed is not None
        writer.append(
            sealed.raw,
            sealed.schemas,
            first=sealed.first,
            high=sealed.high,
            annotations=sealed.annotations,
        )
    end = Cursor(TRANSACTIONS * 100 + 50, 0)
    writer.append(pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA), {}, first=end, high=end)
    writer.close()
    return directory


@pytest.fixture(scope="module", params=["mapped", pytest.param("served", marks=pytest.mark.sinks)])
def path(request: pytest.FixtureRequest, log: Path, token: str) -> Iterator[str]:
    """The log as an executor on this machine, and as one on another would read it."""
    if request.param == "mapped":
        yield str(log)
        return
    server = LogServer({"shop": log}, token=token)
    yield f"grpc://127.0.0.1:{server.port}/shop"
    assert server.close(10)


def read_all(spark: SparkSession, path: str, checkpoint: Path, **options: str) -> list[Row]:
    """Everything the stream gives until it has caught up."""
    collected: list[Row] = []

    def take(frame: DataFrame, _batch: int) -> None:
        collected.extend(frame.collect())

    stream = spark.readStream.format("walbrook").option("path", path).options(**options)
    query = (
        stream.load()
        .writeStream.option("checkpointLocation", str(checkpoint))
        .foreachBatch(take)
        .start()
    )
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return collected


def test_every_change_is_read_once_with_its_columns(
    spark: SparkSession, path: str, tmp_path: Path
) -> None:
    rows = read_all(spark, path, tmp_path, maxRows="3000")
    cursors = [(row.commit_lsn, row.commit_idx) for row in rows]
    assert sorted(cursors) == [
        (n * 100, i) for n in range(1, TRANSACTIONS + 1) for i in range(ROWS)
    ]
    first = rows[cursors.index((100, 0))]
    assert (first.table_schema, first.table_name, first.action) == ("public", "item", "insert")
    assert first.record == '{"id":1000,"name":"n"}'
    assert (first.record_pks, first.xid) == ('["1000"]', 101)
    for row in rows:
        said = f'{{"number":{row.commit_lsn // 100}}}' if row.commit_idx > ANNOTATED else None
        assert row.annotations == said


def test_a_stream_starts_at_a_cursor(spark: SparkSession, path: str, tmp_path: Path) -> None:
    rows = read_all(spark, path, tmp_path, startingCursor=str(Cursor(3900, 0)))
    assert {row.commit_lsn for row in rows} == {3900, 4000}


def test_a_query_to_what_is_there_now_takes_it_in_bounded_steps_and_ends(
    spark: SparkSession, path: str, tmp_path: Path
) -> None:
    sizes: list[int] = []

    def take(frame: DataFrame, _batch: int) -> None:
        sizes.append(frame.count())

    stream = spark.readStream.format("walbrook").option("path", path).option("maxRows", 4000)
    for _ in range(2):  # the second finds nothing left
        query = (
            stream.load()
            .writeStream.trigger(availableNow=True)
            .option("checkpointLocation", str(tmp_path))
            .foreachBatch(take)
            .start()
        )
        assert query.awaitTermination(120)
        assert query.exception() is None
        assert sizes == [4000, 4000, TRANSACTIONS * ROWS - 8000]


def test_a_range_is_read_at_once_from_one_cursor_to_another(spark: SparkSession, path: str) -> None:
    changes = spark.read.format("walbrook").option("path", path)
    assert changes.load().count() == TRANSACTIONS * ROWS
    some = changes.options(startingCursor="0/C8:240", endingCursor="0/12C:3").load()
    cursors = [(row.commit_lsn, row.commit_idx) for row in some.collect()]
    assert sorted(cursors) == [(200, n) for n in range(240, ROWS)] + [(300, n) for n in range(3)]
    assert changes.options(startingCursor="latest", endingCursor="latest").load().count() == 0


def test_one_table_is_read_with_typed_columns(spark: SparkSession, path: str) -> None:
    source = spark.read.format("walbrook").option("path", path).option("table", "public.item")
    items = source.load()
    assert items.schema["record"].dataType.simpleString() == "struct<id:int,name:string>"
    (found,) = items.selectExpr(
        "count(*) AS n", "sum(record.id) AS ids", "max(error) AS e"
    ).collect()
    ids = [n * 1000 + i for n in range(1, TRANSACTIONS + 1) for i in range(ROWS) if i != ANNOTATED]
    assert (found.n, found.ids, found.e) == (len(ids), sum(ids), None)
    row = "struct<id: bigint, gone: date>"
    own = (
        "commit_lsn bigint, commit_idx bigint, commit_timestamp timestamp, xid bigint, "
        f"action string, record {row}, before {row}, unchanged array<string>, error string"
    )
    as_said = source.schema(own).load().where("commit_idx = 0")
    assert as_said.schema["record"].dataType.simpleString() == "struct<id:bigint,gone:date>"
    assert {row.record.id for row in as_said.collect()} == {
        n * 1000 for n in range(1, TRANSACTIONS + 1)
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"oath": "x"}, "has no option 'oath'. To fix it: write path"),
        ({"path": ""}, "was given no path"),
        ({"table": "public.itm"}, "write public.item"),
        ({"endingCursor": "0/1:1"}, "a stream has no end"),
        ({"startingCursor": "0/0:0", "path": "/nothing/here"}, "there is no log at"),
    ],
)
def test_wrong_options_are_refused_with_the_right_ones(
    spark: SparkSession, log: Path, tmp_path: Path, options: dict[str, str], says: str
) -> None:
    stream = spark.readStream.format("walbrook").options(**{"path": str(log)} | options)
    with pytest.raises(PySparkException, match=re.escape(says)):
        stream.load().writeStream.option("checkpointLocation", str(tmp_path)).format(
            "noop"
        ).start().processAllAvailable()


def test_a_schema_of_other_columns_is_refused(spark: SparkSession, log: Path) -> None:
    changes = spark.read.format("walbrook").option("path", str(log)).schema("id int")
    with pytest.raises(PySparkException, match="does not have the columns of the source"):
        changes.load().count()
