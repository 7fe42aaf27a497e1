"""Sinks in the order of arrival, with watermarks and windows by the clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np
import orjson
import pytest

from cdc.change import synthetic_rows
from cdc.eventtime.buffer import EventTimeBuffer
from cdc.eventtime.released import Released
from cdc.eventtime.sequencer import WatermarkStep
from spark_pipeline.eventtime import ordering as ordering_module
from spark_pipeline.eventtime import timing
from spark_pipeline.eventtime.release import WINDOW, OwnRows
from spark_pipeline.eventtime.windows.aggregate import last_window_end
from spark_pipeline.eventtime.windows.due import WindowResults
from tests import pgoutput
from tests.event_crashes import Phase, in_files, with_crashes, without_crashes
from tests.event_pipeline import ITEM, NAME, EventPipeline, S
from tests.event_service import source
from tests.event_stages import served
from tests.fix_event_pipeline import STEPS, Fate, MakePipeline
from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.waiting import until

__all__ = ["source"]
pytestmark = pytest.mark.migrated

WINDOW_OF = {"size": "4s", "aggregates": {"n": "count(*)"}}


class Clock:
    """The clock of the service."""

    def __init__(self) -> None:
        self.now = 100 * S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "wall_clock_us", lambda: made.now)
    monkeypatch.setattr(ordering_module, "_QUIET_S", 0.0)  # a turn is a look at the clock
    return made


class Listed:
    """Windows of four seconds: each lists its rows with their times."""

    def due(self, times: Any) -> Any:
        return last_window_end(times, 4 * S, 4 * S) - 1

    def results(
        self, released: Released | None, left: EventTimeBuffer, step: WatermarkStep, now: datetime
    ) -> WindowResults:
        if released is None:
            return WindowResults([], {})
        ends = last_window_end(released.times, 4 * S, 4 * S)
        assert ((ends - 1 > step.before) & (ends - 1 <= step.watermark)).all()
        records = [orjson.loads(text) for text in released.rows.column("record").to_pylist()]
        texts = []
        for end in np.unique(ends).tolist():
            rows = [
                [record["id"], time / S]
                for record, time, of in zip(records, released.times.tolist(), ends, strict=True)
                if of == end
            ]
            texts.append(orjson.dumps({"end": end // S, "rows": rows}).decode())
        return WindowResults([OwnRows(synthetic_rows(WINDOW, texts, now))], {})


def messages(pipeline: EventPipeline) -> list[tuple[Any, ...]]:
    """Of each message its id or action, and its time of arrival."""
    return [
        (m["record"].get("id", m["action"]), m["metadata"].get("event_time"))
        for m in arrived(pipeline.directory / NAME)
    ]


def results(pipeline: EventPipeline) -> list[tuple[int, list[list[float]]]]:
    return [(m["record"]["end"], m["record"]["rows"]) for m in arrived(pipeline.directory / NAME)]


def at(second: float) -> str:
    return f"1970-01-01T00:{int(second) // 60:02}:{second % 60:09.6f}Z"


def test_changes_come_at_once_and_in_the_order_of_their_log(
    event_pipeline: MakePipeline, clock: Clock
) -> None:
    actions = ["insert", "delete", "truncate"]
    pipeline = event_pipeline(ordering="processing_time", actions=actions)
    clock.now = 95 * S  # behind the clock of the database
    pipeline.write("a", (1, 7), (2, None), at_us=98 * S)
    delete = pgoutput.delete(1, key=["1", None])
    pipeline.write_messages("a", ITEM, delete, pgoutput.truncate([1]), at_us=97 * S)
    pipeline.write("a", (3, 5), at_us=99 * S)
    pipeline.turns()
    found = [(m["action"], m["metadata"]["event_time"]) for m in arrived(pipeline.directory / NAME)]
    assert found == [
        ("insert", at(98)),
        ("insert", at(98)),
        ("delete", at(98)),
        ("truncate", at(98)),
        ("insert", at(99)),
    ], "a time never goes back along a log"
    pipeline.write("a", (4, 1), at_us=60 * S)
    pipeline.turns()
    assert messages(pipeline)[-1] == (4, at(99.000001)), "it is not late, but arrives later"
    assert "late" not in arrived(pipeline.directory / NAME)[-1]["metadata"]
    assert pipeline.rows("SELECT late_count, buffered FROM walbrook.watermarks") in ([], [(0, 0)])


def test_a_silent_database_or_table_is_not_waited_for(
    event_pipeline: MakePipeline, clock: Clock
) -> None:
    pipeline = event_pipeline(
        ordering="processing_time", sources=("a", "b"), tables=("item", "other")
    )
    pipeline.write("a", (1, 0), at_us=90 * S)
    pipeline.turns()
    assert [each[0] for each in messages(pipeline)] == [1]
    pipeline.write("b", (2, 0), at_us=80 * S)
    pipeline.write("b", (3, 0), at_us=92 * S)
    pipeline.turns()
    assert [each[0] for each in messages(pipeline)] == [1, 2, 3]


def test_the_watermark_follows_the_clock_while_nothing_comes(
    event_pipeline: MakePipeline, clock: Clock
) -> None:
    pipeline = event_pipeline(ordering="processing_time", event_time={"emit_watermarks": True})
    pipeline.write("a", (1, 0), at_us=98 * S)
    pipeline.turns()
    clock.now = 104 * S + 7
    pipeline.turns()
    pipeline.ordering.settle()
    pipeline.ordering.show(at_once=True)
    found = [m["record"].get("watermark", 1) for m in arrived(pipeline.directory / NAME)]
    assert found == [1, at(99.999999), at(103.999999)]
    ((watermark, idle, released),) = pipeline.rows(
        "SELECT extract(epoch FROM watermark), idle_since, extract(epoch FROM released_to)"
        " FROM walbrook.watermarks"
    )
    assert (float(watermark), idle, float(released)) == (103.999999, None, 103.999999)


def test_windows_close_by_the_clock_and_what_comes_then_is_in_the_next(
    event_pipeline: MakePipeline, clock: Clock
) -> None:
    pipeline = event_pipeline(ordering="processing_time", window=WINDOW_OF, windows=Listed())
    pipeline.write("a", (1, 0), at_us=100 * S + 1)
    pipeline.write("a", (2, 0), at_us=101 * S)
    clock.now = 103 * S
    pipeline.turns()
    assert results(pipeline) == [], "the window is open"
    clock.now = 104 * S
    pipeline.turns()
    assert results(pipeline) == [(104, [[1, 100.000001], [2, 101]])]
    pipeline.write("a", (3, 0), at_us=102 * S)  # committed before it closed, arrived after
    pipeline.turns()
    pipeline.ordering.settle()
    pipeline.start()
    clock.now = 108 * S
    pipeline.turns()
    assert results(pipeline)[1:] == [(108, [[3, 104]])]
    assert pipeline.rows("SELECT arrived FROM walbrook.event_sources") == [([],)]


def test_a_backlog_is_in_the_windows_of_its_commits(
    event_pipeline: MakePipeline, clock: Clock
) -> None:
    pipeline = event_pipeline(
        ordering="processing_time", sources=("a", "b"), window=WINDOW_OF, windows=Listed()
    )
    clock.now = 1_000 * S
    for number in range(4):
        pipeline.write("a", (number, 0), at_us=(10 + 3 * number) * S)
        pipeline.write("b", (10 + number, 0), at_us=(11 + 3 * number) * S)
    pipeline.turns()
    assert [(end, [row[0] for row in rows]) for end, rows in results(pipeline)] == [
        (12, [0, 10]),
        (16, [1, 11]),
        (20, [2, 3, 12]),
        (24, [13]),
    ]


def test_a_rewind_gives_the_windows_of_the_commits_again(
    event_pipeline: MakePipeline, clock: Clock
) -> None:
    pipeline = event_pipeline(ordering="processing_time", window=WINDOW_OF, windows=Listed())
    pipeline.write("a", (1, 0), at_us=97 * S)
    pipeline.turns()
    pipeline.write("a", (2, 0), at_us=98 * S)  # its window has closed
    pipeline.turns()
    clock.now = 104 * S
    pipeline.turns()
    assert results(pipeline) == [(100, [[1, 97]]), (104, [[2, 100]])]
    pipeline.rows(f"SELECT walbrook.rewind('{NAME}', to_earliest => true)")
    pipeline.read_resume_state()
    pipeline.turns()
    assert results(pipeline)[2:] == [(100, [[1, 97], [2, 98]])]


def test_another_order_starts_over(event_pipeline: MakePipeline, clock: Clock) -> None:
    pipeline = event_pipeline()
    pipeline.write("a", (1, 5 * S))
    pipeline.turns()
    known = pipeline.sink.model_dump(exclude={"event_time", "databases"})
    pipeline.sink = type(pipeline.sink).model_validate({**known, "ordering": "processing_time"})
    pipeline.start()
    assert pipeline.rows("SELECT ordering FROM walbrook.event_time") == [("processing_time",)]
    pipeline.write("a", (2, 1 * S), at_us=90 * S)
    pipeline.turns()
    assert [each[0] for each in messages(pipeline)] == [1, 2]


@pytest.mark.usefixtures("source")
def test_the_stage_serves_a_consumer_by_the_clock(
    event_pipeline: MakePipeline, event_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = event_pipeline(ordering="processing_time", sources=("a", "b"))
    with served(pipeline, event_database):
        pipeline.write("a", (1, 9), at_us=1_000 * S)
        until("the first", lambda: [each[0] for each in messages(pipeline)] == [1])
        pipeline.write("a", (2, 5), at_us=1_001 * S)
        until("the second", lambda: [each[0] for each in messages(pipeline)] == [1, 2])
        now = "SELECT now() - released_to < interval '1 minute' FROM walbrook.watermarks LIMIT 1"
        until("the clock to move the watermark", lambda: pipeline.rows(now) == [(True,)])
    assert pipeline.rows("SELECT count(*) FROM walbrook.dead_letters") == [(0,)]


class Arrivals:
    """Changes of two databases whose commits are before and behind the clock of the service."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next = 0

    def phase(self) -> Phase:
        rng = self._random
        return [
            (name, [self._insert() for _ in range(rng.randrange(1, 4))])
            for name in ("a", "b")
            for _ in range(rng.randrange(3))
        ]

    def _insert(self) -> bytes:
        self._next += 1
        return pgoutput.insert(1, [str(self._next), "0"])


@pytest.mark.parametrize("seeds", [3, pytest.param(8, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("windows", [False, True], ids=["plain", "windows"])
def test_random_crashes_change_no_time_no_window_and_no_order(
    event_pipeline: MakePipeline, clock: Clock, fate: Fate, windows: bool, seeds: int
) -> None:
    deaths = 0
    for seed in range(seeds):
        phases, expected = phases_of(seed), None
        for crashes in (False, True):
            clock.now, rng = 100 * S, random.Random(seed)

            def write(pipeline: EventPipeline, phase: Phase, rng: random.Random = rng) -> None:
                clock.now += rng.choice([0, S // 2, S, 3 * S])
                for name, changes in phase:
                    skew = rng.choice([0, 0, -S, -5 * S, 2 * S])
                    pipeline.write_messages(name, ITEM, *changes, at_us=clock.now + skew)

            pipeline = event_pipeline(
                ordering="processing_time",
                sources=("a", "b"),
                **({"window": WINDOW_OF, "windows": Listed()} if windows else {}),
            )
            if crashes:
                deaths += with_crashes(pipeline, phases, fate, steps_of(seed).__next__, write)
            else:
                without_crashes(pipeline, phases, write)
                write(pipeline, [])
            clock.now += 60 * S
            pipeline.turns()
            pipeline.ordering.settle()
            found = results(pipeline) if windows else in_files(pipeline)
            assert expected is None or found == expected, f"seed {seed}"
            expected = found
        assert expected
    assert deaths > seeds, "it hardly died"


def phases_of(seed: int) -> list[Phase]:
    made = Arrivals(seed)
    return [made.phase() for _ in range(12)]


def steps_of(seed: int) -> Iterator[tuple[str, int]]:
    rng = random.Random(seed)
    while True:
        yield rng.choice(STEPS), rng.randrange(1, 3)
