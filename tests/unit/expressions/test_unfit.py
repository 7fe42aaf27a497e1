"""A table version that does not fit: what comes before it goes out, and nothing after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from pyspark.sql import SparkSession

from cdc.cursor import ORIGIN as BEGINNING
from cdc.cursor import Cursor
from cdc.decoding.format import PLAIN
from cdc.errors import ExpressionError
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from spark_pipeline.delivery.deliver import Share
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.expressions.for_share import judge
from spark_pipeline.expressions.log_range import LogRange
from spark_pipeline.expressions.log_rows import pieces_of
from spark_pipeline.expressions.on_executors import verdicts_on_driver, verdicts_on_executors
from spark_pipeline.feed.plan import DriverPlan
from spark_pipeline.slices.exchange import Exchange, PlannedRange
from spark_pipeline.source.options import driver_options
from spark_pipeline.source.range_reader import RangeReader
from tests import pgoutput
from tests.unit.decoding.frames import COMMIT_LSN, OID, Frame, table
from tests.unit.expressions.tables import ORDERS, ORIGIN, consumer, order

SHORT = table(("id", 20, True), ("note", 25))
UNFIT = r"transform of consumer orders cannot be used on table public\.things: .*`amount`"


def at(idx: int) -> Cursor:
    return Cursor(COMMIT_LSN, idx)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Orders 0 to 5 in two batches; order 3 has no amount."""
    frame = Frame()
    for number in range(6):
        if number == 3:
            frame.add(pgoutput.insert(OID, [str(number), "n"]), SHORT)
        else:
            frame.add(order(number, "7"), ORDERS)
    writer = LogWriter(tmp_path / "log")
    for start, end in ((0, 2), (2, 6)):
        rows = frame.batch().slice(start, end - start)
        writer.append(rows, frame.schemas, first=at(start), high=at(end))
    writer.close()
    return tmp_path / "log"


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Exchange]:
    made = Exchange.create(tmp_path / "exchange")
    yield made
    made.remove()


def deliver(share: Share, plan: DriverPlan, spark: SparkSession, exchange: Exchange) -> Outcome:
    """What a worker does with a range."""
    judged = judge(spark, share, Path(share.run), None, exchange.directory)
    outcome = plan.deliver(judged)
    return replace(outcome, error=outcome.error or judged.stop_reason)


@pytest.fixture
def plan(log: Path) -> Iterator[DriverPlan]:
    """All of the log."""
    view = LogView(log)
    with closing(RangeReader(driver_options(log, PLAIN))) as reader:
        yield DriverPlan(reader, PlannedRange(0, view.next_batch(), 6), view.history())


def share_of(log: Path, plan: DriverPlan, start: Cursor = BEGINNING) -> Share:
    """The log from ``start`` on for a consumer whose transform needs amounts."""
    destination = {"type": "file", "path": str(log.parent / "out")}
    sink = consumer(destination, transform="struct(record.id, 14 / record.amount AS half)")
    return Share(sink, ORIGIN, str(log), start, at(6), plan.decode())


def sent(log: Path) -> list[int]:
    files = sorted((log.parent / "out").glob("*.jsonl"))
    return [orjson.loads(line)["id"] for f in files for line in f.read_bytes().splitlines()]


def test_changes_before_an_unfit_table_go_out_and_the_consumer_stops_there(
    spark: SparkSession, log: Path, plan: DriverPlan, exchange: Exchange
) -> None:
    outcome = deliver(share_of(log, plan), plan, spark, exchange)
    assert (outcome.cursor, outcome.delivered) == (at(3), 3)
    assert sent(log) == [0, 1, 2]
    assert isinstance(outcome.error, ExpressionError)
    assert outcome.error.fix.startswith("correct it in the configuration")
    with pytest.raises(ExpressionError, match=UNFIT):
        raise outcome.error


def test_a_consumer_that_stands_at_an_unfit_table_gets_nothing(
    spark: SparkSession, log: Path, plan: DriverPlan, exchange: Exchange
) -> None:
    with pytest.raises(ExpressionError, match=UNFIT):
        deliver(share_of(log, plan, start=at(3)), plan, spark, exchange)
    assert sent(log) == []


def test_a_consumer_past_an_unfit_table_is_not_held_back_on_driver_or_executors(
    spark: SparkSession, log: Path, plan: DriverPlan, exchange: Exchange
) -> None:
    share = share_of(log, plan)
    pieces = pieces_of(share.slices)
    stretch = LogRange(share.consumer, ORIGIN, log, None, pieces, since=at(4))
    here, by_job = verdicts_on_driver(spark, stretch), verdicts_on_executors(spark, stretch)
    assert here.column("commit_idx").to_pylist() == [4, 5]
    assert by_job.equals(here)
    before = replace(stretch, since=BEGINNING, until=at(3))
    assert verdicts_on_executors(spark, before).column("commit_idx").to_pylist() == [0, 1, 2]
