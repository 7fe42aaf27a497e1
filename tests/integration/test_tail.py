"""The body of a micro-batch follows the log beyond its planned range, in the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from spark_pipeline.tail import Tail

from cdc.connection import Connection
from spark_pipeline import tail as tail_module
from spark_pipeline.exchange import Followed, followed
from spark_pipeline.reading import LogPartition
from spark_pipeline.source import LogStreamReader
from tests import pgoutput
from tests.fix_postgres import Database
from tests.lane_on_log import LogLane, arrived
from tests.unit.replication.test_seal import transaction
from tests.waiting import until

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


def test_batches_written_during_a_micro_batch_are_served_by_it_until_the_lane_ends(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, all={})
    with closing(Tail(lane.passage, lane.exchange, lane.settings)) as tail:
        body = threading.Thread(target=tail.take, args=(None, 0))
        body.start()
        for number in range(1, 6):
            write(lane, number)
            until("the change", lambda: len(arrived(tmp_path / "all")) == number)  # noqa: B023
        assert ids(tmp_path / "all") == [1, 2, 3, 4, 5]
        assert body.is_alive()
        lane.passage.ended.set()
        body.join(5)
        assert not body.is_alive()
    assert lane.passage.failure is None
    assert followed(str(lane.exchange.directory)).batch == lane.log.next_batch
    lane.close()


def test_control_goes_back_to_spark_when_more_has_come_than_the_driver_should_do(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, one={}, two={})
    settings = replace(lane.settings, micro_batch_rows=10)
    write(lane, 1, rows=10)
    write(lane, 2, rows=10)
    with closing(Tail(lane.passage, lane.exchange, settings)) as tail:
        tail.take(None, 0)
        assert lane.passage.next_batch == 0
        lane.take(1)
        body = threading.Thread(target=tail.take, args=(None, 0))
        body.start()
        until("what fits to be served here", lambda: lane.passage.next_batch == 2)
        lane.passage.ended.set()
        body.join(5)
    lane.close()


def test_control_goes_back_to_spark_after_a_bounded_time(
    state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "_FOLLOWS_S", 0.3)
    lane = LogLane(state, tmp_path, all={})
    with closing(Tail(lane.passage, lane.exchange, lane.settings)) as tail:
        tail.take(None, 0)
    assert not lane.passage.ended.is_set()
    assert 0.3 <= followed(str(lane.exchange.directory)).spent_s < 5
    lane.close()


def test_a_failure_while_following_ends_the_lane_with_its_reason(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, all={})
    write(lane, 1)
    with closing(Tail(lane.passage, lane.exchange, lane.settings)) as tail:
        for file in (tmp_path / "log").glob("*.seg*"):
            file.write_bytes(b"")
        tail.take(None, 0)
    assert lane.passage.ended.is_set()
    assert lane.passage.failure is not None
    assert followed(str(lane.exchange.directory)).batch == 0
    lane.close()


def test_a_lane_that_was_started_in_vain_again_and_again_is_not_followed_in_the_driver(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, all={})
    for _ in range(4):
        lane.start_lane_again()
    write(lane, 1)
    with closing(Tail(lane.passage, lane.exchange, lane.settings)) as tail:
        tail.take(None, 0)
    assert (lane.passage.next_batch, arrived(tmp_path / "all")) == (0, [])
    lane.close()


def test_the_source_plans_from_where_the_body_got_to(state: Connection, tmp_path: Path) -> None:
    lane = LogLane(state, tmp_path, all={})
    for number in range(1, 5):
        write(lane, number)
    reader = LogStreamReader.for_lane(tmp_path / "log", lane.exchange.directory)
    start = reader.initialOffset()
    lane.exchange.note_followed(Followed(3, 0.5))
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert end["batch"] == 4
    partitions = reader.partitions(start, end)
    assert [p.range_start for p in partitions if isinstance(p, LogPartition)] == [3]
    planned = lane.exchange.planned()
    assert planned is not None
    assert (planned.start, planned.end, planned.rows) == (3, 4, 1)

    # Nothing is left: an empty micro-batch follows at once, so that the body goes on following.
    lane.exchange.clear()
    lane.exchange.note_followed(Followed(4, 0.5))
    began = time.monotonic()
    again = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert (again["batch"], time.monotonic() - began < 0.5) == (4, True)
    assert reader.partitions(start, again) == []
    assert lane.exchange.planned() is None
    reader.stop()
    lane.close()
