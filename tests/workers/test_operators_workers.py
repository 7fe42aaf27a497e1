"""Workers on a log, without Spark, while an operator acts: paused, moved, or owing a gap."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.queue.pull_consumers import register_pulls
from cdc.state.positions import (
    MovedError,
    Settlement,
    consumer_cursors,
    restart_cursor,
    settle,
)
from spark_pipeline.stage.notifications import heard, listen
from spark_pipeline.workers.state import Reason
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.log_pipeline import SOURCE, LogPipeline
from tests.stage_threads import running
from tests.waiting import until
from tests.worker_rows import ids, write

pytestmark = pytest.mark.migrated


def test_a_paused_consumer_is_not_served_and_holds_only_the_restart_cursor(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, first={}, held={})
    state.execute("SELECT walbrook.pause('held')")
    pipeline.start()
    assert pipeline.workers["held"].current.reason is Reason.PAUSED
    for number in (1, 2):
        write(pipeline, number)
        pipeline.take()
    assert ids(tmp_path / "first") == [1, 2]
    assert ids(tmp_path / "held") == []
    assert restart_cursor(state, SOURCE) == Cursor(8, 0), "what it lacks could be forgotten"
    pipeline.begin_again()
    write(pipeline, 3)
    pipeline.take()
    assert ids(tmp_path / "held") == [], "it is served though it is paused"
    state.execute("SELECT walbrook.resume('held')")
    pipeline.begin_again()
    write(pipeline, 4)
    pipeline.take()
    assert ids(tmp_path / "first") == ids(tmp_path / "held") == [1, 2, 3, 4]
    assert restart_cursor(state, SOURCE) == consumer_cursors(state, SOURCE)["held"]
    pipeline.close()


def test_a_consumer_gets_nothing_before_its_gap_was_reported(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, first={}, other={})
    write(pipeline, 1)
    pipeline.take()
    state.execute("UPDATE walbrook.sources SET log_lsn = '0/100', log_idx = 1")
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    state.execute("SELECT walbrook.pause('other')")
    state.execute("SELECT walbrook.discard_all('other')")
    told = "SELECT reported_at IS NOT NULL FROM walbrook.gaps"
    pipeline.start()
    assert state.execute(told).fetchall() == [(False,)], "it is paused"
    state.execute("SELECT walbrook.resume('other')")
    pipeline.begin_again()
    assert state.execute(told).fetchall() == [(True,)], "before it gets anything else"
    write(pipeline, 2)
    pipeline.take()
    write(pipeline, 3)
    pipeline.take()
    assert ids(tmp_path / "other")[1:] == [2, 3], "behind the gap all goes on"
    pipeline.close()


def test_a_pull_consumer_that_is_served_is_reported_its_gap(
    state: Connection, tmp_path: Path
) -> None:
    """It takes nothing for a cursor that was moved; the gap is behind such a move."""
    pipeline = LogPipeline(state, tmp_path, jobs={"destination": {"type": "pull"}})
    state.execute("UPDATE walbrook.consumers SET destination = 'pull'")
    register_pulls(state, SOURCE, pipeline.sinks, hostname="h", database="d")
    write(pipeline, 1)
    pipeline.take()
    state.execute("UPDATE walbrook.sources SET log_lsn = '0/200', log_idx = 1")
    state.execute("SELECT walbrook.discard_all('jobs')")
    pipeline.begin(pipeline.workers["jobs"])
    write(pipeline, 3)
    pipeline.take()
    stored = "SELECT commit_lsn::text, action FROM walbrook.pull_messages ORDER BY commit_lsn"
    assert state.execute(stored).fetchall() == [("0/200", "gap"), ("0/300", "insert")]
    pipeline.close()


@pytest.mark.parametrize("act", ["rewind('hook', to_earliest => true)", "discard_all('hook')"])
def test_a_slow_delivery_is_not_settled_over_an_operators_command(
    state: Connection, endpoint: Endpoint, tmp_path: Path, act: str
) -> None:
    hook = {"destination": {"type": "webhook", "url": endpoint.url, "timeout_ms": 60000}}
    pipeline = LogPipeline(state, tmp_path, hook=hook, files={})
    go_on = threading.Event()
    with running(pipeline):
        write(pipeline, 1)
        until("the first", lambda: len(endpoint.accepted) == 1)
        until("its settling", lambda: consumer_cursors(state, SOURCE)["hook"] == Cursor(0x101, 0))
        endpoint.script.append(Scripted(after=go_on))
        write(pipeline, 2)
        until("the slow one to begin", lambda: len(endpoint.requests) == 2)
        state.execute("UPDATE walbrook.sources SET log_lsn = '0/300', log_idx = 1")
        state.execute(f"SELECT walbrook.{act}".encode())
        moved = consumer_cursors(state, SOURCE)["hook"]
        worker = pipeline.workers["hook"]
        go_on.set()

        def has_heard() -> bool:
            worker.nudge()
            return pipeline.settler.settled("hook") == moved

        until("it to hear of it", has_heard)
    cursor = consumer_cursors(state, SOURCE)["hook"]
    assert cursor >= moved
    sent = [m["record"]["id"] for r in endpoint.accepted for m in r.messages if "id" in m["record"]]  # type: ignore[index, operator]
    assert sent[:2] == [1, 2]
    pipeline.close()


def test_notifications_of_operators_are_received_and_no_others(
    state: Connection, database: Database, tmp_path: Path
) -> None:
    LogPipeline(state, tmp_path, files={}).close()
    with database.connect() as listener:
        listen(listener)
        assert heard(listener, SOURCE) is None
        for act, resumed in (("pause", set()), ("resume", {"files"})):
            state.execute(f"SELECT walbrook.{act}('files')".encode())
            listener.execute("SELECT 1")  # with its answer comes what was told before
            told = heard(listener, SOURCE)
            assert told is not None
            assert told.resumed == resumed
        state.execute("SELECT walbrook.resume('files')")
        listener.execute("SELECT 1")
        assert heard(listener, "crm") is None
        state.execute("NOTIFY walbrook, 'what is this'")
        until("something that may concern us", lambda: heard(listener, SOURCE))
        assert heard(listener, SOURCE) is None, "it was heard once"


_ACTS = ("pause('a')", "resume('a')", "discard_all('a')", "redeliver('a')", "discard('a')",
         "rewind('a', to_earliest => true, destination => 'truncate')",
         "pause('b')", "resume('b')", "discard_all('b')",
         "rewind('b', to_earliest => true, destination => 'new_generation')")  # fmt: skip


def test_operators_and_settling_never_wait_for_each_other_in_a_circle(
    state: Connection, database: Database, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, a={}, b={})
    state.execute("UPDATE walbrook.sources SET log_lsn = '0/900', log_idx = 0")
    failures: list[Exception] = []

    def operate(seed: int) -> None:
        chosen = random.Random(seed)
        try:
            with database.connect() as connection:
                for _ in range(60):
                    connection.execute(f"SELECT walbrook.{chosen.choice(_ACTS)}".encode())
        except Exception as error:
            failures.append(error)

    operators = [threading.Thread(target=operate, args=(seed,)) for seed in range(4)]
    for operator in operators:
        operator.start()
    refused = settled = 0
    while any(operator.is_alive() for operator in operators):
        standing = consumer_cursors(state, SOURCE)
        moves = {name: Settlement(at, Cursor(at.lsn + 8, 0)) for name, at in standing.items()}
        try:
            settle(
                state,
                source=SOURCE,
                term=pipeline.settings.term,
                read_to=Cursor(0x1000, 0),
                consumers=moves,
            )
            settled += 1
        except MovedError:
            refused += 1
    for operator in operators:
        operator.join()
    assert failures == []
    assert settled
    assert refused, "they never met"
    pipeline.close()
