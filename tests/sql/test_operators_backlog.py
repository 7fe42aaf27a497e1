"""Operators and large or unusual queues: what an act reads, and how it tells what is given up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cdc.config import SinkConfig
from cdc.connection import Connection
from cdc.cursor import ORIGIN
from cdc.queue.groups import BY_KEY
from cdc.state import operators
from cdc.state.operators import COUNTED_MAX, State
from cdc.state.positions import Settlement, consumer_cursors, settle
from sinks.pull import PullSink, Queue
from spark_pipeline.delivery.deliver import Origin, Share
from spark_pipeline.delivery.gaps import pass_gaps
from tests.conformance.messages import batch, cursor_of
from tests.fix_postgres import Database
from tests.operators import Operator
from tests.pull_queue import SOURCE, Puller, make_pull_consumer

BACKLOG = 40_000
FILL = f"""
INSERT INTO walbrook.pull_messages (consumer, commit_lsn, commit_idx, bytes, commit_timestamp,
       table_schema, table_name, action, message)
SELECT c.id, '0/1000'::pg_lsn + n, 0, 9, now(), 'public', 'item', 'insert', '{{}}'
  FROM walbrook.consumers c, generate_series(1, {BACKLOG}) n
"""
LETTERS = f"""
INSERT INTO walbrook.dead_letters (source, consumer, commit_lsn, commit_idx, commit_timestamp,
       table_schema, table_name, action, kind, error, payload)
SELECT c.source, c.name, '0/1000'::pg_lsn + n, 0, now(), 'public', 'item', 'insert', 'decode', 'e',
       ''
  FROM walbrook.consumers c, generate_series(1, {BACKLOG}) n
"""
READ = """
SELECT sum(seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables
 WHERE schemaname = 'walbrook'
"""


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    make_pull_consumer(database, "jobs")
    with database.connect() as connection:
        yield connection


def test_an_act_reads_no_more_of_a_large_backlog_than_it_counts(state: Connection) -> None:
    state.execute(FILL.encode())
    state.execute(LETTERS.encode())
    ((letter,),) = state.execute("SELECT min(id) FROM walbrook.dead_letters").fetchall()
    acts: list[Callable[[], State]] = [
        lambda: operators.pause(state, "jobs"),
        lambda: operators.resume(state, "jobs"),
        lambda: operators.discard(state, "jobs", int(str(letter))),
    ]
    for act in acts:
        with state.transaction():
            before = rows_read(state)
            found = act()
            read = rows_read(state) - before
        assert (found["waiting"], found["dead_letters"]) == (COUNTED_MAX, COUNTED_MAX)
        assert read < 3 * COUNTED_MAX


def rows_read(state: Connection) -> int:
    ((read,),) = state.execute(READ).fetchall()
    return int(str(read))


def share_of_jobs(database: Database) -> Share:
    sink = SinkConfig.model_validate(
        {"name": "jobs", "database": SOURCE, "destination": {"type": "pull"}}
    )
    origin = Origin(SOURCE, "h", "d")
    return Share(sink, origin, database.name, ORIGIN, ORIGIN, [], state_dsn=database.dsn)


@pytest.mark.parametrize("handed_out", [False, True])
def test_the_gap_of_a_pull_consumer_that_had_everything_stored_arrives(
    state: Connection, database: Database, handed_out: bool
) -> None:
    stored = batch(0, 10)
    sink = PullSink(Queue(database.dsn, SOURCE, BY_KEY), consumer="jobs")
    assert sink.deliver(stored).error is None
    last = cursor_of(9)
    end = last._replace(idx=last.idx + 1)
    began = consumer_cursors(state, SOURCE)["jobs"]
    settle(state, source=SOURCE, term=1, read_to=end, consumers={"jobs": Settlement(began, end)})
    worker = Puller(database)
    if handed_out:
        assert len(worker.receive(10)) == 10
    for round_ in range(2):
        found = operators.discard_all(state, "jobs")
        assert (found["affected"], found["waiting"]) == (1 if round_ else 10, 0)
        pass_gaps(state, ORIGIN, source=SOURCE, term=1, shares={"jobs": share_of_jobs(database)})
        (told,) = worker.receive(10)
        assert told.action == "gap"
    worker.ack([told])
    assert operators.discard_all(state, "jobs")["affected"] == 0
    ((gaps, unreported),) = state.execute(
        "SELECT count(*), count(*) FILTER (WHERE reported_at IS NULL) FROM walbrook.gaps"
    ).fetchall()
    assert (gaps, unreported) == (2, 0), "nothing was left to give up"
    # What comes behind the gap is stored as ever.
    assert sink.deliver(batch(14, 20)).absorbed == 0
    assert len(worker.receive(10)) == 6
    sink.close()
    worker.close()


NUMBERED = """
INSERT INTO walbrook.event_sources (consumer, ledger, cursor_lsn, cursor_idx, read_lsn, read_idx)
SELECT c.id, c.ledger, c.cursor_lsn, c.cursor_idx, c.cursor_lsn, c.cursor_idx
  FROM walbrook.consumers c WHERE c.name = 'hook';
UPDATE walbrook.events SET action = 'watermark' WHERE commit_lsn = '0/100'
"""


@pytest.fixture
def operator(database: Database) -> Iterator[Operator]:
    with database.connect() as connection:
        yield Operator(database, connection)


@pytest.mark.parametrize(
    ("change", "begins"), [(None, "0/500:0"), ("0/200", "0/200:0")], ids=["alone", "with a change"]
)
def test_the_number_of_a_watermark_is_not_where_a_gap_begins(
    operator: Operator, change: str | None, begins: str
) -> None:
    operator.waits("0/100", idx=7, due="2026-01-01")
    if change is not None:
        operator.waits(change, due="2026-01-01")
    operator.connection.execute(NUMBERED)
    found: dict[str, Any] = operator.act("discard_all('hook')")
    assert (found["affected"], found["waiting"]) == (2 if change else 1, 0)
    assert operator.gaps() == [("hook", begins, "0/900:3")]


def test_the_notification_of_an_ended_source_has_the_members_of_every_act(
    operator: Operator,
) -> None:
    operator.connection.execute(NUMBERED)
    with operator.database.connect() as listener:
        listener.execute("LISTEN walbrook")
        operator.act("pause('hook')")
        operator.connection.execute("SELECT walbrook.finish_source('hook', 'shop')")
        notes = [json.loads(note.payload) for note in listener.notifies(timeout=5, stop_after=2)]
    assert [note.pop("action") for note in notes] == ["pause", "finish_source"]
    assert notes == [{"source": "shop", "consumer": "hook"}] * 2
