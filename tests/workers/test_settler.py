"""Settling for several workers at once: in order, paced, bounded, and nobody waits for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from cdc.connection import Connection
from cdc.connection_pool import ConnectionPool
from cdc.cursor import Cursor
from cdc.errors import TransientError, WalbrookError
from cdc.state import positions, queue_copy, queued_messages
from cdc.state.dead_letters import DeadLetter
from cdc.state.feeds import FeedFigures, open_feed
from cdc.state.migrate import migrate
from cdc.state.positions import consumer_cursors, register_source, restart_cursor
from cdc.state.queued_messages import EVENT_SCHEMA
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.workers import settler as settler_module
from spark_pipeline.workers.settler import Report, Settler
from tests.fix_postgres import Database
from tests.proxy import Proxy
from tests.waiting import until

pytestmark = pytest.mark.migrated

SOURCE, NAMES = "shop", ["a", "b", "c"]
START = Cursor(8, 0)
READ_TO = Cursor(0x9000, 0)


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        migrate(connection)
        yield connection


def register(state: Connection) -> int:
    return register_source(
        state,
        name=SOURCE,
        slot="slot",
        publication="pub",
        system_identifier="1",
        slot_lsn=START.lsn,
        consumers=NAMES,
    )


class Settling:
    """A settler of its own process, with its thread if it is started."""

    def __init__(self, state: Connection, dsn: str, term: int | None = None) -> None:
        self.term = register(state) if term is None else term
        run = open_feed(state, SOURCE, self.term, NAMES).run
        self.connections = ConnectionPool(dsn, name="test")
        self.settler = Settler(
            SOURCE, self.term, run, dsn, self.connections, lambda: FeedFigures(READ_TO)
        )
        self.at = dict.fromkeys(NAMES, START)
        for name in NAMES:
            self.settler.begin(name, START)
        self._thread = threading.Thread(target=self.settler.run)

    def __enter__(self) -> Settling:
        self._thread.start()
        until("the settler to run", lambda: self.settler._runs)
        return self

    def __exit__(self, *_: object) -> None:
        self.settler.close()
        self._thread.join(30)
        self.connections.close()
        assert not self._thread.is_alive()

    def report_of(
        self, name: str, messages: int = 1, dead: list[DeadLetter] | None = None, rows: int = 1
    ) -> Report:
        """That the next messages were delivered."""
        start, end = self.at[name], Cursor(self.at[name].lsn + messages, 0)
        self.at[name] = end
        outcome = Outcome(name, end, delivered=messages)
        return Report(start, outcome, rows, datetime.now(UTC), dead=dead or (), deliver_ms=1.0)

    def report(self, name: str, messages: int = 1, rows: int = 1) -> None:
        self.settler.report(name, self.report_of(name, messages, rows=rows))


def letter(at: Cursor) -> DeadLetter:
    return DeadLetter(at, datetime.now(UTC), "s", "t", "insert", "delivery", "broke", b"p", None)


def waiting_rows(at: Cursor, count: int = 1) -> pa.RecordBatch:
    """Messages that were refused once, each a group of its own."""
    given = {
        "commit_lsn": at.lsn, "commit_timestamp": datetime.now(UTC), "xid": 1,
        "table_schema": "public", "table_name": "item", "action": "insert", "record": "{}",
        "record_pks": "[]", "whole_table": False, "deliveries": 1, "pause_s": 0.0, "dead": False,
    }  # fmt: skip
    rows = [{**given, "commit_idx": at.idx + n, "group_id": n} for n in range(count)]
    return pa.RecordBatch.from_pylist(rows, schema=EVENT_SCHEMA)


def delivered(state: Connection) -> dict[str, int]:
    rows = state.execute("SELECT name, delivered FROM walbrook.consumers").fetchall()
    return {str(name): int(str(count)) for name, count in rows}


def test_plain_reports_are_merged_and_all_consumers_settled_in_one_transaction(
    state: Connection, database: Database
) -> None:
    settling = Settling(state, database.dsn)
    for name in ("a", "b", "a", "b", "a"):
        settling.report(name, 2)
    assert settling.settler.has_unsettled
    assert consumer_cursors(state, SOURCE)["a"] == START
    assert settling.settler.write()
    assert not settling.settler.has_unsettled
    assert delivered(state) == {"a": 6, "b": 4, "c": 0}
    assert consumer_cursors(state, SOURCE) == {**settling.at}
    assert settling.settler.settled("a") == settling.at["a"]
    written = state.execute(
        "SELECT count(DISTINCT xmin::text) FROM walbrook.consumers WHERE name <> 'c'"
    ).fetchall()
    assert written == [(1,)]
    assert restart_cursor(state, SOURCE) == START, "nothing of c is settled"
    settling.settler.close()
    settling.connections.close()


def test_a_report_with_dead_letters_comes_behind_what_was_reported_before(
    state: Connection, database: Database
) -> None:
    with Settling(state, database.dsn) as settling:
        for _ in range(5):
            settling.report("a", 3)
        at = settling.at["a"]
        assert settling.settler.settle("a", settling.report_of("a", 1, [letter(at)]))
        assert consumer_cursors(state, SOURCE)["a"] == settling.at["a"]
        settling.report("a", 3)
        settling.settler.flush("a")
    assert delivered(state)["a"] == 19
    assert state.execute("SELECT commit_lsn::text FROM walbrook.dead_letters").fetchall() == [
        (f"0/{at.lsn:X}",)
    ]
    assert state.execute("SELECT dead FROM walbrook.consumers WHERE name = 'a'").fetchall() == [
        (1,)
    ]


def test_a_long_settlement_of_one_holds_back_no_other(
    state: Connection, database: Database
) -> None:
    go_on = threading.Event()

    class Slow:
        def __iter__(self) -> Iterator[DeadLetter]:
            go_on.wait(30)
            yield letter(START)

    with Settling(state, database.dsn) as settling:
        first = settling.report_of("a")
        heavy = Report(first.start, first.outcome, 1, first.committed_at, dead=Slow())
        worker = threading.Thread(target=settling.settler.settle, args=("a", heavy))
        worker.start()
        settling.report("b", 4)
        until("the other to be settled", lambda: delivered(state)["b"] == 4)
        assert delivered(state)["a"] == 0
        go_on.set()
        worker.join(30)
    assert delivered(state) == {"a": 1, "b": 4, "c": 0}


def test_many_messages_for_the_queue_of_one_hold_back_no_other(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are written, neither the source nor a consumer is locked for others."""
    under_way, go_on = threading.Event(), threading.Event()
    copy_rows = queue_copy.copy_rows

    def slow(*given: Any) -> None:
        copy_rows(*given)
        under_way.set()
        go_on.wait(30)

    monkeypatch.setattr(queued_messages, "copy_rows", slow)
    with Settling(state, database.dsn) as settling:
        first = settling.report_of("a")
        rows = waiting_rows(START)
        heavy = replace(first, outcome=replace(first.outcome, delivered=0, queued=rows))
        worker = threading.Thread(target=settling.settler.settle, args=("a", heavy))
        worker.start()
        assert under_way.wait(30)
        settling.report("b", 4)
        until("the other to be settled", lambda: delivered(state)["b"] == 4)
        state.execute("SELECT walbrook.pause('a')")  # nor does an operator wait
        assert state.execute("SELECT count(*) FROM walbrook.events").fetchall() == [(0,)]
        go_on.set()
        worker.join(30)
    assert consumer_cursors(state, SOURCE)["a"] == settling.at["a"]
    due = state.execute("SELECT due_at IS NOT NULL, deliveries FROM walbrook.events").fetchall()
    assert due == [(True, 1)]


def test_messages_for_the_queue_of_one_that_was_moved_meanwhile_are_not_kept(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_rows = queue_copy.copy_rows

    def moved(*given: Any) -> None:
        copy_rows(*given)
        state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/5' WHERE name = 'a'")

    monkeypatch.setattr(queued_messages, "copy_rows", moved)
    with Settling(state, database.dsn) as settling:
        first = settling.report_of("a")
        outcome = replace(first.outcome, delivered=0, queued=waiting_rows(START))
        assert not settling.settler.settle("a", replace(first, outcome=outcome))
    assert consumer_cursors(state, SOURCE)["a"] == Cursor(5, 0)
    assert state.execute("SELECT count(*) FROM walbrook.events").fetchall() == [(0,)]


def test_a_cursor_that_was_moved_is_left_there_and_the_others_are_settled(
    state: Connection, database: Database
) -> None:
    with Settling(state, database.dsn) as settling:
        state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/5' WHERE name = 'a'")
        for name in NAMES:
            settling.report(name, 2)
        settling.settler.flush()
        assert [settling.settler.was_moved(name) for name in NAMES] == [True, False, False]
        assert delivered(state) == {"a": 0, "b": 2, "c": 2}
        settling.report("a", 2)  # its worker has not heard of it
        heavy = settling.report_of("a", 1, [letter(settling.at["a"])])
        assert not settling.settler.settle("a", heavy)
        assert consumer_cursors(state, SOURCE)["a"] == Cursor(5, 0)
        assert state.execute("SELECT count(*) FROM walbrook.dead_letters").fetchall() == [(0,)]
        settling.at["a"] = Cursor(5, 0)
        settling.settler.begin("a", Cursor(5, 0))
        assert not settling.settler.was_moved("a")
        settling.report("a", 4)
        settling.settler.flush("a")
    assert delivered(state)["a"] == 4


def test_a_state_database_that_is_away_loses_nothing_that_was_reported(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settler_module, "_AWAY_S", 0.05)
    with Proxy(database.dsn) as proxy:
        with Settling(state, proxy.dsn(database.dsn)) as settling:
            settling.report("a")
            settling.settler.flush()
            proxy.retarget(make_conninfo(database.dsn, port="1"))  # nobody listens there
            settling.report("a", 2)
            until("the failure", lambda: settling.settler.is_away)
            settling.report("a", 3)
            settling.report("b", 4)
            assert settling.settler.failure is None
            proxy.retarget(database.dsn)
            settling.settler.flush()
            until("the answer to be noted", lambda: not settling.settler.is_away)
        assert delivered(state) == {"a": 6, "b": 4, "c": 0}
        assert consumer_cursors(state, SOURCE) == settling.at


def test_a_worker_waits_while_too_much_of_its_consumer_is_unsettled(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settler_module, "_UNSETTLED_ROWS_MAX", 10)
    monkeypatch.setattr(settler_module, "_WAIT_S", 0.02)
    settling = Settling(state, database.dsn)
    settling.report("a", rows=10)
    worker = threading.Thread(target=settling.report, args=("a",))
    worker.start()
    worker.join(0.2)
    assert worker.is_alive()
    settling.report("b")  # it does not wait for another
    assert settling.settler.write()
    worker.join(10)
    assert not worker.is_alive()
    assert settling.settler.write()
    assert delivered(state) == {"a": 2, "b": 1, "c": 0}
    settling.settler.close()
    settling.connections.close()


def test_reports_are_settled_soon_and_at_once_when_they_are_many(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settler_module, "PACE_S", 600.0)
    with Settling(state, database.dsn) as settling:
        settling.report("a")
        assert delivered(state)["a"] == 0
        settling.report("b", rows=settler_module.ROWS_MAX)
        until("what is much", lambda: delivered(state) == {"a": 1, "b": 1, "c": 0})
        settling.report("c")
    assert delivered(state)["c"] == 1, "a stop writes what was reported"


def test_a_report_that_a_worker_waits_for_is_settled_at_once(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settler_module, "PACE_S", 600.0)
    with Settling(state, database.dsn) as settling:
        settling.report("a")
        settling.settler.flush("a")
        assert delivered(state)["a"] == 1


def test_a_report_that_hurries_is_settled_at_once_with_those_before_it(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settler_module, "PACE_S", 600.0)
    with Settling(state, database.dsn) as settling:
        settling.report("a")
        settling.report("b")
        settling.settler.report("b", settling.report_of("b"), at_once=True)
        until("both to be settled", lambda: delivered(state) == {"a": 1, "b": 2, "c": 0})
        settling.report("a")
        assert settling.settler.has_unsettled, "the next one takes its time"


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("replaced_by", ["another process", "another start"])
def test_a_process_that_was_replaced_settles_nothing_and_says_why(
    state: Connection, database: Database, replaced_by: str, heavy: bool
) -> None:
    first = Settling(state, database.dsn)
    term = first.term if replaced_by == "another process" else None
    second = Settling(state, database.dsn, term)
    if heavy:
        with pytest.raises(WalbrookError, match=r"not the latest|taken over"):
            first.settler.settle("a", first.report_of("a", 1, [letter(START)]))
    else:
        first.report("a")
        first.settler.write()
        assert isinstance(first.settler.failure, WalbrookError)
        with pytest.raises(WalbrookError, match=r"not the latest|taken over"):
            first.settler.flush()
    assert state.execute("SELECT count(*) FROM walbrook.dead_letters").fetchall() == [(0,)]
    assert delivered(state)["a"] == 0
    second.report("a", 3)
    second.settler.write()
    assert delivered(state)["a"] == 3
    for each in (first, second):
        each.settler.close()
        each.connections.close()


def test_the_feeds_position_moves_the_restart_cursor_where_no_consumer_is_served(
    state: Connection, database: Database
) -> None:
    with Settling(state, database.dsn) as settling:
        state.execute("UPDATE walbrook.consumers SET active = false")
        settling.settler.note_read(READ_TO)
        until("the restart cursor", lambda: restart_cursor(state, SOURCE) == READ_TO)


def test_an_answer_that_is_lost_after_the_commit_counts_nothing_twice(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = positions.settle
    settling = Settling(state, database.dsn)
    settling.report("a", 5)

    def lost(*given: object, **named: object) -> None:
        settle(*given, **named)  # type: ignore[arg-type]
        raise psycopg.OperationalError("the connection is lost")

    with monkeypatch.context() as within:
        within.setattr(settler_module, "settle", lost)
        assert not settling.settler.write()
    assert settling.settler.write()
    assert settling.settler.was_moved("a"), "its worker reads its row"
    assert delivered(state)["a"] == 5
    assert consumer_cursors(state, SOURCE)["a"] == settling.at["a"]
    settling.settler.close()
    settling.connections.close()


def test_a_failure_without_a_known_cause_ends_the_settler_and_is_reported_to_all_who_wait(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_given: object, **_named: object) -> None:
        raise TransientError("nobody foresaw this")

    monkeypatch.setattr(settler_module, "settle", breaks)
    with Settling(state, database.dsn) as settling:
        settling.report("a")
        with pytest.raises(TransientError, match="nobody foresaw"):
            settling.settler.flush("a")
        settling.settler.report("b", settling.report_of("b"))  # does not wait for ever


def test_a_settler_whose_thread_dies_keeps_no_worker_waiting(
    state: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_settler: Settler, _read_to: Cursor | None) -> None:
        raise LookupError("nobody foresaw this")

    monkeypatch.setattr(Settler, "_take_back", broken)
    term = register(state)
    away = Settling(state, make_conninfo(database.dsn, port="1"), term)
    thread = threading.Thread(target=away.settler.run)
    thread.start()
    away.settler.report("a", Report(START, Outcome("a", Cursor(0x100, 0))))
    with pytest.raises(LookupError):
        away.settler.flush("a")
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(away.settler.failure, LookupError)
