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
from tests.fix_postgres import Database
from tests.lane_on_log import LogLane, arrived
from tests.unit.replication.test_seal import transaction
from tests.waiting import until

pytestmark = pytest.mark.migrated

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


def write(lane: LogLane, number: int, rows: int = 1) -> None:
    inserts = [pgoutput.insert(1, [str(number * 10_000 + row)]) for row in range(rows)]
    lane.write(ITEM, *transaction(0x1000 * number, *inserts))


def ids(directory: Path) -> list[int]:
    return [message["record"]["id"] // 10_000 for message in arrived(directory)]


@contextmanager
def running(lane: LogLane) -> Iterator[threading.Thread]:
    """The body of a micro-batch without a planned range, and the workers, each in a thread."""
    body = threading.Thread(target=lane.body.take, args=(None, 0))
    settler = threading.Thread(target=lane.settler.run)
    workers = [threading.Thread(target=worker.run) for worker in lane.workers.values()]
    for thread in (body, settler, *workers):
        thread.start()
    try:
        yield body
    finally:
        lane.context.ended.set()
        for worker in lane.workers.values():
            worker.nudge()
        for thread in (body, *workers):
            thread.join(10)
            assert not thread.is_alive()
        lane.settler.close()
        settler.join(10)


def test_batches_written_during_a_micro_batch_are_decoded_by_it_until_the_stage_ends(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, all={})
    with running(lane) as body:
        for number in range(1, 6):
            write(lane, number)
            until("the change", lambda: len(arrived(tmp_path / "all")) == number)  # noqa: B023
        assert ids(tmp_path / "all") == [1, 2, 3, 4, 5]
        assert body.is_alive()
    assert lane.body.failure is None
    assert followed(str(lane.exchange.directory)).batch == lane.log.next_batch
    lane.close()


def test_control_goes_back_to_spark_when_more_has_come_than_the_driver_should_do(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, one={}, two={})
    lane.settings = replace(lane.settings, driver_rows=20)  # for two consumers: 10 rows
    lane.start_lane_again()
    for name, worker in lane.workers.items():
        assert lane.feed.join(name, lane.feed.history, worker.batch)
    write(lane, 1, rows=10)
    write(lane, 2, rows=10)
    lane.body.take(None, 0)
    assert (lane.body.failure, lane.next_batch) == (None, 0)
    lane.take(1)
    with running(lane):
        until("what fits to be decoded here", lambda: lane.next_batch == 2)
    lane.close()


def test_batches_that_nobody_in_the_feed_needs_are_passed_over(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, all={})
    write(lane, 1)
    lane.feed.leave("all")
    lane.body.take_range(PlannedRange(0, 1, 1))
    assert (lane.next_batch, lane.feed.depth.ranges) == (1, 0)
    lane.take()
    assert ids(tmp_path / "all") == [1], "the worker reads the log itself"
    lane.close()


def test_the_note_of_an_earlier_micro_batch_does_not_move_the_feed_back(
    state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "_FOLLOWS_S", 0.0)
    lane = LogLane(state, tmp_path, all={})
    for number in (1, 2, 3):
        write(lane, number)
    note_planned(lane.exchange.directory, PlannedRange(0, 1, 1))
    lane.take()
    assert lane.next_batch == 3
    lane.body.take(None, 0)  # an empty micro-batch has no note of its own
    assert (lane.body.failure, lane.next_batch) == (None, 3)
    lane.close()


def test_control_goes_back_to_spark_after_a_bounded_time(
    state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "_FOLLOWS_S", 0.3)
    lane = LogLane(state, tmp_path, all={})
    lane.body.take(None, 0)
    assert lane.body.failure is None
    assert 0.3 <= followed(str(lane.exchange.directory)).spent_s < 5
    lane.close()


def test_a_failure_while_following_is_kept_for_whoever_runs_the_query(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, all={})
    assert lane.feed.join("all", lane.feed.history, 0)
    write(lane, 1)
    for file in (tmp_path / "log").glob("*.seg*"):
        file.write_bytes(b"")
    lane.body.take(None, 0)
    assert lane.body.failure is not None
    assert followed(str(lane.exchange.directory)).batch == 0
    with pytest.raises(type(lane.body.failure)), lane.feed.next("all", 0.0):
        pass
    lane.close()


def test_a_process_that_was_started_in_vain_again_and_again_does_not_decode_in_the_driver(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, all={})
    for _ in range(4):
        lane.start_lane_again()
    assert lane.feed.join("all", lane.feed.history, 0)
    write(lane, 1)
    lane.body.take(None, 0)
    assert (lane.next_batch, arrived(tmp_path / "all")) == (0, [])
    lane.close()


def test_the_source_plans_from_where_the_body_got_to(state: Connection, tmp_path: Path) -> None:
    lane = LogLane(state, tmp_path, all={})
    for number in range(1, 5):
        write(lane, number)
    reader = LogStreamReader.in_process(tmp_path / "log", lane.exchange.directory)
    start = reader.initialOffset()
    lane.exchange.note_followed(Overrun(3, 0.5))
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert end["batch"] == 4
    partitions = reader.partitions(start, end)
    assert [p.range_start for p in partitions if isinstance(p, LogPartition)] == [3]
    planned = lane.exchange.planned()
    assert planned is not None
    assert (planned.start, planned.end, planned.rows) == (3, 4, 1)

    # Nothing is left: an empty micro-batch follows at once, so that the body goes on following.
    lane.exchange.clear()
    lane.exchange.note_followed(Overrun(4, 0.5))
    began = time.monotonic()
    again = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert (again["batch"], time.monotonic() - began < 0.5) == (4, True)
    assert reader.partitions(start, again) == []
    assert lane.exchange.planned() is None
    reader.stop()
    lane.close()
