"""A destination that lost what it had been sent is noticed, and delivery goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.connection import Connection
from cdc.state.consumers import Described
from cdc.state.lost_destinations import report_lost_destinations
from cdc.state.positions import register_source
from tests.fix_postgres import Database
from tests.integration.test_queue import insert
from tests.lane_on_log import SOURCE, LogLane, arrived

pytestmark = pytest.mark.migrated

HEALTH = "SELECT consumer, kind, severity FROM walbrook.health"
LOST = [("out", "destination_lost_data", "warning")]


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


def told(lane: LogLane) -> list[tuple[object, ...]]:
    report_lost_destinations(lane.state, SOURCE, lane.settings.term)
    return lane.rows(HEALTH)


def deliver(lane: LogLane, *numbers: int) -> None:
    """One transaction and one micro-batch each."""
    for number in numbers:
        lane.write(*insert(number, (number, f"row {number}")))
        lane.take()


def test_files_that_were_removed_are_told_of_until_an_operator_has_seen_it(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, out={})
    deliver(lane, 1, 2)
    assert told(lane) == []
    shutil.rmtree(tmp_path / "out")
    deliver(lane, 3, 4)
    assert [m["record"]["id"] for m in arrived(tmp_path / "out")] == [3, 4]
    assert told(lane) == LOST
    ((what, fix),) = lane.rows("SELECT what, fix FROM walbrook.health")
    assert "Delivery went on" in what
    assert "walbrook.rewind" in fix
    state.execute("SELECT walbrook.accept_loss('out')")
    assert told(lane) == []
    deliver(lane, 5)
    assert told(lane) == []
    lane.close()


def test_a_redis_that_was_emptied_is_told_of_and_a_start_elsewhere_ends_it(
    state: Connection, tmp_path: Path, redis_client: redis.Redis, redis_url: str
) -> None:
    lane = LogLane(state, tmp_path, out={"destination": {"type": "redis_stream", "url": redis_url}})
    deliver(lane, 1, 2)
    assert told(lane) == []
    redis_client.flushdb()
    deliver(lane, 3)
    assert told(lane) == LOST
    register_source(
        state,
        name=SOURCE,
        slot="slot",
        publication="pub",
        system_identifier="1",
        slot_lsn=8,
        consumers=["out"],
        described={"out": Described(place="there")},
    )
    assert state.execute("SELECT lost_at, top_lsn FROM walbrook.consumers").fetchall() == [
        (None, None)
    ]
    lane.close()


def test_a_consumer_that_is_moved_back_to_an_empty_destination_has_lost_nothing(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, out={})
    deliver(lane, 1, 2)
    shutil.rmtree(tmp_path / "out")
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    lane.start()
    lane.take()
    assert [m["record"]["id"] for m in arrived(tmp_path / "out")] == [1, 2]
    assert told(lane) == []
    lane.close()


def test_a_sink_that_was_renamed_and_renamed_back_loses_nothing(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, out={})
    deliver(lane, 1)
    (sink,) = lane.sinks
    lane.sinks = [sink.model_copy(update={"name": "renamed", "start_at": "latest"})]
    lane.start()
    lane.write(*insert(2, (2, "row 2")))
    with pytest.raises(Exception, match="of the consumer out, not of renamed"):
        lane.take()
    lane.sinks = [sink]
    lane.start()
    lane.take()
    assert [m["record"]["id"] for m in arrived(tmp_path / "out")] == [1, 2]
    assert lane.rows("SELECT absorbed FROM walbrook.consumers WHERE name = 'out'") == [(0,)]
    lane.close()


def test_entries_that_readers_delete_from_a_stream_are_no_loss(
    state: Connection, tmp_path: Path, redis_client: redis.Redis, redis_url: str
) -> None:
    lane = LogLane(state, tmp_path, out={"destination": {"type": "redis_stream", "url": redis_url}})
    deliver(lane, 1, 2)
    last: Any = redis_client.xrevrange("walbrook.out", count=1)
    redis_client.xdel("walbrook.out", last[0][0])
    lane.start()  # another connection, which does not know what was added
    deliver(lane, 3)
    assert told(lane) == []
    lane.close()
