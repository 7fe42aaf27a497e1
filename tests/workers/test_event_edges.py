"""Event time where steps, restarts and operators meet: cases that once went wrong."""

from __future__ import annotations

import shutil
import time
from datetime import datetime
from typing import Any

import pytest

from cdc.change import synthetic_rows
from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at
from cdc.errors import CorruptionError
from cdc.eventtime.buffer import EventTimeBuffer
from cdc.eventtime.released import Released
from cdc.eventtime.sequencer import WatermarkStep
from cdc.eventtime.times import Times
from cdc.log.writer import LogWriter
from cdc.replication.wire.seal import Sealer
from cdc.state.event_numbers import Numbering
from cdc.state.gaps import skip_evicted
from spark_pipeline.delivery.outcome import Poison
from spark_pipeline.eventtime.partitions import UnknownTableError
from spark_pipeline.eventtime.release import WINDOW, OwnRows
from spark_pipeline.eventtime.windows.due import WindowResults
from tests import pgoutput
from tests.event_pipeline import ITEM, NAME, OTHER, EventPipeline, S
from tests.fix_event_pipeline import Fate, MakePipeline
from tests.log_pipeline import arrived

SIZE = 10 * S


class Counts:
    """Windows of ten seconds, counted without Spark; what has the id 2 cannot be counted in."""

    def due(self, times: Times) -> Times:
        return (times // SIZE + 1) * SIZE - 1

    def results(
        self, done: Released | None, _left: EventTimeBuffer, _step: WatermarkStep, now: datetime
    ) -> WindowResults:
        if done is None:
            return WindowResults([], {})
        bad = [at for at, text in enumerate(done.rows["record"].to_pylist()) if '"id":2,' in text]
        good = len(done) - len(bad)
        told = [OwnRows(synthetic_rows(WINDOW, [f'{{"n":{good}}}'], now))] if good else []
        poisons: dict[int, list[Poison]] = {}
        for at in bad:
            poison = Poison(cursor_at(done.rows, at), "it cannot be counted")
            poisons.setdefault(int(done.sources[at]), []).append(poison)
        return WindowResults(told, poisons)


def seen(pipeline: EventPipeline) -> list[tuple[Any, ...]]:
    return [
        (m["action"], m["record"].get("id", m["record"].get("n")), m["metadata"]["sequence"],
         m["metadata"].get("late"))
        for m in arrived(pipeline.directory / NAME)
    ]  # fmt: skip


@pytest.mark.parametrize("step", ["planned", "sending"])
def test_a_delete_that_was_settled_behind_the_cursor_stays_settled_whatever_the_watermark_is(
    event_pipeline: MakePipeline, fate: Fate, step: str
) -> None:
    def run(die: str) -> list[tuple[Any, ...]]:
        pipeline = event_pipeline(tables=("item", "other"), event_time={"late_tolerance": "2s"})
        pipeline.write_messages("a", OTHER, pgoutput.insert(2, ["100", str(50 * S)]))
        gone = pgoutput.delete(1, key=["1", None])
        first, second = (pgoutput.insert(1, [n, str(at * S)]) for n, at in (("1", 10), ("2", 12)))
        pipeline.write_messages("a", ITEM, first, gone, second)
        pipeline.turns()
        pipeline.ordering.settle()
        pipeline.write("a", (3, 13 * S + S // 2))
        pipeline.turns()  # the watermark moves, nothing goes out, and nothing is written
        pipeline.write("a", (4, 20 * S))
        if die:
            fate.let_die(die)
            assert fate.turns(pipeline)
            pipeline.start()
        pipeline.turns()
        return seen(pipeline)

    assert run(step) == run("")


def test_a_row_that_a_window_cannot_count_is_a_dead_letter_after_a_restart_too(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(windows=Counts())
    pipeline.write("a", (1, 1 * S), (2, 2 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    pipeline.start()
    pipeline.write("a", (3, 30 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    assert [each[:2] for each in seen(pipeline)] == [("window", 1)]
    assert pipeline.rows("SELECT kind, commit_idx FROM walbrook.dead_letters") == [
        ("expression", 1)
    ]
    assert pipeline.rows("SELECT dead FROM walbrook.consumers") == [(1,)]


@pytest.mark.parametrize("step", ["planned", "sending"])
def test_a_window_of_which_nothing_could_be_counted_changes_nothing_of_what_follows(
    event_pipeline: MakePipeline, fate: Fate, step: str
) -> None:
    pipeline = event_pipeline(windows=Counts())
    pipeline.write("a", (2, 2 * S))
    pipeline.turns()
    pipeline.write("a", (5, 12 * S))
    pipeline.turns()
    pipeline.write("a", (6, 25 * S))
    fate.let_die(step)
    assert fate.turns(pipeline)
    pipeline.start()
    pipeline.turns()
    assert [each[:2] for each in seen(pipeline)] == [("window", 1)]
    assert pipeline.rows("SELECT kind FROM walbrook.dead_letters") == [("expression",)]


def test_the_last_window_closes_when_nothing_more_comes(event_pipeline: MakePipeline) -> None:
    idle = {"idle_timeout": "100ms", "late_tolerance": "0"}
    pipeline = event_pipeline(windows=Counts(), event_time=idle)
    pipeline.write("a", (1, 1 * S), (3, 9 * S + S // 2))
    deadline = time.monotonic() + 20
    while not seen(pipeline) and time.monotonic() < deadline:
        pipeline.step()
    assert [each[:2] for each in seen(pipeline)] == [("window", 2)]


@pytest.mark.parametrize("place", ["0/200:0", "0/100:1", "0/100:0"])
def test_after_a_time_in_the_future_a_rewind_starts_over_wherever_the_consumer_stands(
    event_pipeline: MakePipeline, place: str
) -> None:
    pipeline = event_pipeline(event_time={"late_tolerance": "2s"})
    pipeline.write("a", (1, 5 * S), (2, 10**9 * S))
    pipeline.write("a", (3, 7 * S))
    pipeline.turns()
    pipeline.write("a", (5, 8 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    assert pipeline.cursors() == {"a": Cursor(0x100, 1)}, "the row in the future is held back"
    assert seen(pipeline)[-1][3] is True
    pipeline.state.execute(
        "UPDATE walbrook.sources SET log_lsn = '0/900', log_idx = 0, earliest_lsn = '0/8',"
        " earliest_idx = 0"
    )
    pipeline.rows(f"SELECT walbrook.rewind('{NAME}', '{place}')")
    before = len(seen(pipeline))
    # As a filter would do that keeps such rows out.
    pipeline.sink = pipeline.sink.model_copy(update={"actions": ("insert", "delete")})
    pipeline.read_resume_state()
    pipeline.turns()
    again = seen(pipeline)[before:]
    assert not any(late for *_, late in again)
    assert {number for _, number, *_ in again} >= {3, 5}
    numbers = [tuple(map(int, each[2].split("-"))) for each in seen(pipeline)]
    assert numbers == sorted(set(numbers))


def test_a_log_that_lost_what_a_release_had_read_is_reported(
    event_pipeline: MakePipeline, fate: Fate
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    for n in (1, 2, 3):
        pipeline.write("a", (n, n * S))
        pipeline.write("b", (10 + n, n * S))
    fate.let_die("planned")
    assert fate.turns(pipeline)
    pipeline.stop_serving()
    pipeline.logs["b"].close()
    shutil.rmtree(pipeline.directory / "b" / "log")
    pipeline.logs["b"] = LogWriter(pipeline.directory / "b" / "log")
    pipeline._sealers["b"], pipeline._lsn["b"] = Sealer(), 0
    pipeline.write("b", (11, 1 * S))
    pipeline.write("a", (9, 9 * S))
    pipeline.start()
    with pytest.raises(CorruptionError, match="the change log of b ends at"):
        pipeline.turns()


def test_a_delete_behind_a_row_that_was_evicted_comes(event_pipeline: MakePipeline) -> None:
    pipeline = event_pipeline(event_time={"late_tolerance": "5s"})
    pipeline.write("a", (1, 10 * S))
    pipeline.write("a", (2, 100 * S))
    pipeline.write_messages("a", ITEM, pgoutput.delete(1, key=["7", None]))
    pipeline.turns()
    pipeline.ordering.settle()
    assert pipeline.cursors() == {"a": Cursor(0x200, 0)}
    evicted, term = Cursor(0x300, 0), pipeline.settings["a"].term
    skip_evicted(pipeline.state, source="a", term=term, evicted=evicted)
    pipeline.read_resume_state()
    pipeline.write("a", (3, 200 * S))
    pipeline.turns()
    assert [each[0] for each in seen(pipeline)] == ["insert", "gap", "delete"]


def test_a_table_that_is_not_known_is_named(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(tables=())
    pipeline.write("a", (1, S))
    with pytest.raises(UnknownTableError, match=r"public\.item"):
        pipeline.turns()


def test_numbers_that_start_over_are_above_those_of_a_release_that_began_a_range() -> None:
    near = Numbering(11, (1 << 30) - 5)
    assert near.beyond_used().place(0) > near.after(1 << 30).place(0)


def test_a_large_release_goes_out_piece_by_piece(event_pipeline: MakePipeline, fate: Fate) -> None:
    """So that a pause or a stop is heard in between; ``fate`` makes pieces of two messages."""
    pipeline = event_pipeline()
    pipeline.write("a", *((n, n * S) for n in range(1, 8)))
    assert pipeline.ordering.turn()
    sizes = [len(seen(pipeline))]
    while pipeline.ordering.turn():
        sizes.append(len(seen(pipeline)))
    assert sizes[:4] == [2, 4, 6, 7]


def test_while_only_the_watermark_moves_nothing_turns_and_a_stop_flushes(
    event_pipeline: MakePipeline,
) -> None:
    idle = {"idle_timeout": "50ms", "late_tolerance": "1h", "emit_watermarks": True}
    pipeline = event_pipeline(event_time=idle)
    pipeline.write("a", (1, 10_000 * S), (2, 10_001 * S))
    pipeline.turns()
    deadline, idle_turns = time.monotonic() + 2.5, 0
    while time.monotonic() < deadline:
        idle_turns += not pipeline.step()
    assert idle_turns >= 5, "it turned without a pause"
    told = [m for m in arrived(pipeline.directory / NAME) if m["action"] == "watermark"]
    assert 1 <= len(told) <= 4, "a watermark a second is enough"
    while pipeline.ordering.turn(flush=True):
        pass
    ids = [m["record"]["id"] for m in arrived(pipeline.directory / NAME) if m["action"] == "insert"]
    assert ids == [1, 2]
