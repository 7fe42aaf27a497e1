"""What pressure leads to: widening first, then deferring the lowest, and back; never for ever."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cdc.log.view import LogView
from spark_pipeline.capacity.backlog import Bounds
from spark_pipeline.capacity.pressure import (
    DEFERRED_MAX_S,
    STEP_MIN_S,
    TURN_MIN_S,
    WIDENED_MAX,
    Gauge,
    Load,
    Pressure,
    Served,
)
from tests import pgoutput
from tests.wire_messages import transaction
from tests.written_log import WrittenLog

MOST = Bounds(1000, 1 << 20)
HIGH = Load(Bounds(5000, 0), 20.0, 1.0)
BETWEEN = Load(Bounds(1000, 0), 5.0, 0.7)
LOW = Load(Bounds(0, 0), 0.0, 0.0)
LATE, HEAVY = Load(Bounds(1, 1), 20.0, 1.0), Load(Bounds(1, 5 << 20), 0.0, 1.0)

loads = st.lists(
    st.tuples(st.sampled_from([HIGH, LATE, HEAVY, BETWEEN, LOW]), st.integers(1, 40)),
    min_size=1,
    max_size=12,
)
priorities = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10), min_size=1)


@given(loads=loads, priorities=priorities, tick_s=st.sampled_from([0.9, 1.0, 1.7]))
def test_whatever_comes_no_consumer_is_deferred_forever_and_one_is_always_served(
    loads: list[tuple[Load, int]], priorities: dict[str, int], tick_s: float
) -> None:
    pressure, now = Pressure(MOST), 0.0
    away: dict[str, float] = {}
    back: dict[str, float] = {}
    level, changed_at = 0, float("-inf")
    for load, times in loads:
        for _ in range(times):
            now += tick_s
            here = {n: Served(p) for n, p in priorities.items() if n not in away}
            decided = pressure.tick(load, here, now)
            for name in decided.resume:
                assert now - away.pop(name) < DEFERRED_MAX_S + tick_s
                back[name] = now
            for name in decided.defer:
                assert now - back.get(name, float("-inf")) >= TURN_MIN_S
                away[name] = now
            assert len(decided.defer) <= 1
            assert decided.level == (2 if away else int(decided.widened_by > 1))
            assert 1 <= decided.widened_by <= WIDENED_MAX
            assert all(priorities[name] < max(priorities.values()) for name in away)
            assert away.keys() < priorities.keys()
            assert all(now - since < DEFERRED_MAX_S for since in away.values())
            if decided.level != level:
                assert now - changed_at >= STEP_MIN_S
                level, changed_at = decided.level, now


@given(loads=loads)
def test_without_pressure_and_among_equals_no_consumer_is_deferred(
    loads: list[tuple[Load, int]],
) -> None:
    calm, equal, now = Pressure(MOST), Pressure(MOST), 0.0
    for load, times in loads:
        for _ in range(times):
            now += 1.0
            without = calm.tick(
                BETWEEN if load.is_high(MOST) else load, {"a": Served(1), "b": Served(9)}, now
            )
            assert (without.level, without.widened_by, without.defer) == (0, 1.0, ())
            assert equal.tick(load, {"a": Served(5), "b": Served(5)}, now).defer == ()


def test_pressure_widens_then_defers_the_lowest_one_by_one_and_is_undone_the_other_way() -> None:
    pressure = Pressure(MOST)
    here = {
        "top": Served(9),
        "cheap": Served(2, took_s=1.0),
        "dear": Served(2, took_s=9.0),
        "middle": Served(5),
    }
    done: list[tuple[int, float, str]] = []

    def at(second: int, load: Load) -> None:
        before = done[-1][1] if done else 1.0
        decided = pressure.tick(load, here, float(second))
        for name in decided.defer:
            served = here.pop(name)
            away[name] = served
            done.append((second, decided.widened_by, f"-{name}"))
        for name in decided.resume:
            here[name] = away.pop(name)
            done.append((second, decided.widened_by, f"+{name}"))
        if decided.widened_by != before:
            done.append((second, decided.widened_by, ""))

    away: dict[str, Served] = {}
    for second in range(31):
        at(second, HIGH)
    assert done == [
        (2, 2.0, ""), (4, 4.0, ""), (9, 4.0, "-dear"), (14, 4.0, "-cheap"), (19, 4.0, "-middle"),
    ]  # fmt: skip
    done = done[-1:]
    for second in range(31, 70):
        at(second, LOW)
    assert done[1:] == [
        (36, 4.0, "+middle"), (41, 4.0, "+cheap"), (46, 4.0, "+dear"), (51, 2.0, ""), (56, 1.0, ""),
    ]  # fmt: skip
    assert pressure.level == 0


def test_a_pipeline_with_time_to_spare_is_not_under_pressure() -> None:
    idle = Load(Bounds(10**9, 10**12), 1000.0, 0.3)
    assert not idle.is_high(MOST)
    assert idle.is_low(MOST)
    for load in (HIGH, LATE, HEAVY):
        assert load.is_high(MOST)
        assert not load.is_low(MOST)


def test_the_gauge_says_what_waits_since_when_and_how_busy_the_pipeline_is(tmp_path: Path) -> None:
    item = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
    log = WrittenLog(tmp_path)
    for number in range(1, 4):
        rows = [pgoutput.insert(1, [str(row), "n"]) for row in range(10 * number)]
        log.append(item, *transaction(number * 1000, *rows))
    view, gauge = LogView(log.directory), Gauge()
    gauge.sample(at_work=True)
    gauge.sample(at_work=False)
    load = gauge.read(view, 0, 100.0)
    assert (load.backlog.rows, load.latency_s, load.busy_ratio) == (60, 0.0, 0.25)
    assert load.backlog.bytes == int(view.entries(0, 3)["bytes"].sum())
    log.append(item, *transaction(9000, pgoutput.insert(1, ["1", "n"])))
    load = gauge.read(view, 2, 107.0)
    assert (load.backlog.rows, load.latency_s) == (31, 7.0), "three batches were there at first"
    assert gauge.read(view, 3, 109.0).latency_s == 2.0
    for _ in range(8):
        load = gauge.read(view, 4, 120.0)
    assert load == Load(Bounds(0, 0), 0.0, 0.0)
