"""Messages that a destination refuses wait with their groups; all others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.change import MessageBatch
from cdc.connection import Connection
from cdc.errors import TransientError
from cdc.queue.claims import claim
from cdc.state import positions
from sinks.base import Delivery
from sinks.webhook import WebhookSink
from spark_pipeline.delivery.sender import REFUSALS_MAX
from tests import pgoutput
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline, arrived
from tests.queue_pipeline import (
    ITEM,
    insert,
    names,
    queue,
    redeliver,
    refusing,
    serve_once,
)
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

QUICK = {"first_ms": 1, "max_ms": 10}


@pytest.fixture
def pipeline_of(
    state: Connection, database: Database, endpoint: Endpoint, tmp_path: Path
) -> Iterator[Callable[..., LogPipeline]]:
    pipelines: list[LogPipeline] = []

    def make(**given: Any) -> LogPipeline:
        class Pipeline(LogPipeline):
            state_dsn = database.dsn

        given = {"retry": QUICK, **given}
        hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
        destination = given.pop("destination", hook)
        pipelines.append(Pipeline(state, tmp_path, hook={**given, "destination": destination}))
        return pipelines[-1]

    yield make
    for pipeline in pipelines:
        pipeline.close()


def test_a_refused_message_holds_back_its_group_and_no_other(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (1, "a1"), (2, "b1"), (1, "a2"), (3, "c1")))
    pipeline.take()
    pipeline.write(*insert(2, (1, "a3"), (2, "b2")))
    pipeline.take()
    assert names(endpoint) == ["b1", "c1", "b2"]
    assert queue(pipeline) == [("a1", 1, True), ("a2", 0, False), ("a3", 0, False)]
    assert pipeline.rows("SELECT delivered FROM walbrook.consumers") == [(3,)]

    endpoint.refuses = None
    redeliver(pipeline)
    assert names(endpoint) == ["b1", "c1", "b2", "a1", "a2", "a3"]
    assert pipeline.rows("SELECT delivered, dead FROM walbrook.consumers") == [(6, 0)]
    pipeline.write(*insert(3, (1, "a4")))
    pipeline.take()
    assert names(endpoint)[-1] == "a4"
    assert queue(pipeline) == []


def test_a_hot_key_goes_out_in_one_request(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "a0")
    pipeline.write(*insert(1, *((1, f"a{n}") for n in range(50))))
    pipeline.take()
    endpoint.refuses = None
    before = len(endpoint.requests)
    redeliver(pipeline)
    assert names(endpoint) == [f"a{n}" for n in range(50)]
    assert len(endpoint.requests) == before + 1


def test_after_max_deliveries_it_is_a_dead_letter_and_its_group_goes_on(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(max_deliveries=3)
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (1, "a1"), (1, "a2"), (2, "b1")))
    pipeline.take()
    redeliver(pipeline)
    assert names(endpoint) == ["b1", "a2"]
    ((kind, deliveries, error, name),) = pipeline.rows(
        "SELECT kind, deliveries, error, event ->> 'record' FROM walbrook.dead_letters"
    )
    assert (kind, deliveries) == ("delivery", 3)
    assert "answered 422" in error
    assert '"a1"' in name
    assert pipeline.rows("SELECT delivered, dead FROM walbrook.consumers") == [(2, 1)]
    assert pipeline.rows("SELECT kind FROM walbrook.health") == [("dead_letters",)]


def test_a_queued_message_is_there_after_a_crash_and_holds_back_its_group(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (1, "a1"), (2, "b1")))
    pipeline.take()
    pipeline.start()  # as after a crash: nothing is remembered but what is in Postgres
    pipeline.write(*insert(2, (1, "a2"), (2, "b2")))
    pipeline.take()
    assert names(endpoint) == ["b1", "b2"]
    endpoint.refuses = None
    redeliver(pipeline)
    assert names(endpoint) == ["b1", "b2", "a1", "a2"]


def test_a_cursor_moved_back_by_hand_over_what_waits_adds_nothing_twice(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (1, "a1"), (1, "a2"), (2, "b1")))
    pipeline.take()
    waits = queue(pipeline)
    pipeline.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    pipeline.start()
    pipeline.take()
    assert queue(pipeline) == waits
    endpoint.refuses = None
    redeliver(pipeline)
    assert names(endpoint) == ["b1", "b1", "a1", "a2"]


def test_a_destination_that_refuses_everything_is_at_fault_as_a_whole(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] != "good")
    pipeline.write(*insert(1, (100, "good"), *((n, f"x{n}") for n in range(20))))
    with pytest.raises(TransientError, match=f"refused {REFUSALS_MAX + 1} messages in a row"):
        pipeline.take()
    assert queue(pipeline) == []
    assert names(endpoint) == ["good"]
    ((cursor,),) = pipeline.rows("SELECT cursor_idx FROM walbrook.consumers")
    assert cursor == 1

    # Each try allows twice as many refusals, so a run of bad messages is passed in the end.
    for _ in range(5):
        pipeline.begin_again()
        try:
            pipeline.take()
            break
        except TransientError:
            continue
    assert len(queue(pipeline)) == 20


def test_a_message_on_which_the_endpoint_breaks_is_found_among_the_others(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "bad")
    endpoint.refusal = 500
    pipeline.write(*insert(1, *((n, "bad" if n == 37 else f"x{n}") for n in range(80))))
    pipeline.take()
    assert names(endpoint) == [f"x{n}" for n in range(80) if n != 37]
    assert queue(pipeline) == [("bad", 1, True)]
    assert pipeline.rows("SELECT error_kind FROM walbrook.events") == [("transient",)]


def test_an_endpoint_that_is_not_there_puts_nothing_into_the_queue(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    endpoint.script.append(Scripted(503))
    pipeline.write(*insert(1, (1, "a1"), (2, "b1")))
    with pytest.raises(TransientError, match="answered 503"):
        pipeline.take()
    assert queue(pipeline) == []
    assert pipeline.rows("SELECT delivered FROM walbrook.consumers") == [(0,)]


def test_a_message_above_the_limit_is_a_dead_letter_with_its_size_and_holds_back_no_other(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(max_message_bytes=2_000)
    pipeline.write(*insert(1, (1, "a1"), (1, "x" * 5_000), (1, "a2")))
    pipeline.take()
    assert names(endpoint) == ["a1", "a2"]
    ((error,),) = pipeline.rows("SELECT error FROM walbrook.dead_letters")
    assert "more than the 2000 that hook takes" in error
    assert queue(pipeline) == []


def test_an_endpoint_that_says_too_large_makes_it_a_dead_letter_at_once(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "large")
    endpoint.refusal = 413
    pipeline.write(*insert(1, (1, "large"), (1, "small")))
    pipeline.take()
    assert names(endpoint) == ["small"]
    assert pipeline.rows("SELECT deliveries FROM walbrook.dead_letters") == [(1,)]


def test_without_grouping_only_the_refused_message_waits(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(message_grouping=False)
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (1, "a1"), (1, "a2"), (2, "b1")))
    pipeline.take()
    assert names(endpoint) == ["a2", "b1"]
    assert queue(pipeline) == [("a1", 1, True)]


def test_groups_by_columns_wait_together(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(tables=[{"name": "public.item", "group_column_names": ["owner"]}])
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (1, "a1", "ann"), (2, "b1", "ann"), (3, "c1", "bob")))
    pipeline.take()
    assert names(endpoint) == ["c1"]
    assert [name for name, *_ in queue(pipeline)] == ["a1", "b1"]


def test_a_truncate_keeps_its_place_among_all_of_its_table(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(actions=["insert", "truncate"])
    endpoint.refuses = lambda messages: any(
        m["action"] == "insert" and m["record"]["name"] == "a1"  # type: ignore[index]
        for m in messages
    )
    rows = (["1", "a1", "o"], ["2", "b1", "o"], ["3", "c1", "o"])
    one, two, three = (pgoutput.insert(1, row) for row in rows)
    pipeline.write(ITEM, *transaction(0x100, one, two, pgoutput.truncate([1]), three))
    pipeline.take()
    accepted = [m["action"] for r in endpoint.accepted for m in r.messages]
    assert accepted == ["insert"]
    endpoint.refuses = None
    redeliver(pipeline)
    accepted = [
        m["record"].get("name", m["action"])  # type: ignore[attr-defined]
        for r in endpoint.accepted
        for m in r.messages
    ]
    assert accepted == ["b1", "a1", "truncate", "c1"]


def test_a_row_whose_key_changes_does_not_pass_what_waits_under_its_old_key(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "a1")
    first = pgoutput.insert(1, ["1", "a1", "o"])
    moved = pgoutput.update(1, ["9", "a2", "o"], key=["1", None, None])
    other = pgoutput.insert(1, ["5", "b1", "o"])
    pipeline.write(ITEM, *transaction(0x100, first, moved, other))
    pipeline.take()
    assert names(endpoint) == []  # b1 is of the table in which a key changes behind what waits
    endpoint.refuses = None
    redeliver(pipeline)
    assert names(endpoint) == ["a1", "a2", "b1"]


def test_behind_a_truncate_that_waits_many_thousands_are_settled_and_delivered_in_order(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(actions=["insert", "truncate"], batch_size=1000)
    pipeline.settings = replace(
        pipeline.settings, micro_batch_rows=50_000, micro_batch_bytes=1 << 30
    )
    endpoint.refuses = lambda messages: any(m["action"] == "truncate" for m in messages)
    inserts = [pgoutput.insert(1, [str(n), f"x{n}", "o"]) for n in range(15_000)]
    pipeline.write(ITEM, *transaction(0x100, pgoutput.truncate([1]), *inserts))
    pipeline.take()
    assert pipeline.rows("SELECT count(*), count(due_at) FROM walbrook.events") == [(15_001, 1)]
    endpoint.refuses = None
    pipeline.state.execute("UPDATE walbrook.events SET due_at = now() WHERE due_at IS NOT NULL")
    redeliver(pipeline)
    accepted = [m for r in endpoint.accepted for m in r.messages]
    assert accepted[0]["action"] == "truncate"
    assert len(accepted) == 15_001


def test_an_answer_to_the_commit_that_is_lost_lets_no_message_pass_what_waits(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (2, "b1")))
    pipeline.take()
    pipeline.write(*insert(2, (1, "a1")))

    def lost(*given: Any, **named: Any) -> None:
        positions.settle(*given, **named)
        raise TransientError("the connection is gone")

    with monkeypatch.context() as within:
        within.setattr("spark_pipeline.workers.settler.settle", lost)
        with pytest.raises(TransientError, match="the connection is gone"):
            pipeline.take()
    pipeline.start_pipeline_again()
    pipeline.write(*insert(3, (1, "a2")))
    pipeline.take()
    assert names(endpoint) == ["b1"]
    assert [name for name, *_ in queue(pipeline)] == ["a1", "a2"]


def test_a_claim_whose_settling_failed_is_free_again_at_once(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (1, "a1"), (2, "b1")))
    pipeline.take()
    endpoint.refuses = None
    pipeline.state.execute("UPDATE walbrook.events SET due_at = now()")

    def gone(*_given: Any, **_named: Any) -> None:
        raise TransientError("the state database is away")

    with monkeypatch.context() as within:
        within.setattr("spark_pipeline.workers.retries.settle_claim", gone)
        with pytest.raises(TransientError, match="is away"):
            serve_once(pipeline)
    serve_once(pipeline)
    assert queue(pipeline) == []


def test_a_message_that_breaks_the_sink_is_counted_and_the_others_go_on(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(max_deliveries=2)
    refusing(endpoint, lambda record: record["name"] in ("a1", "b1"))
    pipeline.write(*insert(1, (1, "a1"), (2, "b1"), (3, "c1")))
    pipeline.take()
    endpoint.refuses = None
    send = WebhookSink.deliver_parts

    def breaks(sink: WebhookSink, parts: list[MessageBatch], *given: Any) -> list[Delivery]:
        if any('"a1"' in text for part in parts for text in part.messages().to_pylist()):
            raise ValueError("nobody foresaw this")
        return send(sink, parts, *given)

    monkeypatch.setattr(WebhookSink, "deliver_parts", breaks)
    redeliver(pipeline)
    assert names(endpoint) == ["c1", "b1"]
    ((error,),) = pipeline.rows("SELECT error FROM walbrook.dead_letters")
    assert "nobody foresaw this" in error


def test_messages_that_an_earlier_start_had_claimed_are_taken_one_by_one(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] != "good")
    pipeline.write(*insert(1, (9, "good"), (1, "a1"), (2, "b1")))
    pipeline.take()
    pipeline.state.execute(
        "UPDATE walbrook.events SET due_at = now(), holder = 'shop:0', lease_id = 1, "
        "lease_until = now() + interval '1 h'"
    )
    endpoint.refuses = None
    serve_once(pipeline)
    assert len(queue(pipeline)) == 1, "one at a time"
    redeliver(pipeline)
    assert sorted(names(endpoint)) == ["a1", "b1", "good"]
    assert pipeline.rows("SELECT count(*) FROM walbrook.dead_letters") == [(0,)]


def test_a_paused_consumer_and_an_earlier_start_of_the_service_claim_nothing(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    refusing(endpoint, lambda record: record["name"] == "a1")
    pipeline.write(*insert(1, (1, "a1"), (2, "b1")))
    pipeline.take()
    endpoint.refuses = None
    ((number,),) = pipeline.rows("SELECT id FROM walbrook.consumers")
    pipeline.state.execute("UPDATE walbrook.events SET due_at = now()")
    pipeline.state.execute("SELECT walbrook.pause('hook')")
    assert claim(pipeline.state, number, pipeline.settings.term, "h").num_rows == 0
    pipeline.state.execute("SELECT walbrook.resume('hook')")
    assert claim(pipeline.state, number, pipeline.settings.term - 1, "h").num_rows == 0
    assert claim(pipeline.state, number, pipeline.settings.term, "h").num_rows == 1


def test_a_schema_change_that_is_too_large_is_a_dead_letter_like_any_change(
    pipeline_of: Callable[..., LogPipeline], tmp_path: Path
) -> None:
    file = {"type": "file", "path": str(tmp_path / "out")}
    pipeline = pipeline_of(
        destination=file, actions=["insert", "schema_change"], max_message_bytes=3_000
    )
    wide: list[tuple[str, int] | tuple[str, int, bool]] = [("id", 23, True)]
    wide += [(f"a_column_with_a_long_name_{n}", 25) for n in range(60)]
    pipeline.write(*insert(1, (1, "a1")))
    pipeline.write(
        pgoutput.relation(1, "public", "item", wide),
        *transaction(0x200, pgoutput.insert(1, ["2", *[None] * 60])),
    )
    while pipeline.next_batch < pipeline.log.next_batch:
        with suppress(TransientError):
            pipeline.take()
        pipeline.start()
    assert [m["action"] for m in arrived(tmp_path / "out")] == ["insert", "insert"]
    letters = "SELECT action, commit_lsn::text, commit_idx FROM walbrook.dead_letters"
    assert pipeline.rows(letters) == [("schema_change", "0/1FF", 1)]


def test_a_gap_message_that_is_refused_waits_and_holds_back_no_other(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of()
    pipeline.write(*insert(1, (1, "a1")))
    pipeline.take()
    endpoint.refuses = lambda messages: any(m["action"] == "gap" for m in messages)
    pipeline.state.execute(
        "INSERT INTO walbrook.gaps (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason) "
        "VALUES ('shop', 'hook', '0/100', 0, '0/100', 1, 'discarded')"
    )
    pipeline.start()
    pipeline.write(*insert(2, (1, "a2")))
    pipeline.take()
    assert names(endpoint) == ["a1", "a2"]
    assert pipeline.rows("SELECT action, deliveries FROM walbrook.events") == [("gap", 1)]
    assert pipeline.rows("SELECT count(*) FROM walbrook.gaps WHERE reported_at IS NULL") == [(0,)]
    endpoint.refuses = None
    redeliver(pipeline)
    gap = endpoint.accepted[-1].messages[0]
    assert gap["metadata"]["idempotency_key"] == "256:0:gap"  # type: ignore[index]


def test_messages_that_may_not_be_tried_again_are_given_up_and_no_others(
    pipeline_of: Callable[..., LogPipeline], endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(max_deliveries=3)
    refusing(endpoint, lambda record: record["name"] != "good")
    pipeline.write(*insert(1, (9, "good"), (1, "a1"), (2, "b1")))
    pipeline.take()
    pipeline.state.execute(
        "UPDATE walbrook.events SET due_at = now(), "
        "deliveries = CASE WHEN record LIKE '%a1%' THEN 7 ELSE 1 END"
    )
    endpoint.refuses = None
    serve_once(pipeline)
    assert names(endpoint) == ["good", "b1"]
    assert queue(pipeline) == []
    assert pipeline.rows("SELECT event ->> 'record_pks' FROM walbrook.dead_letters") == [('["1"]',)]
