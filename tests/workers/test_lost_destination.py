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
from tests.log_pipeline import SOURCE, LogPipeline, arrived
from tests.queue_pipeline import insert

pytestmark = pytest.mark.migrated

HEALTH = "SELECT consumer, kind, severity FROM walbrook.health"
LOST = [("out", "destination_lost_data", "warning")]


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


def told(pipeline: LogPipeline) -> list[tuple[object, ...]]:
    report_lost_destinations(pipeline.state, SOURCE, pipeline.settings.term)
    return pipeline.rows(HEALTH)


def deliver(pipeline: LogPipeline, *numbers: int) -> None:
    """One transaction and one micro-batch each."""
    for number in numbers:
        pipeline.write(*insert(number, (number, f"row {number}")))
        pipeline.take()


def test_files_that_were_removed_are_reported_until_an_operator_has_seen_it(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, out={})
    deliver(pipeline, 1, 2)
    assert told(pipeline) == []
    shutil.rmtree(tmp_path / "out")
    deliver(pipeline, 3, 4)
    assert [m["record"]["id"] for m in arrived(tmp_path / "out")] == [3, 4]
    assert told(pipeline) == LOST
    ((what, fix),) = pipeline.rows("SELECT what, fix FROM walbrook.health")
    assert "Delivery went on" in what
    assert "walbrook.rewind" in fix
    state.execute("SELECT walbrook.accept_loss('out')")
    assert told(pipeline) == []
    deliver(pipeline, 5)
    assert told(pipeline) == []
    pipeline.close()


def test_a_redis_that_was_emptied_is_reported_and_a_start_elsewhere_ends_it(
    state: Connection, tmp_path: Path, redis_client: redis.Redis, redis_url: str
) -> None:
    pipeline = LogPipeline(
        state, tmp_path, out={"destination": {"type": "redis_stream", "url": redis_url}}
    )
    deliver(pipeline, 1, 2)
    assert told(pipeline) == []
    redis_client.flushdb()
    deliver(pipeline, 3)
    assert told(pipeline) == LOST
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
    pipeline.close()


def test_a_consumer_that_is_moved_back_to_an_empty_destination_has_lost_nothing(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, out={})
    deliver(pipeline, 1, 2)
    shutil.rmtree(tmp_path / "out")
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    pipeline.start()
    pipeline.take()
    assert [m["record"]["id"] for m in arrived(tmp_path / "out")] == [1, 2]
    assert told(pipeline) == []
    pipeline.close()


def test_a_sink_that_was_renamed_and_renamed_back_loses_nothing(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, out={})
    deliver(pipeline, 1)
    (sink,) = pipeline.sinks
    pipeline.sinks = [sink.model_copy(update={"name": "renamed", "start_at": "latest"})]
    pipeline.start()
    pipeline.write(*insert(2, (2, "row 2")))
    with pytest.raises(Exception, match="of the consumer out, not of renamed"):
        pipeline.take()
    pipeline.sinks = [sink]
    pipeline.start()
    pipeline.take()
    assert [m["record"]["id"] for m in arrived(tmp_path / "out")] == [1, 2]
    assert pipeline.rows("SELECT absorbed FROM walbrook.consumers WHERE name = 'out'") == [(0,)]
    pipeline.close()


def test_entries_that_readers_delete_from_a_stream_are_no_loss(
    state: Connection, tmp_path: Path, redis_client: redis.Redis, redis_url: str
) -> None:
    pipeline = LogPipeline(
        state, tmp_path, out={"destination": {"type": "redis_stream", "url": redis_url}}
    )
    deliver(pipeline, 1, 2)
    last: Any = redis_client.xrevrange("walbrook.out", count=1)
    redis_client.xdel("walbrook.out", last[0][0])
    pipeline.start()  # another connection, which does not know what was added
    deliver(pipeline, 3)
    assert told(pipeline) == []
    pipeline.close()
