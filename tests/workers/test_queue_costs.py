"""What the queues cost the state database: rows read, functions called, connections held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc.connection import Connection, connect
from cdc.connection_pool import ConnectionPool
from cdc.queue.claims import claim
from cdc.queue.groups import BY_KEY
from cdc.state.dead_letters import report_dead_letters
from sinks.pull import PullSink, Queue
from tests import pgoutput
from tests.conformance.messages import batch
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.pull_queue import SOURCE, Puller, make_pull_consumer
from tests.waiting import until
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

WAITING = 30_000
CLAIMED = 1_000
# Each of these groups has a first message that is due, and others behind it.
FILL = """
INSERT INTO walbrook.events
       (consumer, commit_lsn, commit_idx, group_id, due_at, commit_timestamp, xid, table_schema,
        table_name, action, record, record_pks)
SELECT c.id, '0/0'::pg_lsn + n, 0, n %% %(groups)s, CASE WHEN n < %(groups)s THEN now() END,
       now(), 1, 'public', 't', 'insert', '{}', '["1"]'
  FROM walbrook.consumers c, generate_series(0, %(rows)s - 1) n
"""
ROWS_READ = """
SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = %s
"""
CALLS = "SELECT calls FROM pg_stat_xact_user_functions WHERE funcname = %s"
ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])
OPEN = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name LIKE %s"


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    make_pull_consumer(database, "jobs", max_in_flight=2)
    with database.connect() as connection:
        yield connection


def number_of(connection: Connection) -> int:
    ((number,),) = connection.execute("SELECT id FROM walbrook.consumers").fetchall()
    return int(str(number))


@pytest.mark.parametrize("groups", [10, 1_000, WAITING])
def test_a_claim_reads_a_few_rows_for_each_one_it_takes(state: Connection, groups: int) -> None:
    state.execute(FILL, {"groups": groups, "rows": WAITING})
    number = number_of(state)
    with state.transaction():
        rows = claim(state, number, 1, "holder", CLAIMED)
        ((read,),) = state.execute(ROWS_READ, (f"events_{number}",)).fetchall()
    assert rows.num_rows == CLAIMED
    assert int(str(read)) < 10 * CLAIMED


def test_rows_of_a_process_that_is_gone_are_claimed_alone_and_hold_no_others_up(
    state: Connection,
) -> None:
    state.execute(FILL, {"groups": 10, "rows": 100})
    number = number_of(state)
    # The second row of group 0: that process had claimed it together with the first.
    state.execute("UPDATE walbrook.events SET holder = 'gone' WHERE commit_lsn = '0/A'")
    later = "UPDATE walbrook.events SET due_at = due_at + interval '{}' WHERE commit_lsn = '0/0'"
    state.execute(later.format("1 hour").encode())
    rows = claim(state, number, 1, "holder", 50)
    assert rows.num_rows == 50
    assert 0xA not in rows.column("commit_lsn").to_pylist()

    state.execute(later.format("-1 hour").encode())
    rows = claim(state, number, 1, "holder", 50)
    assert rows.column("commit_lsn").to_pylist() == [*range(10)], "up to that row"
    state.execute("DELETE FROM walbrook.events WHERE commit_lsn < '0/A'")
    state.execute("UPDATE walbrook.events SET due_at = now() WHERE commit_lsn = '0/A'")
    rows = claim(state, number, 1, "holder", 50)
    assert rows.column("commit_lsn").to_pylist() == [0xA]


def test_a_claim_takes_the_beginning_of_each_group(state: Connection) -> None:
    state.execute(FILL, {"groups": 3, "rows": 100})
    rows = claim(state, number_of(state), 1, "holder", 10)
    taken: dict[int, list[int]] = {}
    for lsn, group in zip(
        rows.column("commit_lsn").to_pylist(), rows.column("group_id").to_pylist(), strict=True
    ):
        taken.setdefault(group, []).append(lsn)
    assert rows.num_rows == 10
    for group, lsns in taken.items():
        assert lsns == list(range(group, group + 3 * len(lsns), 3))


def test_a_worker_that_waits_at_max_in_flight_claims_ever_less_often(
    state: Connection, database: Database
) -> None:
    worker = Puller(database)
    worker.put(1, [1, 2, 3])
    assert len(worker.receive(2)) == 2
    with worker.connection.transaction():
        worker.connection.execute("SET LOCAL track_functions = 'pl'")
        assert worker.receive(1, wait="1.2s") == []
        ((calls,),) = worker.connection.execute(CALLS, ("claim",)).fetchall()
    worker.close()
    assert 2 <= calls <= 6


def test_pull_consumers_of_a_process_share_a_few_connections(
    state: Connection, database: Database
) -> None:
    names = [f"many_{number}" for number in range(12)]
    make_pull_consumer(database, *names)
    sinks = [PullSink(Queue(database.dsn, SOURCE, BY_KEY), consumer=name) for name in names]
    threads = [threading.Thread(target=sink.deliver, args=(batch(0, 20),)) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((stored,),) = state.execute(
        "SELECT count(DISTINCT consumer) FROM walbrook.pull_messages"
    ).fetchall()
    assert stored == len(names)

    def held() -> int:
        ((count,),) = state.execute(OPEN, (database.name, "walbrook:pull%")).fetchall()
        return int(str(count))

    # A backend outlives its connection by a moment.
    until("all but a few connections to be closed", lambda: held() <= 4)
    for sink in sinks:
        sink.close()


def test_a_connection_that_is_left_in_a_transaction_is_not_used_again(database: Database) -> None:
    pool = ConnectionPool(database.dsn, name="test")
    with pool.connection() as first:
        first.execute("SELECT 1")
    with pool.connection() as again:
        assert again is first
        again.execute("BEGIN")
    with pool.connection() as other:
        assert other is not first
    assert first.closed
    pool.close()
    assert other.closed


def test_a_queue_is_served_over_one_connection_claim_after_claim(
    database: Database, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counted(dsn: str, *, name: str) -> Connection:
        opened.append(name)
        return connect(dsn, name=name)

    with database.connect() as state:
        hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "batch": False}
        pipeline = LogPipeline(
            state, tmp_path, hook={"destination": hook, "retry": {"first_ms": 1}}
        )
        endpoint.refuses = lambda _messages: True
        rows = [pgoutput.insert(1, ["1"])] * 25  # one group: the rest waits for the first
        pipeline.write(ITEM, *transaction(0x100, *rows))
        pipeline.take()
        endpoint.refuses = None
        pipeline.connections.close()
        monkeypatch.setattr("cdc.connection_pool.connect", counted)

        def empty() -> bool:
            pipeline.workers["hook"].step(0.0)
            return not state.execute("SELECT FROM walbrook.events").fetchall()

        until("an empty queue", empty)
        pipeline.close()
    assert len(endpoint.accepted) == 25
    assert len(opened) == 1


class Counting(psycopg.Cursor[Any]):
    """Counts the statements of all connections that use it."""

    statements = 0

    def execute(self, *arguments: Any, **named: Any) -> Any:
        Counting.statements += 1
        return super().execute(*arguments, **named)


def test_consumers_without_dead_letters_cost_one_query(database: Database) -> None:
    make_pull_consumer(database, *(f"many_{number}" for number in range(12)))
    with database.connect() as state:
        state.cursor_factory = Counting
        Counting.statements = 0
        report_dead_letters(state, SOURCE, 1)
    assert Counting.statements == 1
