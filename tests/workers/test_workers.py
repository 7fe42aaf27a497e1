"""Workers on a log: who is behind, moved, paused, failing or slow, and that nobody else waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from pyspark.sql import SparkSession

from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.state.positions import consumer_cursors, restart_cursor
from cdc.state.workers import WorkerState
from spark_pipeline.feed.plan import DecodingPlan
from spark_pipeline.feed.planner import Planner
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.slices.exchange import PlannedRange
from spark_pipeline.stage.status import slow_step
from spark_pipeline.stage.worker import Worker
from spark_pipeline.workers import base as base_module
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.state import Reason, Step, Work
from tests import pgoutput
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.log_pipeline import SOURCE, LogPipeline
from tests.stage_threads import running
from tests.waiting import until
from tests.wire_messages import transaction
from tests.worker_rows import ITEM, ids, write

pytestmark = pytest.mark.migrated

PipelineOf = Callable[..., LogPipeline]


@pytest.fixture
def pipeline_of(state: Connection, tmp_path: Path) -> Iterator[PipelineOf]:
    made: list[LogPipeline] = []

    def make(**sinks: dict[str, Any]) -> LogPipeline:
        made.append(LogPipeline(state, tmp_path, **sinks))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()


def sent(endpoint: Endpoint) -> list[int]:
    return [m["record"]["id"] for r in endpoint.accepted for m in r.messages]  # type: ignore[index]


def hook(endpoint: Endpoint) -> dict[str, Any]:
    return {"destination": {"type": "webhook", "url": endpoint.url, "max_retries": 0}}


def standing(pipeline: LogPipeline, name: str) -> tuple[Any, ...]:
    (found,) = pipeline.rows(
        f"SELECT state, state_reason, breaker FROM walbrook.consumers WHERE name = '{name}'"
    )
    return found


def block(directory: Path) -> Path:
    """Let a file sink fail until this file is removed."""
    directory.write_text("a file where the sink wants a directory")
    return directory


def test_a_slow_worker_delivers_at_once_what_the_feed_got_in_the_meantime(
    pipeline_of: PipelineOf, endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(slow=hook(endpoint))
    worker = pipeline.workers["slow"]
    assert pipeline.feed.join("slow", pipeline.feed.history, worker.batch)
    write(pipeline, *range(1, 8))
    for batch in range(worker.batch, worker.batch + 7):
        pipeline.body.take_range(PlannedRange(batch, batch + 1, 1))
    assert pipeline.feed.depth.ranges == 7
    assert worker.serve_next(0.0)
    assert sent(endpoint) == [1, 2, 3, 4, 5, 6, 7], "in order, by one call of its sink"
    assert worker.cursor == pipeline.feed.high
    assert pipeline.feed.depth.ranges == 0
    assert not worker.serve_next(0.0)


def test_a_worker_that_is_behind_reads_the_log_and_joins_the_feed_without_repeat_or_loss(
    pipeline_of: PipelineOf, tmp_path: Path
) -> None:
    pipeline = pipeline_of(first={}, later={})
    later = pipeline.workers["later"]
    pipeline.served.discard("later")
    pipeline.feed.leave("later")
    for number in range(1, 6):
        write(pipeline, number)
        pipeline.take()
    assert ids(tmp_path / "later") == []
    pipeline.served.add("later")
    pipeline.serve(3)
    assert ids(tmp_path / "later") == [1, 2, 3, 4, 5], "little is read in one range"
    assert (later.current.state, later.current.reason) == (WorkerState.CATCHING_UP, Reason.BEHIND)
    write(pipeline, 6)
    pipeline.take()
    assert later.current.state == WorkerState.LIVE
    assert "later" in pipeline.feed.readers
    assert ids(tmp_path / "first") == ids(tmp_path / "later") == [1, 2, 3, 4, 5, 6]
    assert len(set(consumer_cursors(pipeline.state, SOURCE).values())) == 1
    assert pipeline.rows("SELECT DISTINCT delivered, absorbed FROM walbrook.consumers") == [(6, 0)]


def test_a_worker_within_a_range_of_the_feed_gets_only_what_it_lacks(
    pipeline_of: PipelineOf, tmp_path: Path
) -> None:
    pipeline = pipeline_of(whole={}, rest={})
    pipeline.state.execute(
        "UPDATE walbrook.consumers SET cursor_lsn = '0/200', cursor_idx = 1 WHERE name = 'rest'"
    )
    write(pipeline, 1, 2, 3, 4)
    pipeline.start()
    pipeline.take()
    assert ids(tmp_path / "whole") == [1, 2, 3, 4]
    assert ids(tmp_path / "rest") == [3, 4]


@pytest.mark.parametrize("to", [8, 0x250])
def test_a_worker_whose_cursor_was_moved_begins_again_there_and_holds_back_no_other(
    pipeline_of: PipelineOf, tmp_path: Path, endpoint: Endpoint, to: int
) -> None:
    pipeline = pipeline_of(files={}, hook=hook(endpoint))
    write(pipeline, 1, 2)
    pipeline.take()
    pipeline.state.execute(
        "UPDATE walbrook.consumers SET cursor_lsn = %s, cursor_idx = 0 WHERE name = 'hook'",
        (f"0/{to:X}",),
    )
    write(pipeline, 3)
    pipeline.take()  # by a worker that has not heard of it, and cannot settle
    assert consumer_cursors(pipeline.state, SOURCE)["hook"] == Cursor(to, 0)
    before = len(sent(endpoint))
    write(pipeline, 4)
    pipeline.take()  # now it hears of it, and begins again
    pipeline.take()
    again = [1, 2, 3, 4] if to == 8 else [3, 4]
    assert sent(endpoint)[before:] == again
    assert ids(tmp_path / "files") == [1, 2, 3, 4]
    cursors = consumer_cursors(pipeline.state, SOURCE)
    assert cursors["hook"] == cursors["files"]


def test_a_paused_worker_gets_nothing_and_goes_on_where_it_was_when_it_is_resumed(
    pipeline_of: PipelineOf, tmp_path: Path
) -> None:
    pipeline = pipeline_of(first={}, held={})
    with running(pipeline):
        write(pipeline, 1)
        until("both", lambda: ids(tmp_path / "held") == ids(tmp_path / "first") == [1])
        pipeline.state.execute("SELECT walbrook.pause('held')")
        pipeline.workers["held"].nudge()
        until("the pause", lambda: standing(pipeline, "held")[:2] == ("paused", "it is paused"))
        settled = consumer_cursors(pipeline.state, SOURCE)["held"]
        write(pipeline, 2, 3)
        until("the other", lambda: ids(tmp_path / "first") == [1, 2, 3])
        assert ids(tmp_path / "held") == [1]
        assert restart_cursor(pipeline.state, SOURCE) <= settled, "what it lacks could be forgotten"
        pipeline.state.execute("SELECT walbrook.resume('held')")
        pipeline.workers["held"].nudge()
        until("the rest", lambda: ids(tmp_path / "held") == [1, 2, 3])
        write(pipeline, 4)
        until("it to be live", lambda: standing(pipeline, "held") == ("live", None, "closed"))
        until("the last", lambda: ids(tmp_path / "held") == [1, 2, 3, 4])
    assert len(set(consumer_cursors(pipeline.state, SOURCE).values())) == 1


def test_a_sink_that_fails_is_tried_with_growing_pauses_and_holds_back_no_other(
    pipeline_of: PipelineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_module, "_BACKOFF_FIRST_S", 0.02)
    pipeline = pipeline_of(good={}, bad={})
    blocked = block(tmp_path / "bad")
    pauses: list[float] = []
    failed = Worker.failed

    def noted(worker: Worker, error: Exception) -> float:
        until_s = failed(worker, error)
        pauses.append(worker.current.status().retry_s or 0.0)
        return until_s

    monkeypatch.setattr(Worker, "failed", noted)
    with running(pipeline):
        write(pipeline, 1)
        until("several tries", lambda: len(pauses) >= 5)
        write(pipeline, 2)
        until("the other", lambda: ids(tmp_path / "good") == [1, 2])
        until("the breaker to open", lambda: standing(pipeline, "bad")[2] == "open")
        held, reason, _ = standing(pipeline, "bad")
        assert (held, reason.startswith("its sink failed: ")) == ("waiting", True)
        told = "SELECT consumer FROM walbrook.health WHERE kind = 'worker_failing'"
        assert pipeline.rows(told) == [("bad",)]
        ((error,),) = pipeline.rows("SELECT last_error FROM walbrook.consumers WHERE name = 'bad'")
        assert "File exists" in error
        blocked.unlink()
        until("the rest", lambda: ids(blocked) == [1, 2])
        until("the breaker to close", lambda: standing(pipeline, "bad")[2] == "closed")
        until("health to be good", lambda: pipeline.rows(told) == [])
    assert pauses[4] > 4 * pauses[0]
    counts = pipeline.rows("SELECT DISTINCT delivered, last_error FROM walbrook.consumers")
    assert counts == [(2, None)]


def test_a_breaker_is_half_open_while_one_that_failed_is_tried(
    pipeline_of: PipelineOf, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_module, "_BACKOFF_FIRST_S", 0.02)
    pipeline = pipeline_of(hook=hook(endpoint))
    go_on = threading.Event()
    endpoint.script += [Scripted(503), Scripted(after=go_on)]
    with running(pipeline):
        write(pipeline, 1)
        until("the second try", lambda: standing(pipeline, "hook")[2] == "half_open")
        go_on.set()
        until("the breaker to close", lambda: standing(pipeline, "hook")[2] == "closed")
    assert sent(endpoint) == [1]


def test_a_message_that_is_too_large_is_a_dead_letter_and_the_same_range_goes_on(
    pipeline_of: PipelineOf, tmp_path: Path
) -> None:
    pipeline = pipeline_of(small={"max_message_bytes": 2_000}, all={})
    rows = [pgoutput.insert(1, [str(n), "x" * 5_000 if n == 2 else "n"]) for n in (1, 2, 3)]
    pipeline.write(ITEM, *transaction(0x100, *rows))
    write(pipeline, 4)
    pipeline.take()
    assert ids(tmp_path / "small") == [1, 3, 4]
    assert ids(tmp_path / "all") == [1, 2, 3, 4]
    letters = pipeline.rows(
        "SELECT consumer, commit_lsn::text, commit_idx FROM walbrook.dead_letters"
    )
    assert letters == [("small", "0/100", 1)]
    assert pipeline.workers["small"].current.state is WorkerState.LIVE
    assert len(set(consumer_cursors(pipeline.state, SOURCE).values())) == 1


def test_after_several_processes_that_settled_nothing_it_is_served_outside_the_driver(
    pipeline_of: PipelineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[PlannedRange] = []

    def in_a_job(planner: Planner, planned: PlannedRange) -> DecodingPlan:
        jobs.append(planned)
        return planner.in_driver(planned)  # there is no Spark here

    monkeypatch.setattr(Planner, "as_job", in_a_job)
    pipeline = pipeline_of(all={})
    for _ in range(3):
        pipeline.start_pipeline_again()
    context = replace(pipeline.context, spark=LateSession.of(cast(SparkSession, object())))
    worker = Worker(pipeline.sinks[0], context, attempts=pipeline.feed_run.consumers["all"])
    assert worker.begin()
    for number in (1, 2):
        write(pipeline, number)
        assert worker.serve_next(0.0) or number == 2
        pipeline.settler.write()
    assert jobs == [PlannedRange(0, 1, 1)], "it settled something: nothing is suspicious any more"
    assert ids(tmp_path / "all") == [1]
    assert "all" in pipeline.feed.readers
    assert pipeline.rows("SELECT attempts FROM walbrook.consumers") == [(0,)]
    worker.close()


def test_a_slow_sink_holds_back_no_other_and_gets_all_of_it_in_the_end(
    pipeline_of: PipelineOf, tmp_path: Path, endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(quick={}, slow=hook(endpoint))
    pipeline.feed.bytes_max, pipeline.feed.patience_s = 1, 0.1  # one range at a time
    go_on = threading.Event()
    endpoint.script.append(Scripted(after=go_on))
    with running(pipeline):
        for number in range(1, 11):
            write(pipeline, number)
            until("the quick one", lambda: ids(tmp_path / "quick")[-1:] == [number])  # noqa: B023
        until(
            "it to be settled",
            lambda: consumer_cursors(pipeline.state, SOURCE)["quick"].lsn > 0x900,
        )
        assert len(endpoint.requests) == 1, "it is at its first request"
        assert consumer_cursors(pipeline.state, SOURCE)["slow"] == Cursor(8, 0)
        go_on.set()
        until("the slow one", lambda: sent(endpoint) == list(range(1, 11)))
        write(pipeline, 11)
        until("it to be live", lambda: standing(pipeline, "slow")[0] == "live")
        until("the last", lambda: sent(endpoint) == list(range(1, 12)))
    assert ids(tmp_path / "quick") == list(range(1, 12))
    assert len(set(consumer_cursors(pipeline.state, SOURCE).values())) == 1


def test_a_deferred_worker_waits_and_goes_on_when_it_is_resumed(
    pipeline_of: PipelineOf, tmp_path: Path
) -> None:
    pipeline = pipeline_of(first={}, low={})
    with running(pipeline):
        write(pipeline, 1)
        until("both", lambda: ids(tmp_path / "low") == ids(tmp_path / "first") == [1])
        pipeline.workers["low"].defer(1e12)
        until(
            "it to wait", lambda: standing(pipeline, "low")[:2] == ("waiting", "deferred: pressure")
        )
        write(pipeline, 2)
        until("the other", lambda: ids(tmp_path / "first") == [1, 2])
        assert ids(tmp_path / "low") == [1]
        pipeline.workers["low"].resume()
        until("the rest", lambda: ids(tmp_path / "low") == [1, 2])


def test_a_retry_goes_out_before_fresh_changes_of_its_group(
    pipeline_of: PipelineOf, endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(hook=hook(endpoint) | {"retry": {"first_ms": 50, "max_ms": 100}})
    endpoint.refuses = lambda messages: any(m["record"]["name"] == "bad" for m in messages)  # type: ignore[index]
    with running(pipeline):
        write(pipeline, 1, name="bad")
        pipeline.write(*transaction(0x200, pgoutput.insert(1, ["2", "good"])))
        until("the other group", lambda: sent(endpoint) == [2])
        pipeline.write(*transaction(0x300, pgoutput.insert(1, ["1", "later"])))
        waits = "SELECT count(*) = 2 FROM walbrook.events"
        until("both to wait", lambda: pipeline.rows(waits) == [(True,)])
        endpoint.refuses = None
        until("all of it", lambda: len(sent(endpoint)) == 3)
        until(
            "an empty queue",
            lambda: pipeline.rows("SELECT count(*) FROM walbrook.events") == [(0,)],
        )
    names = [m["record"]["name"] for r in endpoint.accepted for m in r.messages]  # type: ignore[index]
    assert names == ["good", "bad", "later"]


def test_a_look_that_began_before_messages_were_queued_does_not_hide_them(
    pipeline_of: PipelineOf, endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(
        hook=hook(endpoint) | {"retry": {"first_ms": 600_000, "max_ms": 600_000}}
    )
    retries = pipeline.workers["hook"].retries
    endpoint.refuses = lambda messages: any(m["record"]["name"] == "bad" for m in messages)  # type: ignore[index]
    version = retries.version  # somebody looks at all queues of the source now, and is slow
    write(pipeline, 1, name="bad")
    pipeline.write(*transaction(0x200, pgoutput.insert(1, ["2", "good"])))
    pipeline.take()
    retries.note(None, version)
    pipeline.write(*transaction(0x300, pgoutput.insert(1, ["1", "later"])))
    pipeline.take()
    assert sent(endpoint) == [2], "it passed what waits before it"


def test_a_state_database_that_cannot_be_asked_is_no_failure_of_a_sink(
    pipeline_of: PipelineOf,
) -> None:
    pipeline = pipeline_of(all={})
    worker = pipeline.workers["all"]
    worker.failed(psycopg.OperationalError("gone"))
    assert worker.current.reason is Reason.STATE_UNREACHABLE
    assert worker.current.status().breaker == "closed"
    worker.failed(TransientError("the sink does not answer"))
    assert worker.current.status().breaker == "open"


def test_a_settlement_that_waits_is_work_that_can_be_overdue(
    pipeline_of: PipelineOf, database: Database, endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(hook=hook(endpoint))
    endpoint.refuses = lambda _messages: True  # what is refused is settled by the worker itself
    current = pipeline.workers["hook"].current
    with running(pipeline):
        with database.connect() as other, other.transaction():
            other.execute("SELECT FROM walbrook.consumers FOR UPDATE")
            write(pipeline, 1)
            until("it to settle", lambda: current.step and current.step.work is Work.SETTLEMENT)
        until("its end", lambda: current.step is None)
    told = slow_step("hook", Work.SETTLEMENT, 61.0, 60.0)
    assert told.what.startswith("a settlement of hook has been under way for more than 60 s")


def test_work_within_other_work_is_a_part_of_it(pipeline_of: PipelineOf) -> None:
    current = pipeline_of(all={}).workers["all"].current
    with current.doing(Work.DELIVERY):
        outer = current.step
        with current.doing(Work.SETTLEMENT):
            assert current.step is outer
        assert isinstance(outer, Step)
    assert current.step is None


@pytest.mark.parametrize("where", ["failed", "_leave"])
def test_a_worker_goes_on_after_an_error_without_a_known_cause(
    pipeline_of: PipelineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Noting a failure, or letting go of what it has, breaks once."""
    monkeypatch.setattr(base_module, "_BACKOFF_FIRST_S", 0.02)
    pipeline = pipeline_of(all={})
    blocked, broken = block(tmp_path / "all"), threading.Event()
    real = getattr(Worker, where)

    def breaks_once(worker: Worker, *given: Any) -> Any:
        if pipeline.log.next_batch and not broken.is_set():
            broken.set()
            raise LookupError("nobody foresaw this")
        return real(worker, *given)

    monkeypatch.setattr(Worker, where, breaks_once)
    with running(pipeline):
        write(pipeline, 1)
        until("the error", broken.is_set)
        blocked.unlink()
        until("the change", lambda: ids(tmp_path / "all") == [1])


def test_fresh_changes_have_a_turn_between_claims_of_due_retries(
    pipeline_of: PipelineOf, endpoint: Endpoint
) -> None:
    quick = {"first_ms": 1, "max_ms": 1}
    pipeline = pipeline_of(hook=hook(endpoint) | {"retry": quick, "batch_size": 1})
    endpoint.refuses = lambda messages: any(m["record"]["name"] == "bad" for m in messages)  # type: ignore[index]
    rows = [[str(n), "bad" if n % 2 else "good"] for n in range(60)]
    pipeline.write(ITEM, *transaction(0x100, *(pgoutput.insert(1, row) for row in rows)))
    pipeline.take()
    waits = "SELECT count(*) FROM walbrook.events WHERE due_at <= clock_timestamp()"
    until("all to be due", lambda: pipeline.rows(waits) == [(30,)])
    endpoint.refuses = None
    before = len(sent(endpoint))
    write(pipeline, 100)
    worker = pipeline.workers["hook"]
    assert pipeline.feed.join("hook", pipeline.feed.history, worker.batch)
    pipeline.body.take_range(PlannedRange(pipeline.feed.position, pipeline.log.next_batch, 1))
    with pipeline.connections.connection() as state:
        worker.retries.look(state)
    assert worker.step(0.0)
    assert pipeline.rows("SELECT count(*) FROM walbrook.events") == [(20,)], "one claim"
    assert sent(endpoint)[before:][-1] == 100


def test_a_message_taken_out_of_the_queue_holds_nothing_back_any_more(
    pipeline_of: PipelineOf, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue with much in it is not looked at for every range; a new beginning looks again."""
    monkeypatch.setattr("spark_pipeline.workers.retries._MANY", 1)
    monkeypatch.setattr("spark_pipeline.workers.retries._LOOK_S", 1e9)
    pipeline = pipeline_of(
        hook=hook(endpoint) | {"retry": {"first_ms": 600_000, "max_ms": 600_000}}
    )
    endpoint.refuses = lambda messages: any(m["record"]["name"] == "bad" for m in messages)  # type: ignore[index]
    for number, others in ((1, 11), (2, 12)):
        rows = [[str(number), "bad"], [str(others), "good"]]
        pipeline.write(ITEM, *transaction(0x100 * number, *(pgoutput.insert(1, r) for r in rows)))
        pipeline.take()
    write(pipeline, 3)
    pipeline.take()  # now it knows that 1 and 2 wait
    endpoint.refuses = None
    pipeline.state.execute("SELECT walbrook.rewind('hook', to_cursor => '0/200:0')")
    before = len(sent(endpoint))
    pipeline.begin(pipeline.workers["hook"])
    pipeline.take()
    assert sent(endpoint)[before:] == [2, 12, 3]
    waits = pipeline.rows("SELECT commit_lsn::text FROM walbrook.events")
    assert waits == [("0/100",)], "what comes again is held back by what was taken out"


def test_a_run_of_the_feed_that_was_replaced_settles_no_retries(
    pipeline_of: PipelineOf, endpoint: Endpoint
) -> None:
    pipeline = pipeline_of(hook=hook(endpoint) | {"retry": {"first_ms": 1, "max_ms": 1}})
    endpoint.refuses = lambda messages: any(m["record"]["name"] == "bad" for m in messages)  # type: ignore[index]
    rows = [["1", "bad"], ["2", "good"]]
    pipeline.write(ITEM, *transaction(0x100, *(pgoutput.insert(1, row) for row in rows)))
    pipeline.take()
    endpoint.refuses = None
    old, context = pipeline.feed_run.run, pipeline.context
    pipeline.start_pipeline_again()
    retries = RetryQueue(pipeline.sinks[0], pipeline.settings, context.run, context.refusals, old)
    with pytest.raises(TransientError, match="is not the latest"):
        until("a claim", lambda: retries.deliver_due(pipeline.state, threading.Event()))
    assert pipeline.rows("SELECT count(*) FROM walbrook.events") == [(1,)]
