"""What one micro-batch takes of the log, and where a job may begin: answered without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
)

from cdc.cursor import Cursor
from cdc.errors import ConfigError, GapError
from cdc.log.retention import Retention
from spark_pipeline.slices.exchange import Exchange
from spark_pipeline.source import stream as stream_module
from spark_pipeline.source.options import Options
from spark_pipeline.source.stream import LogStreamReader
from tests import pgoutput
from tests.wire_messages import transaction
from tests.written_log import SMALL, WrittenLog

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
BATCHES, ROWS = 20, 100


def fill(log: WrittenLog, first: int = 1, count: int = BATCHES) -> None:
    rows = [pgoutput.insert(1, [str(n), "x" * 50]) for n in range(ROWS)]
    for number in range(first, first + count):
        log.append(ITEM, *transaction(number * 1000, *rows))


@pytest.fixture
def log(tmp_path: Path) -> WrittenLog:
    written = WrittenLog(tmp_path)
    fill(written)
    return written


def reader(log: WrittenLog, **given: str) -> LogStreamReader:
    return LogStreamReader(Options.read({"path": str(log.directory)} | given))


def taken(stream: LogStreamReader, limit: ReadLimit) -> int:
    start = stream.initialOffset()
    return int(stream.latestOffset(start, limit)["batch"]) - int(start["batch"])


def test_options_and_the_limit_of_spark_bound_a_micro_batch_together(log: WrittenLog) -> None:
    of_options = reader(log, maxRows="700")
    assert of_options.getDefaultReadLimit() == ReadMaxRows(700)
    assert taken(of_options, of_options.getDefaultReadLimit()) == 7
    assert taken(reader(log), ReadMaxRows(550)) == 5
    assert taken(reader(log, maxRows="300"), ReadMaxRows(550)) == 3
    size = int(log.writer.size_bytes / BATCHES)
    assert taken(reader(log), ReadMaxBytes(int(4.5 * size))) == 4
    assert taken(reader(log, maxBytes=str(int(2.5 * size))), ReadMaxRows(1000)) == 2
    assert taken(reader(log, maxRows="1"), ReadAllAvailable()) == BATCHES


@pytest.mark.parametrize("limit", [ReadMaxRows(0), ReadMaxRows(1), ReadMaxBytes(1)])
def test_at_least_one_batch_is_taken(log: WrittenLog, limit: ReadLimit) -> None:
    assert taken(reader(log), limit) == 1


def test_the_drivers_note_of_pressure_lets_micro_batches_take_longer(
    log: WrittenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(log, first=100, count=100)
    now = 0.0
    monkeypatch.setattr(stream_module, "_now_s", lambda: now)
    exchange = Exchange(tmp_path)
    stream = reader(log, maxRows="8000", targetMs="1000", exchange=str(tmp_path))
    at, sizes = stream.initialOffset(), []
    for by in (1.0, 2.0, 4.0, 1.0):
        start, at = at, stream.latestOffset(at, stream.getDefaultReadLimit())
        sizes.append(at["batch"] - start["batch"])
        now += 2.0
        exchange.widen(by)
    assert sizes == [20, 10, 10, 20]


def test_micro_batches_that_take_too_long_become_smaller(
    log: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(log, first=100, count=100)
    now = 0.0
    monkeypatch.setattr(stream_module, "_now_s", lambda: now)
    stream = reader(log, maxRows="8000", targetMs="1000")
    at, sizes = stream.initialOffset(), []
    for took_s in (2.0, 2.0, 0.5, 0.5, 1.0):
        start, at = at, stream.latestOffset(at, stream.getDefaultReadLimit())
        sizes.append(at["batch"] - start["batch"])
        now += took_s
    assert sizes == [20, 10, 10, 20, 40]


def test_a_query_to_what_is_there_now_stops_at_it_though_more_comes(log: WrittenLog) -> None:
    stream = reader(log, maxRows="1500")
    stream.prepareForTriggerAvailableNow()
    fill(log, first=100)
    limit = stream.getDefaultReadLimit()
    ends = [stream.initialOffset()]
    for _ in range(4):
        ends.append(stream.latestOffset(ends[-1], limit))
    assert [end["batch"] for end in ends] == [0, 15, BATCHES, BATCHES, BATCHES]


def test_a_query_to_what_is_there_now_refuses_a_checkpoint_of_another_history(
    log: WrittenLog,
) -> None:
    start = {"batch": BATCHES, "history": log.writer.manifest.history}
    log.writer.restart_at(Cursor(10**6, 0))
    stream = reader(log)
    stream.prepareForTriggerAvailableNow()
    with pytest.raises(GapError, match="was cut or restarted"):
        stream.latestOffset(start, ReadMaxRows(10))


def test_batches_removed_before_they_were_read_are_reported(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path, SMALL)
    fill(log)
    stream = reader(log, maxRows="300")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(300))
    (partition,) = stream.partitions(start, end)
    log.writer.retain(Cursor(BATCHES * 1000, 0), Retention(0, 0, 1 << 30))
    assert log.writer.manifest.first_batch > end["batch"]
    fresh = reader(log)
    for read in (
        lambda: fresh.latestOffset(end, ReadMaxRows(300)),
        lambda: fresh.partitions(start, end),
        lambda: list(fresh.read(partition)),
        lambda: reader(log, startingCursor="0/3E8:0").initialOffset(),
    ):
        with pytest.raises(GapError, match="removed before this job read them") as told:
            read()
        assert "log.retain_s" in told.value.fix
    earliest = str(log.writer.manifest.earliest)
    assert reader(log, startingCursor=earliest).initialOffset()["batch"] > 0


def test_a_place_without_a_log_is_refused(tmp_path: Path) -> None:
    stream = LogStreamReader(Options.read({"path": str(tmp_path / "nothing")}))
    with pytest.raises(ConfigError, match="there is no log at"):
        stream.initialOffset()


def test_small_ranges_are_one_task_and_large_ones_several(log: WrittenLog) -> None:
    fill(log, first=100, count=200)
    stream = reader(log, partitions="3", maxRows="100000")
    start = stream.initialOffset()
    small = stream.latestOffset(start, ReadMaxRows(1000))
    assert len(stream.partitions(start, small)) == 1
    assert len(stream.partitions(start, stream.latestOffset(start, ReadAllAvailable()))) == 3
    assert list(stream.partitions(small, small)) == []
