"""What operators do to consumers in event-time order, and what tables that change do to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc.config import loads
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from cdc.service.checks.sink import require_fit
from cdc.state import operators, positions
from cdc.state.positions import MovedError
from cdc.stop import StopReason
from spark_pipeline.eventtime import ordering as ordering_module
from tests import pgoutput
from tests.event_lane import ITEM, NAME, OTHER, EventLane, S
from tests.event_stages import served
from tests.fix_event_lane import Died, Fate, MakeLane
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.lane_on_log import SOURCE, LogLane, arrived
from tests.lost_changes import note_lost_changes
from tests.service import _url
from tests.unit.replication.test_seal import transaction
from tests.waiting import until

pytestmark = pytest.mark.migrated

Told = list[tuple[Any, ...]]


def told(lane: EventLane) -> Told:
    """Of each message its database, its id or action, and whether it was late."""
    return [
        (
            m["metadata"]["database_name"],
            m["record"].get("id", m["action"]),
            m["metadata"].get("late", False),
        )
        for m in arrived(lane.directory / NAME)
    ]


def numbers(lane: EventLane) -> list[tuple[int, ...]]:
    found = [m["metadata"]["sequence"] for m in arrived(lane.directory / NAME)]
    return [tuple(map(int, each.split("-"))) for each in found]


def two_with_some_held_back(event_lane: MakeLane) -> EventLane:
    """Both databases have delivered up to 9 s, with something held back in front of that."""
    lane = event_lane(sources=("a", "b"), event_time={"late_tolerance": "1s"})
    lane.write("a", (1, 30 * S), (2, 8 * S), (3, 10 * S))
    lane.write("b", (11, 20 * S), (12, 7 * S), (13, 9 * S), (14, 10 * S))
    lane.write("a", (4, 10 * S))
    lane.turns()
    lane.write("a", (5, 11 * S))
    lane.ordering.settle()
    assert [each[1] for each in told(lane)] == [12, 2, 13, 3, 4, 14]
    return lane


@pytest.mark.parametrize("crash", [False, True])
def test_a_database_that_is_moved_back_comes_again_and_the_other_does_not(
    event_lane: MakeLane, crash: bool
) -> None:
    lane = two_with_some_held_back(event_lane)
    before = told(lane)
    held = {"a": Cursor(0x100, 0), "b": Cursor(0x100, 0)}
    assert lane.cursors() == held
    ((floor,),) = lane.rows("SELECT DISTINCT settled_to FROM walbrook.event_sources")
    lane.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8' WHERE source = 'a'")
    lane.read_resume_state()
    assert lane.ordering.turn()
    lane.ordering.settle()
    if crash:
        # Of the other database more was released than the watermark says now. That must stay known.
        lane.start()
    lane.write("b", (15, 9 * S), (16, 40 * S))
    lane.write("a", (6, 40 * S))
    lane.turns()
    again = told(lane)[len(before) :]
    assert [each[:2] for each in again if each[0] == "a"] == [("a", n) for n in (2, 3, 4, 5, 1)], (
        "everything of it again, by time"
    )
    assert [each[1] for each in again if each[0] == "b"] == [15, 11]
    assert [each for each in again if each[2]] == [("b", 15, True)], "only what was late before"
    found = numbers(lane)
    assert found == sorted(set(found)), "a number was used twice"
    ((lowest,),) = lane.rows("SELECT min(settled_to) FROM walbrook.event_sources")
    assert lowest > floor


def test_a_database_that_is_ahead_is_not_waited_for_when_the_other_has_no_more(
    event_lane: MakeLane,
) -> None:
    """Its rows say more than what is left of the other one can ever reach again."""
    lane = event_lane(sources=("a", "b"), event_time={"idle_timeout": "10s"})
    minute = 60 * S
    lane.write("a", (1, 5 * S), at_us=minute)
    lane.write("a", (2, 50 * S), at_us=minute)
    lane.write("b", (11, 5 * S), at_us=minute)
    lane.write("b", (12, 50 * S), at_us=minute)
    lane.turns()
    lane.write("b", (13, 20 * S), at_us=minute)
    lane.write("b", (14, 60 * S), at_us=minute)
    # Back, and past what it had reached: nothing of it will ever come at 50 s.
    lane.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8' WHERE source = 'a'")
    lane.read_resume_state()
    lane.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/201' WHERE source = 'a'")
    lane.read_resume_state()
    lane.turns()
    assert [each[1] for each in told(lane)] == [1, 11, 2, 12]
    lane.ordering._clocks["a"]._now += 20 * S
    lane.turns()  # the watermark moves
    lane.turns()
    assert told(lane)[4:] == [("b", 13, True), ("b", 14, False)]


@pytest.mark.parametrize(("to", "again"), [("0/8", [0, 1, 2]), ("0/208", [])])
def test_a_cursor_that_is_moved_during_a_release_repeats_nothing_of_the_other_database(
    event_lane: MakeLane, monkeypatch: pytest.MonkeyPatch, to: str, again: list[int]
) -> None:
    lane = event_lane(sources=("a", "b"))
    lane.write("a", (0, 0))
    lane.write("b", (10, 0))
    lane.turns()
    lane.write("a", (1, 1 * S), (2, 3 * S))
    lane.write("b", (11, 2 * S), (12, 4 * S))

    def move(step: str) -> None:
        if step == "released":
            lane.state.execute(
                f"UPDATE walbrook.consumers SET cursor_lsn = '{to}' WHERE source = 'a'".encode()
            )

    with monkeypatch.context() as patch:
        patch.setattr(ordering_module, "reached", move)
        with pytest.raises(MovedError):
            lane.turns()
    lane.start()
    lane.turns()
    assert [each[1] for each in told(lane)] == [0, 10, 1, 11, 2, *again]
    lane.write("a", (3, 5 * S))
    lane.turns()
    assert [each[1] for each in told(lane)] == [0, 10, 1, 11, 2, *again, 12]
    found = numbers(lane)
    assert found == sorted(set(found))


def test_rewind_is_for_one_database_and_for_every_kind_of_destination(
    event_lane: MakeLane,
) -> None:
    lane = event_lane(sources=("a", "b"))
    lane.state.execute("UPDATE walbrook.consumers SET destination = 'file'")
    lane.write("a", (1, 1 * S), (2, 3 * S))
    lane.write("b", (11, 2 * S), (12, 4 * S))
    lane.turns()
    with pytest.raises(OperatorError, match="ambiguous") as caught:
        operators.rewind(lane.state, NAME, to_cursor="0/100:1")
    assert f"a/{NAME}" in caught.value.fix
    state = operators.rewind(lane.state, f"a/{NAME}", to_cursor="0/100:1")
    assert (state["source"], state["cursor"]) == ("a", "0/100:1")
    lane.read_resume_state()
    lane.turns()
    assert told(lane) == [
        ("a", 1, False), ("b", 11, False), ("a", 2, False), ("a", 2, False)
    ]  # fmt: skip


def test_a_cursor_that_is_moved_forward_passes_over_what_is_there(event_lane: MakeLane) -> None:
    lane = event_lane(event_time={"late_tolerance": "5s"})
    lane.write("a", (1, 10 * S), (2, 3 * S), (3, 11 * S), (4, 12 * S))
    lane.turns()
    assert [each[1] for each in told(lane)] == [2]
    lane.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/100', cursor_idx = 3")
    lane.read_resume_state()
    lane.write("a", (5, 30 * S))
    lane.turns()
    assert told(lane) == [("a", 2, False), ("a", 4, False)]


def test_an_accepted_gap_is_told_in_front_of_what_follows_with_its_database(
    event_lane: MakeLane,
) -> None:
    lane = event_lane(sources=("a", "b"))
    for source in ("a", "b"):
        lane.write(source, (1, 1 * S), (2, 2 * S))
        lane.write(source, (3, 3 * S))
    note_lost_changes(lane.state, "b", end="0/900")
    lane.rows("SELECT walbrook.accept_gap('b', '0/200')")
    lane.start()
    lane.turns()
    lane.start()
    lane.turns()
    assert [each[:2] for each in told(lane)] == [
        ("b", "gap"), ("a", 1), ("a", 2), ("a", 3), ("b", 3)
    ]  # fmt: skip
    gap = arrived(lane.directory / NAME)[0]
    assert gap["record"] == {"from": "0/8:0", "to": "0/200:0", "reason": "accepted"}


def test_dead_letters_of_two_databases_are_dealt_with_one_by_one(
    event_lane: MakeLane, endpoint: Endpoint
) -> None:
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
    lane = event_lane(
        sources=("a", "b"), event_time={"late_policy": "dead_letter"}, destination=hook
    )
    for source in ("a", "b"):
        lane.write(source, (1, 10 * S))
    lane.turns()
    for source in ("a", "b"):
        lane.write(source, (2, 5 * S), (3, 6 * S))
    lane.turns()
    letters = operators.dead_letters(lane.state, f"b/{NAME}")
    assert [(each["source"], each["kind"]) for each in letters] == [("b", "late")] * 2
    assert len(operators.dead_letters(lane.state, NAME)) == 4
    first, second = (int(str(each["id"])) for each in letters)
    assert operators.redeliver(lane.state, NAME, first)["source"] == "b"
    assert operators.discard(lane.state, f"b/{NAME}", second)["affected"] == 1
    assert operators.redeliver(lane.state, f"a/{NAME}")["waiting"] == 2
    assert operators.dead_letters(lane.state, NAME) == []


def test_tables_come_and_go_while_it_runs(event_lane: MakeLane) -> None:
    lane = event_lane(tables=("item", "other"))
    lane.write("a", (1, 1 * S))
    lane.turns()
    assert told(lane) == [], "the other table has said nothing yet"
    lane.ordering.renew("a", {"public.item": "public.item"})
    lane.turns()
    assert [each[1] for each in told(lane)] == [1]
    lane.ordering.renew("a", {f"public.{name}": f"public.{name}" for name in ("item", "other")})
    lane.write("a", (2, 2 * S))
    lane.turns()
    assert [each[1] for each in told(lane)] == [1], "a table that is new is waited for"
    lane.write("a", (3, 3 * S), table=2)
    lane.turns()
    assert [each[1] for each in told(lane)] == [1, 2]


@pytest.mark.parametrize("leaves", [False, True])
def test_leaves_share_a_watermark_unless_each_is_to_have_its_own(
    event_lane: MakeLane, leaves: bool
) -> None:
    lane = event_lane(
        tables=("item", "other"), event_time={"leaf_partitions": leaves, "late_tolerance": "1s"}
    )
    lane.tables |= dict.fromkeys(("public.item", "public.other"), "public.whole")
    lane.read_resume_state()
    lane.write("a", (1, 1 * S), (2, 9 * S))
    lane.turns()
    assert [each[1] for each in told(lane)] == ([] if leaves else [1])
    lane.write("a", (3, 5 * S), table=2)
    lane.turns()
    assert told(lane) == [("a", 1, False), *([] if leaves else [("a", 3, True)])]
    lane.ordering._shown_at = 0.0
    lane.ordering.show()
    shown = lane.rows('SELECT "table" FROM walbrook.watermarks ORDER BY 1')
    assert shown == ([("public.item",), ("public.other",)] if leaves else [("public.whole",)])


def test_a_consumer_in_commit_order_goes_on_in_event_time_where_it_stands(
    event_state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_step: str) -> None:
        raise Died

    plain = LogLane(event_state, tmp_path, **{NAME: {}})
    rows = [pgoutput.insert(1, [str(n), str(n * S)]) for n in range(1, 5)]
    plain.write(ITEM, *transaction(0x100, rows[0]))
    plain.take()
    # Sent and not settled: its files have more than its cursor says, and know it by its cursors.
    plain.write(ITEM, *transaction(0x200, *rows[1:3]))
    with monkeypatch.context() as patch:
        patch.setattr(positions, "reached", die)
        with pytest.raises(Died):
            plain.take()
    plain.close()
    (tmp_path / SOURCE).mkdir()
    (tmp_path / SOURCE / "log").symlink_to(tmp_path / "log")
    lane = EventLane(event_state, tmp_path, sources=(SOURCE,))
    lane._lsn[SOURCE] = 0x200
    lane.write(SOURCE, (4, 4 * S))
    lane.turns()
    found = [each[1] for each in told(lane)]
    assert sorted(set(found)) == [1, 2, 3, 4], "something was taken for a repeat"
    assert found[0] == 1
    assert found[-1] == 4
    lane.close()


SINK = """
databases:
  - {name: a, url: %s, slot: {name: s}, publication: {name: pub}}
sinks:
  - {name: timed, database: a, destination: {type: file, path: out}}
state: {url: %s}
"""


def test_commit_order_is_refused_to_one_that_was_in_event_time_order(
    event_lane: MakeLane, event_database: Database, tmp_path: Path
) -> None:
    event_lane()
    url = _url(event_database.dsn)
    with event_database.connect() as state:
        config = loads(SINK % (url, url), base=tmp_path)
        with pytest.raises(OperatorError) as caught:
            require_fit(config, config.sinks[0], state)
        assert "timed was in event-time order" in caught.value.what
        assert "new name" in caught.value.fix
        others = loads((SINK % (url, url)).replace("timed", "others"), base=tmp_path)
        require_fit(others, others.sinks[0], state)


@pytest.fixture
def source(event_database: Database) -> Iterator[Connection]:
    """The tables behind the logs, as their database shows them."""
    with event_database.connect() as connection:
        connection.execute("CREATE TABLE item (id int PRIMARY KEY, at bigint)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE item")
        yield connection
        connection.execute("DROP PUBLICATION pub")
        connection.execute("DROP TABLE item")
        connection.execute("DROP TABLE IF EXISTS other")


@pytest.mark.usefixtures("source")
def test_operators_are_heard_within_a_second(
    event_lane: MakeLane, event_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = event_lane(sources=("a", "b"))
    state = lane.state

    def come(*ids: object) -> None:
        until(f"{ids}", lambda: [each[1] for each in told(lane)] == [*ids])

    def idle(query: str) -> None:
        until(query, lambda: lane.rows(query) == [(True,)])

    with served(lane, event_database):
        lane.write("a", (1, 1 * S))
        lane.write("b", (2, 2 * S))
        come(1)
        state.execute(f"SELECT walbrook.pause('b/{NAME}')".encode())
        idle("SELECT count(*) = 2 FROM walbrook.consumers WHERE state = 'paused'")
        lane.write("a", (3, 3 * S))
        lane.write("b", (4, 3 * S))
        state.execute(f"SELECT walbrook.resume('b/{NAME}')".encode())
        come(1, 2, 3, 4)
        idle("SELECT NOT planned FROM walbrook.event_time")
        # What it has not had of one database is given up.
        lane.write("a", (5, 9 * S))
        state.execute("UPDATE walbrook.sources SET log_lsn = '0/300', log_idx = 1")
        state.execute(f"SELECT walbrook.discard_all('a/{NAME}')".encode())
        come(1, 2, 3, 4, "gap")
        lane.write("b", (6, 14 * S))
        lane.write("a", (7, 15 * S))
        come(1, 2, 3, 4, "gap", 6)
        state.execute(f"SELECT walbrook.finish_source('{NAME}', 'b')".encode())
        come(1, 2, 3, 4, "gap", 6, 7)
        lane.write("b", (8, 20 * S))
        lane.write("a", (9, 21 * S))
    assert [each[1] for each in told(lane)][7:] == [8, 9], "a stop delivers what is held back"
    assert told(lane)[4] == ("a", "gap", False)
    found = numbers(lane)
    assert found == sorted(set(found))


def test_a_database_that_has_ended_counts_again_when_that_is_taken_back(
    event_lane: MakeLane,
) -> None:
    lane = event_lane(sources=("a", "b"))
    lane.write("a", (1, 1 * S))
    lane.turns()
    assert told(lane) == []
    for finished, expected in ((True, [1]), (False, [1]), (True, [1, 2])):
        lane.ordering.finished("b", finished)
        lane.turns()
        assert [each[1] for each in told(lane)] == expected
        if finished:
            lane.ordering.finished("b", False)
            lane.write("a", (2, 2 * S))


def test_a_new_table_is_looked_up_before_its_rows_are_taken(
    event_lane: MakeLane,
    event_database: Database,
    source: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = [{"name": f"public.{name}", "column": "at"} for name in ("item", "other")]
    lane = event_lane(event_time={"column": None, "tables": tables})
    with served(lane, event_database):
        lane.write("a", (1, 1 * S))
        until("the first", lambda: len(told(lane)) == 1)
        source.execute("CREATE TABLE other (id int PRIMARY KEY, at bigint)")
        source.execute("ALTER PUBLICATION pub ADD TABLE other")
        rows = pgoutput.insert(1, ["2", str(3 * S)]), pgoutput.insert(2, ["3", str(2 * S)])
        lane.write_messages("a", ITEM, OTHER, *rows)
        until("the second", lambda: len(told(lane)) == 2)
    assert told(lane) == [("a", 1, False), ("a", 3, False), ("a", 2, False)]
    assert lane.rows("SELECT * FROM walbrook.dead_letters") == []


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("column", "given", "expected"),
    [
        ("record.commit_timestamp", "unix_us", [2, 1]),
        ("metadata.commit_timestamp", None, [1, 2]),
    ],
)
def test_a_column_of_the_name_of_the_commits_time_is_told_from_it(
    event_lane: MakeLane,
    event_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    given: str | None,
    expected: list[int],
) -> None:
    timed = {"column": column, "type": given, "late_tolerance": "1s"}
    lane = event_lane(event_time=timed)
    item = pgoutput.relation(1, "public", "item", [("id", 23, True), ("commit_timestamp", 20)])
    with served(lane, event_database):
        for number, own in ((1, 5 * S), (2, 4 * S + S // 2), (3, 60 * S)):
            row = pgoutput.insert(1, [str(number), str(own)])
            lane.write_messages("a", item, row, at_us=number * 10 * S)
        until("both", lambda: len(told(lane)) == 2)
        assert [each[1] for each in told(lane)] == expected
    assert lane.rows("SELECT * FROM walbrook.dead_letters") == []


@pytest.mark.usefixtures("source")
def test_a_database_that_is_away_at_a_start_is_waited_for_all_the_same(
    event_lane: MakeLane, event_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = event_lane(sources=("a", "b"), event_time={"on_stop": "keep"})
    lane.write("a", (1, 1 * S))
    lane.write("b", (2, 2 * S))
    lane.turns()
    lane.write("a", (3, 3 * S))
    shown = "SELECT buffered = 1 FROM walbrook.watermarks WHERE source = 'a'"
    with served(lane, event_database, away="b"):
        until("the other to be held back", lambda: lane.rows(shown) == [(True,)])
    assert [each[1] for each in told(lane)] == [1, 2]


@pytest.mark.usefixtures("source")
def test_a_destination_that_fails_while_draining_is_not_hammered(
    event_lane: MakeLane,
    event_database: Database,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "ledger": False}
    lane = event_lane(destination=hook)
    endpoint.refuses, endpoint.refusal = lambda _: True, 503
    with served(lane, event_database, drain_timeout_s=1.0) as (_, stop):
        lane.write("a", (1, 1 * S))
        until("a failure", lambda: bool(endpoint.requests))
        stop.request(StopReason.OPERATOR)
    assert len(endpoint.requests) < 12
    endpoint.refuses = None
    lane.start()
    lane.turns()
    assert [m["record"] for m in endpoint.written] == [{"id": 1, "at": 1 * S}]


def test_a_gap_that_cannot_be_told_is_tried_with_pauses(event_lane: MakeLane, fate: Fate) -> None:
    lane = event_lane()
    lane.write("a", (1, 1 * S))
    lane.write("a", (2, 2 * S))
    note_lost_changes(lane.state, "a", end="0/900")
    lane.rows("SELECT walbrook.accept_gap('a', '0/200')")
    lane.read_resume_state()
    assert lane.ordering.has_gaps
    lane.turns()
    assert not lane.ordering.has_gaps
