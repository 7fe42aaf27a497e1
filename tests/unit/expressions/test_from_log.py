"""Verdicts by a Spark job are those of the driver, for SQL and for functions, failures included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.decoding.annotations import AnnotationRun
from cdc.errors import TransientError
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from spark_pipeline.expressions import on_executors
from spark_pipeline.expressions.log_range import LogRange
from spark_pipeline.expressions.log_rows import pieces_of
from spark_pipeline.expressions.on_executors import verdicts_on_driver, verdicts_on_executors
from spark_pipeline.slices.exchange import SliceMarker
from spark_pipeline.slices.raw_rows import LogSlice
from tests import pgoutput
from tests.unit.decoding.frames import COMMIT_LSN, OID, Frame, table
from tests.unit.expressions.tables import ORDERS, ORIGIN, consumer, order

FUNCTIONS = "python:tests.unit.expressions.operators_functions"
OTHERS = table(("amount", 1700, True), ("id", 20), ("note", 25), oid=OID + 1).replace(
    b"things\0", b"others\0"
)
ROWS = 300


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three batches of a hundred rows, of two tables in turn; a third of them are annotated."""
    directory = tmp_path_factory.mktemp("log")
    frame = Frame()
    for number in range(ROWS):
        amount = str(number % 7)
        if number % 3:
            frame.add(order(number, amount), ORDERS)
        else:
            frame.add(pgoutput.insert(OID + 1, [amount, str(number), "o"]), OTHERS, oid=OID + 1)
    whole = frame.batch()
    writer = LogWriter(directory)
    for start in range(0, ROWS, 100):
        writer.append(
            whole.slice(start, 100),
            frame.schemas,
            first=Cursor(COMMIT_LSN, start),
            high=Cursor(COMMIT_LSN, start + 100),
            annotations=[AnnotationRun(10, 43, b'{"n":%d}' % start)],
        )
    writer.close()
    return directory


def pieces(log: Path) -> list[LogSlice]:
    first = LogView(log).first_batch()
    return [
        LogSlice(first, 0, 60),
        LogSlice(first, 60, 100),
        LogSlice(first + 1, 0, 100),
        LogSlice(first + 2, 0, 90),
    ]


def stretch(sink: SinkConfig, log: Path, since: int = 0) -> LogRange:
    return LogRange(sink, ORIGIN, log, None, pieces(log), Cursor(COMMIT_LSN, since))


def by_job(
    spark: SparkSession, sink: SinkConfig, log: Path, since: int = 0
) -> list[dict[str, Any]]:
    found = verdicts_on_executors(spark, stretch(sink, log, since))
    found.validate(full=True)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def by_driver(spark: SparkSession, sink: SinkConfig, log: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = verdicts_on_driver(spark, stretch(sink, log)).to_pylist()
    return rows


@pytest.mark.parametrize(
    "given",
    [
        {"filter": "record.amount > 2"},
        {
            "filter": "record.amount > 2",
            "transform": "struct(record.id, metadata.table_name, metadata.transaction_annotations)",
            "routing": "concat('s.', record.note)",
        },
        {"filter": f"{FUNCTIONS}:large"},
        {"filter": "record.amount <> 0", "transform": f"{FUNCTIONS}:fails_on_zero"},
        {"transform": f"{FUNCTIONS}:summary", "routing": "if(record.amount > 3, 'a', null)"},
        {"filter": "record.id < 200 OR 10 div record.amount > 1"},
        {"filter": "record.id < 20", "transform": f"{FUNCTIONS}:fails_on_zero"},
        {"filter": "record.amount > 2", "source": {"include_tables": ["public.others"]}},
        {"filter": "record.amount > 2", "actions": ["delete"]},
    ],
    ids=str,
)
def test_a_job_and_the_driver_say_the_same(
    spark: SparkSession, log: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = consumer(**given)
    with monkeypatch.context() as patched:
        if "div" not in str(given):
            patched.delattr(on_executors, "verdicts_on_driver")  # it is the job that answers
        found = by_job(spark, sink, log)
    assert found == by_driver(spark, sink, log)
    if "actions" not in given:
        assert [row["commit_idx"] for row in found] == [
            n for n in range(290) if n % 3 == 0 or "source" not in given
        ]


def test_a_row_that_fails_is_found_after_the_job_failed(spark: SparkSession, log: Path) -> None:
    sink = consumer(filter="record.id < 250 OR 10 div record.amount > 1")
    bad = [row["commit_idx"] for row in by_job(spark, sink, log) if row["error"]]
    assert bad == [n for n in range(250, 290) if n % 7 == 0]


def test_too_many_rows_that_fail_hold_the_consumer_up(spark: SparkSession, log: Path) -> None:
    with pytest.raises(TransientError, match="fail on more than 100 changes"):
        by_job(spark, consumer(filter="1 div (record.id - record.id) > 1"), log)


def test_only_what_a_consumer_lacks_is_judged(spark: SparkSession, log: Path) -> None:
    found = by_job(spark, consumer(filter="record.amount > 2"), log, since=270)
    assert [row["commit_idx"] for row in found] == list(range(270, 290))


def test_slices_of_a_micro_batch_are_pieces_of_the_log() -> None:
    def marker(batch_idx: int, part: int, rows: int) -> SliceMarker:
        return SliceMarker(0, 9, batch_idx, part, 2, rows, Cursor(1, 0), 0, "", 0, 0)

    slices = [marker(4, 0, 60), marker(4, 1, 40), marker(5, 0, 0), marker(6, 0, 7)]
    assert pieces_of(slices) == [LogSlice(4, 0, 60), LogSlice(4, 60, 100), LogSlice(6, 0, 7)]


def test_no_table_that_is_taken_means_no_verdicts(spark: SparkSession, log: Path) -> None:
    sink = consumer(filter="true", source={"include_schemas": ["elsewhere"]})
    assert by_job(spark, sink, log) == []
