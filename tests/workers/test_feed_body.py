"""The body of a micro-batch: it follows the log beyond its planned range, in the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.connection import Connection
from spark_pipeline.feed import body as body_module
from spark_pipeline.slices.exchange import Overrun, PlannedRange, followed, note_planned
from spark_pipeline.source.range_reader import LogPartition
from spark_pipeline.source.stream import LogStreamReader
from tests import pgoutput
from tests.log_pipeline import LogPipeline, arrived
from tests.waiting import until
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])


def write(pipeline: LogPipeline, number: int, rows: int = 1) -> None:
    inserts = [pgoutput.insert(1, [str(number * 10_000 + row)]) for row in range(rows)]
    pipeline.write(ITEM, *transaction(0x1000 * number, *inserts))


def ids(directory: Path) -> list[int]:
    return [message["record"]["id"] // 10_000 for message in arrived(directory)]


@contextmanager
def running(pipeline: LogPipeline) -> Iterator[threading.Thread]:
    """The body of a micro-batch without a planned range, and the workers, each in a thread."""
    body = threading.Thread(target=pipeline.body.take, args=(None, 0))
    settler = threading.Thread(target=pipeline.settler.run)
    workers = [threading.Thread(target=worker.run) for worker in pipeline.workers.values()]
    for thread in (body, settler, *workers):
        thread.start()
    try:
        yield body
    finally:
        pipeline.context.ended.set()
        for worker in pipeline.workers.values():
            worker.nudge()
        for thread in (body, *workers):
            thread.join(10)
            assert not thread.is_alive()
        pipeline.settler.close()
        settler.join(10)


def test_batches_written_during_a_micro_batch_are_decoded_by_it_until_the_stage_ends(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, all={})
    with running(pipeline) as body:
        for number in range(1, 6):
            write(pipeline, number)
            until("the change", lambda: len(arrived(tmp_path / "all")) == number)  # noqa: B023
        assert ids(tmp_path / "all") == [1, 2, 3, 4, 5]
        assert body.is_alive()
    assert pipeline.body.failure is None
    assert followed(str(pipeline.exchange.directory)).batch == pipeline.log.next_batch
    pipeline.close()


def test_control_goes_back_to_spark_when_more_has_come_than_the_driver_should_do(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, one={}, two={})
    pipeline.settings = replace(pipeline.settings, driver_rows=20)  # for two consumers: 10 rows
    pipeline.start_pipeline_again()
    for name, worker in pipeline.workers.items():
        assert pipeline.feed.join(name, pipeline.feed.history, worker.batch)
    write(pipeline, 1, rows=10)
    write(pipeline, 2, rows=10)
    pipeline.body.take(None, 0)
    assert (pipeline.body.failure, pipeline.next_batch) == (None, 0)
    pipeline.take(1)
    with running(pipeline):
        until("what fits to be decoded here", lambda: pipeline.next_batch == 2)
    pipeline.close()


def test_batches_that_no_worker_needs_are_passed_over(state: Connection, tmp_path: Path) -> None:
    pipeline = LogPipeline(state, tmp_path, all={})
    write(pipeline, 1)
    pipeline.feed.leave("all")
    pipeline.body.take_range(PlannedRange(0, 1, 1))
    assert (pipeline.next_batch, pipeline.feed.depth.ranges) == (1, 0)
    pipeline.take()
    assert ids(tmp_path / "all") == [1], "the worker reads the log itself"
    pipeline.close()


def test_the_note_of_an_earlier_micro_batch_does_not_move_the_feed_back(
    state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "_FOLLOWS_S", 0.0)
    pipeline = LogPipeline(state, tmp_path, all={})
    for number in (1, 2, 3):
        write(pipeline, number)
    note_planned(pipeline.exchange.directory, PlannedRange(0, 1, 1))
    pipeline.take()
    assert pipeline.next_batch == 3
    pipeline.body.take(None, 0)  # an empty micro-batch has no note of its own
    assert (pipeline.body.failure, pipeline.next_batch) == (None, 3)
    pipeline.close()


def test_control_goes_back_to_spark_after_a_bounded_time(
    state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "_FOLLOWS_S", 0.3)
    pipeline = LogPipeline(state, tmp_path, all={})
    pipeline.body.take(None, 0)
    assert pipeline.body.failure is None
    assert 0.3 <= followed(str(pipeline.exchange.directory)).spent_s < 5
    pipeline.close()


def test_a_failure_while_following_is_kept_for_the_query(state: Connection, tmp_path: Path) -> None:
    pipeline = LogPipeline(state, tmp_path, all={})
    assert pipeline.feed.join("all", pipeline.feed.history, 0)
    write(pipeline, 1)
    for file in (tmp_path / "log").glob("*.seg*"):
        file.write_bytes(b"")
    pipeline.body.take(None, 0)
    assert pipeline.body.failure is not None
    assert followed(str(pipeline.exchange.directory)).batch == 0
    with pytest.raises(type(pipeline.body.failure)), pipeline.feed.next("all", 0.0):
        pass
    pipeline.close()


def test_a_process_that_was_started_in_vain_again_and_again_does_not_decode_in_the_driver(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, all={})
    for _ in range(4):
        pipeline.start_pipeline_again()
    assert pipeline.feed.join("all", pipeline.feed.history, 0)
    write(pipeline, 1)
    pipeline.body.take(None, 0)
    assert (pipeline.next_batch, arrived(tmp_path / "all")) == (0, [])
    pipeline.close()


def test_the_source_plans_from_where_the_body_got_to(state: Connection, tmp_path: Path) -> None:
    pipeline = LogPipeline(state, tmp_path, all={})
    for number in range(1, 5):
        write(pipeline, number)
    reader = LogStreamReader.in_process(tmp_path / "log", pipeline.exchange.directory)
    start = reader.initialOffset()
    pipeline.exchange.note_followed(Overrun(3, 0.5))
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert end["batch"] == 4
    partitions = reader.partitions(start, end)
    assert [p.range_start for p in partitions if isinstance(p, LogPartition)] == [3]
    planned = pipeline.exchange.planned()
    assert planned is not None
    assert (planned.start, planned.end, planned.rows) == (3, 4, 1)

    # Nothing is left: an empty micro-batch follows at once, so that the body goes on following.
    pipeline.exchange.clear()
    pipeline.exchange.note_followed(Overrun(4, 0.5))
    began = time.monotonic()
    again = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert (again["batch"], time.monotonic() - began < 0.5) == (4, True)
    assert reader.partitions(start, again) == []
    assert pipeline.exchange.planned() is None
    reader.stop()
    pipeline.close()
