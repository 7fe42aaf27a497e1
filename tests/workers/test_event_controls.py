"""Watermarks that operators push, and partitions that they mark idle or active."""

from __future__ import annotations

import psycopg
import pytest
from typer.testing import CliRunner

from cdc.errors import OperatorError
from cdc.service.cli.entry import app
from cdc.state import operators
from cdc.state.event_controls import read_controls
from cdc.state.positions import register_source
from tests.api_server import served as api_of
from tests.event_pipeline import NAME, EventPipeline, S
from tests.event_service import delivered_rows
from tests.event_service import source as source
from tests.event_stages import served
from tests.fix_event_pipeline import Fate, MakePipeline
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import _url

__all__ = ["source"]
pytestmark = pytest.mark.migrated

SECOND = "1970-01-01 00:00:{:02}+00"
SHOWN = (
    "SELECT source, marked_idle, idle_since IS NOT NULL, extract(epoch FROM pushed_to)::int,"
    ' extract(epoch FROM released_to)::int FROM walbrook.watermarks ORDER BY source, "table"'
)


def push(pipeline: EventPipeline, second: int, source: str | None = None) -> object:
    done = operators.advance_watermark(pipeline.state, NAME, SECOND.format(second), source)
    follow(pipeline)
    return done["watermark"]


def mark(pipeline: EventPipeline, table: str, source: str, *, idle: bool) -> None:
    operators.set_partition_idle(pipeline.state, f"{source}/{NAME}", f"public.{table}", idle=idle)
    follow(pipeline)


def follow(pipeline: EventPipeline) -> None:
    """What the stage does when it hears of it, and each second."""
    pipeline.ordering.follow(read_controls(pipeline.state, NAME, pipeline.sources))
    pipeline.turns()
    pipeline.ordering.settle()
    pipeline.ordering.show(at_once=True)


def ids(pipeline: EventPipeline) -> list[object]:
    return [each[1] for each in delivered_rows(pipeline)]


def test_a_pushed_watermark_releases_what_is_held_back_and_makes_older_changes_late(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(event_time={"late_tolerance": "30s"})
    pipeline.write("a", (1, 10 * S), (2, 20 * S), (3, 30 * S))
    pipeline.turns()
    assert ids(pipeline) == []
    assert push(pipeline, 20) == "1970-01-01T00:00:20.000000Z"
    assert ids(pipeline) == [1, 2]
    assert push(pipeline, 5) == "1970-01-01T00:00:20.000000Z", "it never goes back"
    assert pipeline.rows(SHOWN) == [("a", False, False, 20, 20)]
    pipeline.write("a", (4, 20 * S), (5, 21 * S))
    pipeline.turns()
    assert delivered_rows(pipeline)[2:] == [("a", 4, True)]


def test_a_watermark_pushed_for_one_database_waits_for_the_other(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    pipeline.write("a", (1, 10 * S))
    pipeline.turns()
    push(pipeline, 30, "b")
    assert ids(pipeline) == [1], "nobody waits for a first change of b"
    pipeline.write("a", (2, 40 * S))
    pipeline.turns()
    assert ids(pipeline) == [1], "b says nothing of later times"
    pipeline.write("b", (3, 25 * S), (4, 50 * S))
    pipeline.turns()
    assert ids(pipeline) == [1, 3, 2]
    assert {row[:1] + row[3:4] for row in pipeline.rows(SHOWN)} == {("a", None), ("b", 30)}
    again = operators.advance_watermark(pipeline.state, f"b/{NAME}", SECOND.format(45))
    assert again["watermark"] == "1970-01-01T00:00:45.000000Z", "a database may stand in front"


def test_a_watermark_may_be_pushed_before_any_change_comes(event_pipeline: MakePipeline) -> None:
    pipeline = event_pipeline()
    push(pipeline, 20)
    assert pipeline.rows(SHOWN) == [("a", False, False, 20, 20)]
    pipeline.write("a", (1, 15 * S))
    pipeline.turns()
    assert delivered_rows(pipeline) == [("a", 1, True)]


@pytest.mark.parametrize("step", ["planned", "released", "settled"])
def test_commands_of_operators_hold_through_crashes(
    event_pipeline: MakePipeline, fate: Fate, step: str
) -> None:
    pipeline = event_pipeline(sources=("a", "b"), event_time={"late_tolerance": "5s"})
    pipeline.write("a", (1, 10 * S), (2, 20 * S), (3, 40 * S))
    pipeline.turns()
    pipeline.ordering.show(at_once=True)
    operators.advance_watermark(pipeline.state, NAME, SECOND.format(20))
    operators.set_partition_idle(pipeline.state, f"b/{NAME}", "public.item")
    fate.let_die(step)
    pipeline.ordering.follow(read_controls(pipeline.state, NAME, pipeline.sources))
    assert fate.turns(pipeline), "it did not die"
    pipeline.start()
    pipeline.turns()
    assert delivered_rows(pipeline) == [("a", 1, False), ("a", 2, False)]
    pipeline.write("a", (4, 50 * S))
    pipeline.turns()
    assert ids(pipeline) == [1, 2, 3], "b is still idle"
    pipeline.ordering.show(at_once=True)
    assert [row[:4] for row in pipeline.rows(SHOWN)] == [
        ("a", False, False, 20),
        ("b", True, True, 20),
    ]


def test_a_partition_that_is_marked_idle_holds_back_no_other_until_it_is_marked_active(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(tables=("item", "other"))
    pipeline.write("a", (1, 10 * S))
    pipeline.turns()
    pipeline.ordering.show(at_once=True)
    assert ids(pipeline) == [], "the other table has had no change"
    mark(pipeline, "other", "a", idle=True)
    assert ids(pipeline) == [1]
    assert [row[1:3] for row in pipeline.rows(SHOWN)] == [(False, False), (True, True)]
    pipeline.write("a", (2, 12 * S), table=2)
    pipeline.write("a", (3, 20 * S))
    pipeline.turns()
    assert ids(pipeline) == [1, 2, 3], "whatever comes of it"
    mark(pipeline, "other", "a", idle=False)
    pipeline.write("a", (4, 30 * S))
    pipeline.turns()
    assert ids(pipeline) == [1, 2, 3], "it counts from its last event on"
    pipeline.write("a", (5, 31 * S), table=2)
    pipeline.turns()
    assert ids(pipeline) == [1, 2, 3, 4]
    assert {row[1:3] for row in pipeline.rows(SHOWN)} == {(False, False)}


def test_a_partition_that_is_idle_by_the_clock_is_marked_active(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(tables=("item", "other"), event_time={"idle_timeout": "10s"})
    pipeline.write("a", (1, 10 * S), at_us=60 * S)
    pipeline.turns()
    pipeline.ordering._clocks["a"]._now += 20 * S
    pipeline.write("a", (2, 20 * S), at_us=80 * S)
    pipeline.turns()
    pipeline.ordering.show(at_once=True)
    assert ids(pipeline) == [1, 2], "the other table is idle"
    mark(pipeline, "other", "a", idle=False)
    pipeline.write("a", (3, 30 * S), at_us=81 * S)
    pipeline.turns()
    assert ids(pipeline) == [1, 2], "and now it holds the first one back"


def test_a_pushed_watermark_is_forgotten_where_everything_comes_again(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    pipeline.write("a", (1, 10 * S))
    pipeline.write("b", (2, 12 * S))
    pipeline.turns()
    push(pipeline, 50)
    push(pipeline, 40, "a")
    assert ids(pipeline) == [1, 2]
    operators.rewind(pipeline.state, f"a/{NAME}", to_earliest=True)
    assert {row[3] for row in pipeline.rows(SHOWN)} == {None}
    push_after = operators.advance_watermark(pipeline.state, NAME, SECOND.format(11), "b")
    assert push_after["watermark"] == "1970-01-01T00:00:11.000000Z"
    pipeline.read_resume_state()
    pipeline.turns()
    assert delivered_rows(pipeline)[2:] == [("a", 1, False)], "it is not late"
    assert {row[3] for row in pipeline.rows(SHOWN)} == {None, 11}, "what is said since then holds"


def test_a_pushed_watermark_is_forgotten_with_another_event_time(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline()
    push(pipeline, 50)
    pipeline.change_event_time(column="made")
    assert pipeline.rows("SELECT pushed_to FROM walbrook.event_time") == [(None,)]


@pytest.mark.parametrize(
    ("call", "what", "hint"),
    [
        ("advance_watermark('plain', now())", "plain is not in event-time order", "ordering"),
        ("set_partition_idle('plain', 'public.item')", "plain is not in event-time", "ordering"),
        ("advance_watermark('nobody', now())", "there is no consumer nobody", "watermarks"),
        ("set_partition_idle('nobody', 'public.item')", "there is no consumer nobody", "timed"),
        ("advance_watermark('timed', 'infinity')", "cannot be advanced to infinity", "9999"),
        ("advance_watermark('timed', NULL)", "cannot be advanced to null", "9999"),
        ("advance_watermark('timed', '10000-01-01 UTC')", "cannot be advanced", "9999"),
        ("advance_watermark('timed', now(), 'c')", "timed reads no database c", "watermarks"),
        ("set_partition_idle('timed', 'item')", "timed has no partition item", "public.item"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    event_pipeline: MakePipeline, call: str, what: str, hint: str
) -> None:
    pipeline = event_pipeline()
    pipeline.ordering.show(at_once=True)
    register_source(
        pipeline.state, name="a", slot="slot", publication="pub", system_identifier="1", slot_lsn=8,
        consumers=[NAME, "plain"],
    )  # fmt: skip
    with pytest.raises(psycopg.Error) as found:
        pipeline.state.execute(f"SELECT walbrook.{call}".encode())
    assert what in str(found.value)
    assert hint in str(found.value.diag.message_hint)


def test_the_watermark_of_the_clock_cannot_be_pushed(event_pipeline: MakePipeline) -> None:
    pipeline = event_pipeline(ordering="processing_time")
    pipeline.ordering.show(at_once=True)
    with pytest.raises(OperatorError, match="not in event-time order") as found:
        operators.advance_watermark(pipeline.state, NAME, "2100-01-01 UTC")
    assert "follows the clock" in found.value.fix
    with pytest.raises(OperatorError, match="not in event-time order"):
        operators.set_partition_idle(pipeline.state, NAME, "public.item")


@pytest.mark.usefixtures("source")
def test_pushes_and_marks_are_heard_within_a_second(
    event_pipeline: MakePipeline, event_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = event_pipeline(sources=("a", "b"), event_time={"late_tolerance": "5s"})

    def shown(query: str) -> None:
        until(query, lambda: pipeline.rows(query) == [(True,)])

    with served(pipeline, event_database):
        pipeline.write("a", (1, 10 * S), (2, 20 * S))
        shown("SELECT count(*) = 2 AND bool_or(buffered = 2) FROM walbrook.watermarks")
        pipeline.state.execute(
            f"SELECT walbrook.advance_watermark('{NAME}', '1970-01-01 00:00:10+00')".encode()
        )
        until("the first", lambda: ids(pipeline) == [1])
        shown("SELECT bool_and(released_to = pushed_to) FROM walbrook.watermarks")
        pipeline.state.execute(
            f"SELECT walbrook.set_partition_idle('b/{NAME}', 'public.item')".encode()
        )
        shown("SELECT count(*) = 1 FROM walbrook.watermarks WHERE marked_idle")
        pipeline.write("a", (3, 30 * S))
        until("the second", lambda: ids(pipeline) == [1, 2])


def test_the_command_line_and_http_pass_them_on(
    event_pipeline: MakePipeline, event_database: Database
) -> None:
    pipeline = event_pipeline()
    pipeline.ordering.show(at_once=True)
    config = pipeline.directory / "walbrook.yaml"
    url = _url(event_database.dsn)
    config.write_text(
        f"databases: [{{name: a, url: '{url}', slot: {{name: s}}, publication: {{name: p}}}}]\n"
        f"state: {{url: '{url}'}}\nsinks: []\n"
    )

    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "-c", str(config)], catch_exceptions=False)
        return result.output.strip()

    assert said("advance-watermark", NAME, "1970-01-01 00:00:10+00") == (
        f"the watermark of {NAME} is at least 1970-01-01T00:00:10.000000Z from now on"
    )
    assert (
        said("set-partition-idle", NAME, "public.item") == f"public.item of {NAME} is marked idle"
    )
    assert pipeline.rows("SELECT marked_idle FROM walbrook.watermarks") == [(True,)]
    assert said("set-partition-idle", NAME, "public.item", "--active").endswith("is marked active")
    assert pipeline.rows("SELECT marked_idle FROM walbrook.watermarks") == [(False,)]
    with api_of(event_database.dsn) as client:
        path = f"{NAME}/"
        to = {"to_time": "1970-01-01T00:00:30Z", "source": "a"}
        answer = client.post(f"{path}advance_watermark", json=to)
        assert answer.json() == {"watermark": "1970-01-01T00:00:30.000000Z"}
        answer = client.post(f"{path}set_partition_idle", json={"partition": "public.item"})
        assert (answer.status_code, answer.json()["consumer"]) == (200, NAME)
        assert pipeline.rows("SELECT marked_idle FROM walbrook.watermarks") == [(True,)]
        for body, status in ({"to_time": "soon"}, 400), ({}, 400), ({"to": "x"}, 400):
            assert client.post(f"{path}advance_watermark", json=body).status_code == status
        missing = client.post(f"{path}set_partition_idle", json={"partition": "nothing"})
        assert missing.status_code == 404
