"""A process that dies while it delivers from a queue repeats, loses and blocks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.change import MessageBatch
from cdc.config.secrets import SecretText
from cdc.connection import Connection
from cdc.queue.claims import ABANDONED, claim
from cdc.queue.ledger.open import LedgerAddress
from sinks.base import Delivery
from sinks.webhook import WebhookSink
from spark_pipeline.workers.retries import ABANDONED_MAX
from tests.conformance.crash import Killed
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.queue_pipeline import insert, names, queue, refusing
from tests.waiting import until

QUICK = {"first_ms": 1, "max_ms": 10}
SLOW = {"first_ms": 600_000, "max_ms": 3_600_000}

PipelineOf = Callable[..., LogPipeline]


@pytest.fixture(params=["postgres", "redis"])
def address(request: pytest.FixtureRequest, database: Database) -> LedgerAddress:
    if request.param == "postgres":
        return LedgerAddress("postgres", SecretText(database.dsn))
    client: redis.Redis = request.getfixturevalue("redis_client")
    client.flushdb()
    return LedgerAddress("redis", SecretText(request.getfixturevalue("redis_url")), timeout_s=10)


@pytest.fixture
def pipeline_of(
    state: Connection, database: Database, endpoint: Endpoint, tmp_path: Path
) -> Iterator[PipelineOf]:
    pipelines: list[LogPipeline] = []

    def make(at: LedgerAddress | None = None, **given: Any) -> LogPipeline:
        class Pipeline(LogPipeline):
            state_dsn = database.dsn
            ledger = at

        hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
        pipelines.append(
            Pipeline(state, tmp_path, hook={"retry": QUICK, "destination": hook, **given})
        )
        return pipelines[-1]

    yield make
    for pipeline in pipelines:
        pipeline.close()


def queue_refused(pipeline: LogPipeline, endpoint: Endpoint, *refused: str) -> None:
    """One message for each of these names, each of a group of its own, refused and due."""
    refusing(endpoint, lambda record: record["name"] != "good")
    rows = [(n, name) for n, name in enumerate(refused, 1)]
    pipeline.write(*insert(1, (100, "good"), *rows))
    pipeline.take()
    endpoint.refuses = None
    # The highest is due first.
    pipeline.state.execute(
        "UPDATE walbrook.events SET due_at = now() - commit_idx * interval '1 s'"
    )
    assert len(queue(pipeline)) == len(refused)


def serve(pipeline: LogPipeline, run: str) -> None:
    """One claim by the process ``run``."""
    pipeline.deliver_due(claims=1, run=run)


def serve_all(pipeline: LogPipeline, run: str) -> None:
    def empty() -> bool:
        serve(pipeline, run)
        return not queue(pipeline)

    until("an empty queue", empty, 30)


def test_a_queued_request_that_was_noted_is_not_repeated_in_whatever_order_it_is_claimed(
    address: LedgerAddress,
    pipeline_of: PipelineOf,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = pipeline_of(address)
    queue_refused(pipeline, endpoint, "a", "b", "c", "d", "e")

    def died(*_given: object, **_named: object) -> None:
        raise Killed

    with monkeypatch.context() as within:
        within.setattr("spark_pipeline.workers.retries.settle_claim", died)
        with pytest.raises(Killed):
            serve(pipeline, "first")
    assert names(endpoint) == ["good", "a", "b", "c", "d", "e"]
    pipeline.start()
    serve_all(pipeline, "second")
    assert names(endpoint) == ["good", "a", "b", "c", "d", "e"]
    assert pipeline.rows("SELECT delivered, absorbed, dead FROM walbrook.consumers") == [(1, 5, 0)]
    assert pipeline.rows("SELECT count(*) FROM walbrook.ledger") == [(0,)]


def test_a_message_refused_behind_an_accepted_one_of_its_group_keeps_its_pause(
    pipeline_of: PipelineOf, endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(retry=SLOW)
    refusing(endpoint, lambda record: record["name"] in ("a1", "a2"))
    pipeline.write(*insert(1, (1, "a1"), (1, "a2"), (1, "a3"), (2, "b1")))
    pipeline.take()
    refusing(endpoint, lambda record: record["name"] == "a2")
    pipeline.state.execute("UPDATE walbrook.events SET due_at = now() WHERE due_at IS NOT NULL")
    serve(pipeline, "run")
    assert names(endpoint) == ["b1", "a1"]
    assert queue(pipeline) == [("a2", 1, True), ("a3", 0, False)]
    ((pauses,),) = pipeline.rows(
        "SELECT due_at > clock_timestamp() + interval '1 minute' FROM walbrook.events "
        "WHERE due_at IS NOT NULL"
    )
    assert pauses, "it is not tried again at once"


def test_a_message_that_kills_the_process_is_found_and_given_up_after_bounded_tries(
    pipeline_of: PipelineOf, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(max_deliveries=1_000)
    queue_refused(pipeline, endpoint, "a", "killer", "c")
    send = WebhookSink.deliver_parts

    def dies(sink: WebhookSink, parts: list[MessageBatch], *given: Any) -> list[Delivery]:
        if any('"killer"' in text for part in parts for text in part.messages().to_pylist()):
            raise Killed
        return send(sink, parts, *given)

    monkeypatch.setattr(WebhookSink, "deliver_parts", dies)
    deaths = 0
    while queue(pipeline):
        # Every process has the term of the service, and a run of its own.
        try:
            serve_all(pipeline, f"run {deaths}")
        except Killed:
            deaths += 1
            assert deaths <= ABANDONED_MAX + 2
    assert sorted(names(endpoint)) == ["a", "c", "good"]
    ((error, name),) = pipeline.rows("SELECT error, event ->> 'record' FROM walbrook.dead_letters")
    assert "process" in error
    assert '"killer"' in name
    assert pipeline.rows("SELECT walbrook.redeliver('hook')") != []
    monkeypatch.undo()
    serve_all(pipeline, "another run")
    assert sorted(names(endpoint)) == ["a", "c", "good", "killer"]


def test_a_killed_process_does_not_wear_out_the_messages_it_had_claimed_together(
    pipeline_of: PipelineOf, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(max_deliveries=2)
    queue_refused(pipeline, endpoint, "a", "b", "c")

    def dies(_sink: WebhookSink, _parts: list[MessageBatch], *_given: Any) -> list[Delivery]:
        raise Killed

    with monkeypatch.context() as within:
        within.setattr(WebhookSink, "deliver_parts", dies)
        with pytest.raises(Killed):
            serve(pipeline, "first")
    serve_all(pipeline, "second")
    assert sorted(names(endpoint)) == ["a", "b", "c", "good"]
    assert pipeline.rows("SELECT dead FROM walbrook.consumers") == [(0,)]


def test_the_last_of_several_messages_claimed_together_is_not_blamed_for_the_end_of_the_process(
    pipeline_of: PipelineOf, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(retry=SLOW)
    queue_refused(pipeline, endpoint, "a", "b", "c")
    refusing(endpoint, lambda _record: True)

    def dies(_sink: WebhookSink, _parts: list[MessageBatch], *_given: Any) -> list[Delivery]:
        raise Killed

    with monkeypatch.context() as within:
        within.setattr(WebhookSink, "deliver_parts", dies)
        with pytest.raises(Killed):
            serve(pipeline, "first")
    for _ in range(3):
        serve(pipeline, "second")
    assert (
        pipeline.rows("SELECT deliveries, abandoned, holder FROM walbrook.events")
        == [(2, 0, None)] * 3
    )


def test_a_message_is_abandoned_by_a_process_that_ended_not_by_an_earlier_stage_of_the_same(
    address: LedgerAddress, pipeline_of: PipelineOf, endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(address)
    queue_refused(pipeline, endpoint, "a")
    ((number,),) = pipeline.rows("SELECT id FROM walbrook.consumers")
    counted = []
    for holder in ("shop:p:1", "shop:p:2", "shop:q:1"):
        claimed = claim(pipeline.state, number, pipeline.settings.term, holder)
        counted += claimed.column(ABANDONED).to_pylist()
    assert counted == [0, 0, 1]
