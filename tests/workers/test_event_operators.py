"""What operators do to consumers in event-time order, and what tables that change do to them."""

from __future__ import annotations

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
from tests.event_pipeline import ITEM, NAME, OTHER, EventPipeline, S
from tests.event_service import delivered_rows
from tests.event_service import source as source
from tests.event_stages import served
from tests.fix_event_pipeline import Died, Fate, MakePipeline
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import SOURCE, LogPipeline, arrived
from tests.lost_changes import note_lost_changes
from tests.waiting import until
from tests.walbrook_service import _url
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated


def numbers(pipeline: EventPipeline) -> list[tuple[int, ...]]:
    found = [m["metadata"]["sequence"] for m in arrived(pipeline.directory / NAME)]
    return [tuple(map(int, each.split("-"))) for each in found]


def two_with_some_held_back(event_pipeline: MakePipeline) -> EventPipeline:
    """Both databases have delivered up to 9 s, with something held back in front of that."""
    pipeline = event_pipeline(sources=("a", "b"), event_time={"late_tolerance": "1s"})
    pipeline.write("a", (1, 30 * S), (2, 8 * S), (3, 10 * S))
    pipeline.write("b", (11, 20 * S), (12, 7 * S), (13, 9 * S), (14, 10 * S))
    pipeline.write("a", (4, 10 * S))
    pipeline.turns()
    pipeline.write("a", (5, 11 * S))
    pipeline.ordering.settle()
    assert [each[1] for each in delivered_rows(pipeline)] == [12, 2, 13, 3, 4, 14]
    return pipeline


@pytest.mark.parametrize("crash", [False, True])
def test_a_database_that_is_moved_back_comes_again_and_the_other_does_not(
    event_pipeline: MakePipeline, crash: bool
) -> None:
    pipeline = two_with_some_held_back(event_pipeline)
    before = delivered_rows(pipeline)
    held = {"a": Cursor(0x100, 0), "b": Cursor(0x100, 0)}
    assert pipeline.cursors() == held
    ((floor,),) = pipeline.rows("SELECT DISTINCT settled_to FROM walbrook.event_sources")
    pipeline.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8' WHERE source = 'a'")
    pipeline.read_resume_state()
    assert pipeline.ordering.turn()
    pipeline.ordering.settle()
    if crash:
        # Of the other database more was released than the watermark says now. That must stay known.
        pipeline.start()
    pipeline.write("b", (15, 9 * S), (16, 40 * S))
    pipeline.write("a", (6, 40 * S))
    pipeline.turns()
    again = delivered_rows(pipeline)[len(before) :]
    assert [each[:2] for each in again if each[0] == "a"] == [("a", n) for n in (2, 3, 4, 5, 1)], (
        "everything of it again, by time"
    )
    assert [each[1] for each in again if each[0] == "b"] == [15, 11]
    assert [each for each in again if each[2]] == [("b", 15, True)], "only what was late before"
    found = numbers(pipeline)
    assert found == sorted(set(found)), "a number was used twice"
    ((lowest,),) = pipeline.rows("SELECT min(settled_to) FROM walbrook.event_sources")
    assert lowest > floor


def test_a_database_that_is_ahead_is_not_waited_for_when_the_other_has_no_more(
    event_pipeline: MakePipeline,
) -> None:
    """Its rows say more than what is left of the other one can ever reach again."""
    pipeline = event_pipeline(sources=("a", "b"), event_time={"idle_timeout": "10s"})
    minute = 60 * S
    pipeline.write("a", (1, 5 * S), at_us=minute)
    pipeline.write("a", (2, 50 * S), at_us=minute)
    pipeline.write("b", (11, 5 * S), at_us=minute)
    pipeline.write("b", (12, 50 * S), at_us=minute)
    pipeline.turns()
    pipeline.write("b", (13, 20 * S), at_us=minute)
    pipeline.write("b", (14, 60 * S), at_us=minute)
    # Back, and past what it had reached: nothing of it will ever come at 50 s.
    pipeline.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8' WHERE source = 'a'")
    pipeline.read_resume_state()
    pipeline.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/201' WHERE source = 'a'")
    pipeline.read_resume_state()
    pipeline.turns()
    assert [each[1] for each in delivered_rows(pipeline)] == [1, 11, 2, 12]
    pipeline.ordering._clocks["a"]._now += 20 * S
    pipeline.turns()  # the watermark moves
    pipeline.turns()
    assert delivered_rows(pipeline)[4:] == [("b", 13, True), ("b", 14, False)]


@pytest.mark.parametrize(("to", "again"), [("0/8", [0, 1, 2]), ("0/208", [])])
def test_a_cursor_that_is_moved_during_a_release_repeats_nothing_of_the_other_database(
    event_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, to: str, again: list[int]
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    pipeline.write("a", (0, 0))
    pipeline.write("b", (10, 0))
    pipeline.turns()
    pipeline.write("a", (1, 1 * S), (2, 3 * S))
    pipeline.write("b", (11, 2 * S), (12, 4 * S))

    def move(step: str) -> None:
        if step == "released":
            pipeline.state.execute(
                f"UPDATE walbrook.consumers SET cursor_lsn = '{to}' WHERE source = 'a'".encode()
            )

    with monkeypatch.context() as patch:
        patch.setattr(ordering_module, "reached", move)
        with pytest.raises(MovedError):
            pipeline.turns()
    pipeline.start()
    pipeline.turns()
    assert [each[1] for each in delivered_rows(pipeline)] == [0, 10, 1, 11, 2, *again]
    pipeline.write("a", (3, 5 * S))
    pipeline.turns()
    assert [each[1] for each in delivered_rows(pipeline)] == [0, 10, 1, 11, 2, *again, 12]
    found = numbers(pipeline)
    assert found == sorted(set(found))


def test_rewind_is_for_one_database_and_for_every_kind_of_destination(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    pipeline.state.execute("UPDATE walbrook.consumers SET destination = 'file'")
    pipeline.write("a", (1, 1 * S), (2, 3 * S))
    pipeline.write("b", (11, 2 * S), (12, 4 * S))
    pipeline.turns()
    with pytest.raises(OperatorError, match="ambiguous") as caught:
        operators.rewind(pipeline.state, NAME, to_cursor="0/100:1")
    assert f"a/{NAME}" in caught.value.fix
    state = operators.rewind(pipeline.state, f"a/{NAME}", to_cursor="0/100:1")
    assert (state["source"], state["cursor"]) == ("a", "0/100:1")
    pipeline.read_resume_state()
    pipeline.turns()
    assert delivered_rows(pipeline) == [
        ("a", 1, False), ("b", 11, False), ("a", 2, False), ("a", 2, False)
    ]  # fmt: skip


def test_a_cursor_that_is_moved_forward_passes_over_what_is_there(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(event_time={"late_tolerance": "5s"})
    pipeline.write("a", (1, 10 * S), (2, 3 * S), (3, 11 * S), (4, 12 * S))
    pipeline.turns()
    assert [each[1] for each in delivered_rows(pipeline)] == [2]
    pipeline.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/100', cursor_idx = 3")
    pipeline.read_resume_state()
    pipeline.write("a", (5, 30 * S))
    pipeline.turns()
    assert delivered_rows(pipeline) == [("a", 2, False), ("a", 4, False)]


def test_an_accepted_gap_is_reported_in_front_of_what_follows_with_its_database(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    for name in ("a", "b"):
        pipeline.write(name, (1, 1 * S), (2, 2 * S))
        pipeline.write(name, (3, 3 * S))
    note_lost_changes(pipeline.state, "b", end="0/900")
    pipeline.rows("SELECT walbrook.accept_gap('b', '0/200')")
    pipeline.start()
    pipeline.turns()
    pipeline.start()
    pipeline.turns()
    assert [each[:2] for each in delivered_rows(pipeline)] == [
        ("b", "gap"), ("a", 1), ("a", 2), ("a", 3), ("b", 3)
    ]  # fmt: skip
    gap = arrived(pipeline.directory / NAME)[0]
    assert gap["record"] == {"from": "0/8:0", "to": "0/200:0", "reason": "accepted"}


def test_dead_letters_of_two_databases_are_dealt_with_one_by_one(
    event_pipeline: MakePipeline, endpoint: Endpoint
) -> None:
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
    pipeline = event_pipeline(
        sources=("a", "b"), event_time={"late_policy": "dead_letter"}, destination=hook
    )
    for name in ("a", "b"):
        pipeline.write(name, (1, 10 * S))
    pipeline.turns()
    for name in ("a", "b"):
        pipeline.write(name, (2, 5 * S), (3, 6 * S))
    pipeline.turns()
    letters = operators.dead_letters(pipeline.state, f"b/{NAME}")
    assert [(each["source"], each["kind"]) for each in letters] == [("b", "late")] * 2
    assert len(operators.dead_letters(pipeline.state, NAME)) == 4
    first, second = (int(str(each["id"])) for each in letters)
    assert operators.redeliver(pipeline.state, NAME, first)["source"] == "b"
    assert operators.discard(pipeline.state, f"b/{NAME}", second)["affected"] == 1
    assert operators.redeliver(pipeline.state, f"a/{NAME}")["waiting"] == 2
    assert operators.dead_letters(pipeline.state, NAME) == []


def test_tables_come_and_go_while_it_runs(event_pipeline: MakePipeline) -> None:
    pipeline = event_pipeline(tables=("item", "other"))
    pipeline.write("a", (1, 1 * S))
    pipeline.turns()
    assert delivered_rows(pipeline) == [], "the other table has said nothing yet"
    pipeline.ordering.renew("a", {"public.item": "public.item"})
    pipeline.turns()
    assert [each[1] for each in delivered_rows(pipeline)] == [1]
    pipeline.ordering.renew("a", {f"public.{name}": f"public.{name}" for name in ("item", "other")})
    pipeline.write("a", (2, 2 * S))
    pipeline.turns()
    assert [each[1] for each in delivered_rows(pipeline)] == [1], (
        "a table that is new is waited for"
    )
    pipeline.write("a", (3, 3 * S), table=2)
    pipeline.turns()
    assert [each[1] for each in delivered_rows(pipeline)] == [1, 2]


@pytest.mark.parametrize("leaves", [False, True])
def test_leaves_share_a_watermark_unless_each_is_to_have_its_own(
    event_pipeline: MakePipeline, leaves: bool
) -> None:
    pipeline = event_pipeline(
        tables=("item", "other"), event_time={"leaf_partitions": leaves, "late_tolerance": "1s"}
    )
    pipeline.tables |= dict.fromkeys(("public.item", "public.other"), "public.whole")
    pipeline.read_resume_state()
    pipeline.write("a", (1, 1 * S), (2, 9 * S))
    pipeline.turns()
    assert [each[1] for each in delivered_rows(pipeline)] == ([] if leaves else [1])
    pipeline.write("a", (3, 5 * S), table=2)
    pipeline.turns()
    assert delivered_rows(pipeline) == [("a", 1, False), *([] if leaves else [("a", 3, True)])]
    pipeline.ordering._shown_at = 0.0
    pipeline.ordering.show()
    shown = pipeline.rows('SELECT "table" FROM walbrook.watermarks ORDER BY 1')
    assert shown == ([("public.item",), ("public.other",)] if leaves else [("public.whole",)])


def test_a_consumer_in_commit_order_goes_on_in_event_time_where_it_stands(
    event_state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_step: str) -> None:
        raise Died

    plain = LogPipeline(event_state, tmp_path, **{NAME: {}})
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
    pipeline = EventPipeline(event_state, tmp_path, sources=(SOURCE,))
    pipeline._lsn[SOURCE] = 0x200
    pipeline.write(SOURCE, (4, 4 * S))
    pipeline.turns()
    found = [each[1] for each in delivered_rows(pipeline)]
    assert sorted(set(found)) == [1, 2, 3, 4], "something was taken for a repeat"
    assert found[0] == 1
    assert found[-1] == 4
    pipeline.close()


SINK = """
databases:
  - {name: a, url: %s, slot: {name: s}, publication: {name: pub}}
sinks:
  - {name: timed, database: a, destination: {type: file, path: out}}
state: {url: %s}
"""


def test_commit_order_is_refused_to_one_that_was_in_event_time_order(
    event_pipeline: MakePipeline, event_database: Database, tmp_path: Path
) -> None:
    event_pipeline()
    url = _url(event_database.dsn)
    with event_database.connect() as state:
        config = loads(SINK % (url, url), base=tmp_path)
        with pytest.raises(OperatorError) as caught:
            require_fit(config, config.sinks[0], state)
        assert "timed was in event-time order" in caught.value.what
        assert "new name" in caught.value.fix
        others = loads((SINK % (url, url)).replace("timed", "others"), base=tmp_path)
        require_fit(others, others.sinks[0], state)


@pytest.mark.usefixtures("source")
def test_operators_are_heard_within_a_second(
    event_pipeline: MakePipeline, event_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    state = pipeline.state

    def come(*ids: object) -> None:
        until(f"{ids}", lambda: [each[1] for each in delivered_rows(pipeline)] == [*ids])

    def idle(query: str) -> None:
        until(query, lambda: pipeline.rows(query) == [(True,)])

    with served(pipeline, event_database):
        pipeline.write("a", (1, 1 * S))
        pipeline.write("b", (2, 2 * S))
        come(1)
        state.execute(f"SELECT walbrook.pause('b/{NAME}')".encode())
        idle("SELECT count(*) = 2 FROM walbrook.consumers WHERE state = 'paused'")
        pipeline.write("a", (3, 3 * S))
        pipeline.write("b", (4, 3 * S))
        state.execute(f"SELECT walbrook.resume('b/{NAME}')".encode())
        come(1, 2, 3, 4)
        idle("SELECT NOT planned FROM walbrook.event_time")
        # What it has not had of one database is given up.
        pipeline.write("a", (5, 9 * S))
        state.execute("UPDATE walbrook.sources SET log_lsn = '0/300', log_idx = 1")
        state.execute(f"SELECT walbrook.discard_all('a/{NAME}')".encode())
        come(1, 2, 3, 4, "gap")
        pipeline.write("b", (6, 14 * S))
        pipeline.write("a", (7, 15 * S))
        come(1, 2, 3, 4, "gap", 6)
        state.execute(f"SELECT walbrook.finish_source('{NAME}', 'b')".encode())
        come(1, 2, 3, 4, "gap", 6, 7)
        pipeline.write("b", (8, 20 * S))
        pipeline.write("a", (9, 21 * S))
    assert [each[1] for each in delivered_rows(pipeline)][7:] == [8, 9], (
        "a stop delivers what is held back"
    )
    assert delivered_rows(pipeline)[4] == ("a", "gap", False)
    found = numbers(pipeline)
    assert found == sorted(set(found))


def test_a_database_that_has_ended_counts_again_when_that_is_taken_back(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    pipeline.write("a", (1, 1 * S))
    pipeline.turns()
    assert delivered_rows(pipeline) == []
    for finished, expected in ((True, [1]), (False, [1]), (True, [1, 2])):
        pipeline.ordering.finished("b", finished)
        pipeline.turns()
        assert [each[1] for each in delivered_rows(pipeline)] == expected
        if finished:
            pipeline.ordering.finished("b", False)
            pipeline.write("a", (2, 2 * S))


def test_a_new_table_is_looked_up_before_its_rows_are_taken(
    event_pipeline: MakePipeline,
    event_database: Database,
    source: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = [{"name": f"public.{name}", "column": "at"} for name in ("item", "other")]
    pipeline = event_pipeline(event_time={"column": None, "tables": tables})
    with served(pipeline, event_database):
        pipeline.write("a", (1, 1 * S))
        until("the first", lambda: len(delivered_rows(pipeline)) == 1)
        source.execute("CREATE TABLE other (id int PRIMARY KEY, at bigint)")
        source.execute("ALTER PUBLICATION pub ADD TABLE other")
        rows = pgoutput.insert(1, ["2", str(3 * S)]), pgoutput.insert(2, ["3", str(2 * S)])
        pipeline.write_messages("a", ITEM, OTHER, *rows)
        until("the second", lambda: len(delivered_rows(pipeline)) == 2)
    assert delivered_rows(pipeline) == [("a", 1, False), ("a", 3, False), ("a", 2, False)]
    assert pipeline.rows("SELECT * FROM walbrook.dead_letters") == []


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("column", "given", "expected"),
    [
        ("record.commit_timestamp", "unix_us", [2, 1]),
        ("metadata.commit_timestamp", None, [1, 2]),
    ],
)
def test_a_column_of_the_name_of_the_commits_time_is_known_from_it(
    event_pipeline: MakePipeline,
    event_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    given: str | None,
    expected: list[int],
) -> None:
    timed = {"column": column, "type": given, "late_tolerance": "1s"}
    pipeline = event_pipeline(event_time=timed)
    item = pgoutput.relation(1, "public", "item", [("id", 23, True), ("commit_timestamp", 20)])
    with served(pipeline, event_database):
        for number, own in ((1, 5 * S), (2, 4 * S + S // 2), (3, 60 * S)):
            row = pgoutput.insert(1, [str(number), str(own)])
            pipeline.write_messages("a", item, row, at_us=number * 10 * S)
        until("both", lambda: len(delivered_rows(pipeline)) == 2)
        assert [each[1] for each in delivered_rows(pipeline)] == expected
    assert pipeline.rows("SELECT * FROM walbrook.dead_letters") == []


@pytest.mark.usefixtures("source")
def test_a_database_that_is_away_at_a_start_is_waited_for_all_the_same(
    event_pipeline: MakePipeline, event_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = event_pipeline(sources=("a", "b"), event_time={"on_stop": "keep"})
    pipeline.write("a", (1, 1 * S))
    pipeline.write("b", (2, 2 * S))
    pipeline.turns()
    pipeline.write("a", (3, 3 * S))
    shown = "SELECT buffered = 1 FROM walbrook.watermarks WHERE source = 'a'"
    with served(pipeline, event_database, away="b"):
        until("the other to be held back", lambda: pipeline.rows(shown) == [(True,)])
    assert [each[1] for each in delivered_rows(pipeline)] == [1, 2]


@pytest.mark.usefixtures("source")
def test_a_destination_that_fails_while_draining_is_not_hammered(
    event_pipeline: MakePipeline,
    event_database: Database,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "ledger": False}
    pipeline = event_pipeline(destination=hook)
    endpoint.refuses, endpoint.refusal = lambda _: True, 503
    with served(pipeline, event_database, drain_timeout_s=1.0) as (_, stop):
        pipeline.write("a", (1, 1 * S))
        until("a failure", lambda: bool(endpoint.requests))
        stop.request(StopReason.OPERATOR)
    assert len(endpoint.requests) < 12
    endpoint.refuses = None
    pipeline.start()
    pipeline.turns()
    assert [m["record"] for m in endpoint.written] == [{"id": 1, "at": 1 * S}]


def test_a_gap_that_cannot_be_reported_is_tried_with_pauses(
    event_pipeline: MakePipeline, fate: Fate
) -> None:
    pipeline = event_pipeline()
    pipeline.write("a", (1, 1 * S))
    pipeline.write("a", (2, 2 * S))
    note_lost_changes(pipeline.state, "a", end="0/900")
    pipeline.rows("SELECT walbrook.accept_gap('a', '0/200')")
    pipeline.read_resume_state()
    assert pipeline.ordering.has_gaps
    pipeline.turns()
    assert not pipeline.ordering.has_gaps
