"""Consumers in event-time order as workers: they share the feed, catch up, fail and are moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.config import FileDestination, SinkConfig
from cdc.connection import Connection
from cdc.state import operators
from cdc.state.workers import WorkerState
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.plan import DecodingPlan, DriverPlan
from spark_pipeline.slices.exchange import SliceMarker
from tests.event_pipeline import NAME, EventPipeline, S
from tests.event_stages import served
from tests.fix_event_pipeline import MakePipeline
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.waiting import until

pytestmark = pytest.mark.migrated

PLAIN = "plain"


@pytest.fixture(autouse=True)
def source(event_database: Database) -> Iterator[Connection]:
    """The table behind the logs, as its database shows it."""
    with event_database.connect() as connection:
        connection.execute("CREATE TABLE item (id int PRIMARY KEY, at bigint)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE item")
        yield connection
        connection.execute("DROP PUBLICATION pub")
        connection.execute("DROP TABLE item")


def plain_sink(pipeline: EventPipeline) -> SinkConfig:
    return SinkConfig.model_validate(
        {
            "name": PLAIN,
            "database": "a",
            "destination": FileDestination(path=pipeline.directory / PLAIN),
        }
    )


def ids(pipeline: EventPipeline, name: str = NAME) -> list[Any]:
    return [m["record"].get("id", m["action"]) for m in arrived(pipeline.directory / name)]


def state_of(pipeline: EventPipeline, name: str = NAME) -> list[Any]:
    query = f"SELECT state FROM walbrook.consumers WHERE name = '{name}' ORDER BY source"
    return [state for (state,) in pipeline.rows(query)]


def test_a_consumer_in_event_time_and_one_in_commit_order_share_one_decode(
    event_pipeline: MakePipeline, event_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = DriverPlan.decode

    def counted(plan: DriverPlan) -> list[SliceMarker]:
        markers = decode(plan)
        decoded.append(sum(marker.rows for marker in markers))
        return markers

    pipeline = event_pipeline(beside=[PLAIN])
    with served(pipeline, event_database, plain={"a": [plain_sink(pipeline)]}) as (stages, _):
        feed = stages.by_source["a"].feed
        pipeline.write("a", (1, 1 * S))
        until("the first", lambda: ids(pipeline) == ids(pipeline, PLAIN) == [1])
        until("both in the feed", lambda: sorted(feed.readers) == [PLAIN, NAME])
        monkeypatch.setattr(DriverPlan, "decode", counted)
        for number in range(2, 40, 2):
            pipeline.write("a", (number + 1, (number + 1) * S), (number, number * S))
        until("all of it", lambda: len(ids(pipeline)) == len(ids(pipeline, PLAIN)) == 39)
        until("both live", lambda: state_of(pipeline) == state_of(pipeline, PLAIN) == ["live"])
    assert sum(decoded) == 38, "some were decoded twice"
    assert ids(pipeline) == list(range(1, 40))
    assert ids(pipeline, PLAIN)[:3] == [1, 3, 2]


def test_a_destination_that_is_away_does_not_hold_the_feed(
    event_pipeline: MakePipeline, event_database: Database, endpoint: Endpoint
) -> None:
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "ledger": False}
    pipeline = event_pipeline(destination=hook, beside=[PLAIN])
    endpoint.refuses, endpoint.refusal = lambda _: True, 503
    with served(pipeline, event_database, plain={"a": [plain_sink(pipeline)]}) as (stages, _):
        pipeline.write("a", (1, 1 * S))
        until("a failure", lambda: state_of(pipeline) == ["waiting"])
        assert stages.by_source["a"].feed.readers == [PLAIN]
        for number in range(2, 11):
            pipeline.write("a", (number, number * S))
        until("the other", lambda: ids(pipeline, PLAIN) == list(range(1, 11)))
        failing = "SELECT consumer FROM walbrook.health WHERE kind = 'worker_failing'"
        until("health to say so", lambda: pipeline.rows(failing) == [(NAME,)])
        endpoint.refuses = None
        until("all of it", lambda: len(endpoint.written) == 10, 60)
        until("it to be live", lambda: state_of(pipeline) == ["live"])
        until("health to be well", lambda: pipeline.rows(failing) == [])
    assert [m["record"]["id"] for m in endpoint.written] == list(range(1, 11))  # type: ignore[index]


def test_a_merged_consumer_is_moved_back_and_forward_in_one_source(
    event_pipeline: MakePipeline, event_database: Database
) -> None:
    pipeline = event_pipeline(sources=("a", "b"), event_time={"on_stop": "keep"})
    pipeline.state.execute("UPDATE walbrook.consumers SET destination = 'file'")
    with served(pipeline, event_database):
        for number in (1, 3):
            pipeline.write("a", (number, number * S))
            pipeline.write("b", (number + 1, (number + 1) * S))
        until("the first three", lambda: ids(pipeline) == [1, 2, 3])
        until("both live", lambda: state_of(pipeline) == ["live", "live"])
        settled = "SELECT NOT planned FROM walbrook.event_time"
        until("it to be settled", lambda: pipeline.rows(settled) == [(True,)])
        pipeline.state.execute("UPDATE walbrook.sources SET log_lsn = '0/300', log_idx = 0")
        operators.rewind(pipeline.state, f"a/{NAME}", to_cursor="0/100:0")
        until("all of it again", lambda: ids(pipeline) == [1, 2, 3, 1, 3])
        # Of the other source what is held back is passed over, and its sink hears of it.
        operators.skip_to(pipeline.state, f"b/{NAME}", "0/300:0")
        until("the gap", lambda: ids(pipeline)[5:] == ["gap"])
        pipeline.write("b", (6, 6 * S))
        pipeline.write("a", (7, 7 * S))
        until("the rest", lambda: ids(pipeline)[6:] == [6])
    numbers = [m["metadata"]["sequence"] for m in arrived(pipeline.directory / NAME)]
    places = [tuple(map(int, each.split("-"))) for each in numbers]
    assert places == sorted(set(places)), "a number was used twice"


@pytest.mark.parametrize("again", ["a", "b"])
def test_a_merged_consumer_goes_on_when_the_stage_of_one_source_begins_again(
    event_pipeline: MakePipeline, event_database: Database, again: str
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    with served(pipeline, event_database) as (stages, _):
        pipeline.write("a", (1, 1 * S), (3, 3 * S))
        pipeline.write("b", (2, 2 * S))
        until("what is due", lambda: ids(pipeline) == [1, 2])
        workers = stages.by_source[again].workers
        before = until("the worker in that stage", lambda: workers.get(NAME))
        stages.begin_again(again)
        for stage in stages.by_source.values():
            until("a new worker", lambda: stage.workers.get(NAME) not in (None, before))  # noqa: B023
        one, other = (stage.workers[NAME] for stage in stages.by_source.values())
        assert one is other, "it has two workers"
        pipeline.write("b", (4, 4 * S))
        until("the rest", lambda: ids(pipeline) == [1, 2, 3])
        until("both live", lambda: state_of(pipeline) == ["live", "live"])
    assert ids(pipeline) == [1, 2, 3, 4], "an operator's stop releases what is held back, and once"


def test_a_worker_that_is_far_behind_is_decoded_by_executors(
    event_pipeline: MakePipeline, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[str] = []
    decode = DecodedRange.decode

    def noted(history: int, start: int, end: int, plan: DecodingPlan) -> DecodedRange:
        plans.append(plan.name)
        return decode(history, start, end, plan)

    monkeypatch.setattr(DecodedRange, "decode", noted)
    pipeline = event_pipeline(spark=spark, driver_rows=50)
    count = 1_500
    for first in range(0, count, 100):
        pipeline.write("a", *((n, (n ^ 1) * S) for n in range(first, first + 100)))
    while pipeline.step():
        assert pipeline.worker is not None
        assert pipeline.worker.current.state is WorkerState.CATCHING_UP
    assert plans
    assert set(plans) == {"executors"}
    assert ids(pipeline) == [n ^ 1 for n in range(count)]
    assert not [*Path(pipeline.directory).glob("*.arrow")], "what was decoded is left"
    plans.clear()
    pipeline.write("a", (count, count * S))
    while pipeline.step():
        pass
    assert plans == ["driver"], "a little is not worth a job"
