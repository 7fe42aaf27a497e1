"""Watermarks of partitions and of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cdc.eventtime import NO_TIME
from cdc.eventtime.tracker import PartitionState, TrackerMetrics, WatermarkTracker
from tests.examples import examples

IDLE = 100


class Clocks(dict[str, int]):
    def __missing__(self, source: str) -> int:
        return 0


@pytest.fixture
def now() -> Clocks:
    return Clocks()


@pytest.fixture
def tracker(now: Clocks) -> WatermarkTracker:
    return WatermarkTracker(clock=lambda source: now[source], idle_timeout_us=IDLE)


def update(tracker: WatermarkTracker, *events: tuple[int, int]) -> int:
    codes, times = zip(*events, strict=True)
    tracker.update(np.array(codes, np.int32), np.array(times, np.int64))
    return tracker.look()


def test_a_watermark_is_the_largest_time_seen_minus_the_tolerance(
    tracker: WatermarkTracker,
) -> None:
    orders = tracker.register("shop", "orders", tolerance_us=5)
    assert tracker.look() == tracker.watermark == NO_TIME
    assert update(tracker, (orders, 50), (orders, 70), (orders, 60)) == 65
    assert update(tracker, (orders, 10)) == 65


def test_the_smallest_active_partition_counts(tracker: WatermarkTracker) -> None:
    orders = tracker.register("shop", "orders")
    items = tracker.register("shop", "items")
    stock = tracker.register("warehouse", "stock")
    assert update(tracker, (orders, 70), (items, 40)) == NO_TIME, "stock has no event yet"
    assert update(tracker, (stock, 50)) == 40
    assert update(tracker, (items, 90)) == 50
    assert tracker.holders() == {"warehouse"}


def test_an_idle_partition_holds_back_no_other_and_its_next_event_makes_it_active(
    tracker: WatermarkTracker, now: Clocks
) -> None:
    orders = tracker.register("shop", "orders")
    items = tracker.register("shop", "items")
    now["shop"] = IDLE - 1
    assert update(tracker, (orders, 70)) == NO_TIME
    now["shop"] = IDLE
    assert tracker.look() == 70, "items never had an event and is idle"
    assert [state.idle for state in tracker.partitions()] == [False, True]
    assert tracker.partitions()[1] == PartitionState(
        "shop", "items", NO_TIME, NO_TIME, 0, True, IDLE
    )
    assert update(tracker, (items, 75), (orders, 80)) == 75
    assert update(tracker, (orders, 200)) == 75, "items is active again"
    assert tracker.metrics == TrackerMetrics(2, 2, 0, advances=2, added=2, removed=0)


def test_an_event_behind_the_watermark_after_idleness_does_not_take_it_back(
    tracker: WatermarkTracker, now: Clocks
) -> None:
    orders, items = tracker.register("shop", "orders"), tracker.register("shop", "items")
    now["shop"] = IDLE
    assert update(tracker, (orders, 70)) == 70
    assert update(tracker, (items, 20)) == 70
    assert update(tracker, (orders, 90)) == 70
    assert update(tracker, (items, 80)) == 80


def test_each_source_is_idle_by_its_own_clock(tracker: WatermarkTracker, now: Clocks) -> None:
    orders = tracker.register("shop", "orders")
    tracker.register("warehouse", "stock")
    now["shop"] = 10 * IDLE
    assert update(tracker, (orders, 70)) == NO_TIME
    now["warehouse"] = IDLE
    assert tracker.look() == 70


def test_a_change_without_a_time_shows_activity_and_moves_no_watermark(
    tracker: WatermarkTracker, now: Clocks
) -> None:
    orders = tracker.register("shop", "orders")
    update(tracker, (orders, 70))
    now["shop"] = IDLE - 1
    assert update(tracker, (orders, NO_TIME), (-1, NO_TIME), (-1, 900)) == 70
    assert update(tracker, (-1, NO_TIME)) == 70, "a change of no partition shows nothing"
    now["shop"] = IDLE + 1
    tracker.look()
    assert tracker.metrics.idle == 0
    assert tracker.partitions()[0].last_event == 70


def test_with_all_idle_the_largest_counts_and_goes_on_with_the_clock_to_the_last_event(
    now: Clocks,
) -> None:
    tracker = WatermarkTracker(
        clock=lambda source: now[source], idle_timeout_us=IDLE, safety_margin_us=3
    )
    orders = tracker.register("shop", "orders", tolerance_us=20)
    items = tracker.register("shop", "items")
    assert update(tracker, (orders, 500), (items, 40)) == 37
    now["shop"] = IDLE
    assert tracker.look() == 477
    now["shop"] = IDLE + 10
    assert tracker.look() == 487
    now["shop"] = IDLE + 1_000
    assert tracker.look() == 500
    assert update(tracker, (items, 60)) == 500


def test_a_complete_source_holds_back_no_other_and_its_next_event_makes_it_active(
    tracker: WatermarkTracker,
) -> None:
    orders = tracker.register("shop", "orders")
    stock = tracker.register("warehouse", "stock", tolerance_us=10)
    assert update(tracker, (orders, 70)) == NO_TIME
    tracker.complete("warehouse")
    assert tracker.look() == 70
    assert update(tracker, (stock, 90), (orders, 300)) == 80
    tracker.complete("shop")
    tracker.complete("warehouse")
    assert tracker.look() == 300


def test_of_a_complete_source_the_last_event_counts_without_tolerance_or_margin(
    now: Clocks,
) -> None:
    tracker = WatermarkTracker(
        clock=lambda source: now[source], idle_timeout_us=IDLE, safety_margin_us=3
    )
    orders = tracker.register("shop", "orders", tolerance_us=20)
    assert update(tracker, (orders, 500)) == 477
    tracker.complete("shop")
    assert tracker.look() == 500


def test_an_event_of_a_removed_partition_does_not_wake_a_complete_source(
    tracker: WatermarkTracker,
) -> None:
    orders, items = tracker.register("shop", "orders"), tracker.register("shop", "items")
    stock = tracker.register("warehouse", "stock")
    update(tracker, (orders, 10), (items, 10))
    tracker.remove("shop", "items")
    tracker.complete("shop")
    assert update(tracker, (items, 20), (stock, 30)) == 30


def test_a_source_can_be_complete_before_it_has_a_partition(tracker: WatermarkTracker) -> None:
    tracker.complete("shop")
    tracker.register("shop", "orders")
    stock = tracker.register("warehouse", "stock")
    assert update(tracker, (stock, 5)) == 5


def test_a_partition_that_is_added_holds_and_one_that_is_removed_lets_go(
    tracker: WatermarkTracker,
) -> None:
    orders = tracker.register("shop", "orders")
    assert update(tracker, (orders, 70)) == 70
    items = tracker.register("shop", "items")
    assert update(tracker, (orders, 90)) == 70, "it never goes back"
    tracker.remove("shop", "items")
    assert tracker.watermark == 90
    assert tracker.code("shop", "items") is None
    tracker.remove("shop", "items")
    assert update(tracker, (items, 5_000)) == 90, "what still comes of it counts nothing"
    assert tracker.metrics == TrackerMetrics(1, 1, 0, advances=2, added=2, removed=1)
    assert tracker.register("shop", "items") == items, "rows that wait carry its code"
    assert tracker.code("shop", "items") == items
    assert tracker.partitions()[1].last_event == NO_TIME
    assert update(tracker, (orders, 100)) == 90


def test_a_partition_begins_with_the_last_event_that_is_known_of_it(
    tracker: WatermarkTracker,
) -> None:
    code = tracker.register("shop", "orders", tolerance_us=5, last_event=70)
    assert tracker.look() == 65
    assert tracker.register("shop", "orders", tolerance_us=50) == code
    assert tracker.look() == 65
    assert update(tracker, (code, 80)) == 65, "the tolerance that was given last counts"
    assert update(tracker, (code, 200)) == 150
    tracker.register("shop", "orders", tolerance_us=10)
    assert tracker.look() == 190


def test_with_no_partition_there_is_no_watermark(tracker: WatermarkTracker) -> None:
    assert tracker.look() == NO_TIME
    tracker.update(np.empty(0, np.int32), np.empty(0, np.int64))
    assert tracker.metrics == TrackerMetrics(0, 0, 0, 0, 0, 0)
    assert tracker.partitions() == []
    assert tracker.holders() == set()


def test_many_partitions_keep_their_codes(tracker: WatermarkTracker) -> None:
    codes = [tracker.register(f"source {at % 40}", f"table {at}") for at in range(200)]
    assert codes == [*range(200)]
    assert update(tracker, *((code, 1_000 + code) for code in codes)) == 1_000
    assert tracker.holders() == {"source 0"}


def test_a_pushed_watermark_counts_at_once_and_never_goes_back(tracker: WatermarkTracker) -> None:
    orders = tracker.register("shop", "orders", tolerance_us=20)
    assert update(tracker, (orders, 70)) == 50
    tracker.push(60)
    assert tracker.look() == 60
    tracker.push(55)
    assert tracker.look() == 60
    assert update(tracker, (orders, 90)) == 70


def test_a_watermark_pushed_for_a_source_leaves_the_others_to_hold(now: Clocks) -> None:
    tracker = WatermarkTracker(
        clock=lambda source: now[source], idle_timeout_us=IDLE, safety_margin_us=3
    )
    tracker.push(500, "shop")
    orders = tracker.register("shop", "orders")
    stock = tracker.register("warehouse", "stock")
    assert update(tracker, (orders, 70)) == NO_TIME
    assert update(tracker, (stock, 90)) == 87
    assert update(tracker, (stock, 900)) == 497
    assert [state.watermark for state in tracker.partitions()] == [500, 900]


def test_a_partition_that_is_marked_idle_holds_back_no_other_whatever_comes_of_it(
    tracker: WatermarkTracker,
) -> None:
    orders, items = tracker.register("shop", "orders"), tracker.register("shop", "items")
    tracker.mark_idle("shop", "items")
    assert update(tracker, (orders, 70)) == 70
    assert update(tracker, (items, 75), (orders, 80)) == 80
    assert [state.idle for state in tracker.partitions()] == [False, True]
    assert tracker.holders() == {"shop"}


def test_a_partition_that_is_marked_active_counts_from_its_last_event(
    tracker: WatermarkTracker, now: Clocks
) -> None:
    orders, items = tracker.register("shop", "orders"), tracker.register("shop", "items")
    tracker.mark_idle("shop", "items")
    assert update(tracker, (orders, 70), (items, 75)) == 70
    tracker.mark_active("shop", "items")
    assert update(tracker, (orders, 90)) == 75
    now["shop"] = IDLE
    assert update(tracker, (orders, 90)) == 90, "it is idle by the clock"
    tracker.mark_active("shop", "items")
    assert update(tracker, (orders, 95)) == 90
    now["shop"] = 2 * IDLE
    assert update(tracker, (orders, 95)) == 95, "the timeout began anew"
    tracker.mark_idle("shop", "unknown")
    tracker.mark_active("shop", "unknown")


SOURCES, TABLES = ("a", "b", "c"), ("x", "y")
MARGIN = 7


@dataclass
class Partition:
    tolerance: int
    active_at: int
    times: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=lambda: [NO_TIME])
    marked_idle: bool = False


class TrackedPartitions(RuleBasedStateMachine):
    """The tracker against partitions in a dict, gone through one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.now = dict.fromkeys(SOURCES, 0)
        self.tracker = WatermarkTracker(
            clock=self.now.__getitem__, idle_timeout_us=IDLE, safety_margin_us=MARGIN
        )
        self.codes: dict[int, tuple[str, str]] = {}
        self.model: dict[tuple[str, str], Partition] = {}
        self.complete: set[str] = set()
        self.pushed: dict[str | None, int] = {}
        self.watermark = NO_TIME

    @rule(source=st.none() | st.sampled_from(SOURCES), to=st.integers(0, 600))
    def push(self, source: str | None, to: int) -> None:
        self.tracker.push(to, source)
        self.pushed[source] = max(to, self.pushed.get(source, NO_TIME))

    @rule(source=st.sampled_from(SOURCES), table=st.sampled_from(TABLES), idle=st.booleans())
    def mark(self, source: str, table: str, idle: bool) -> None:
        mark = self.tracker.mark_idle if idle else self.tracker.mark_active
        mark(source, table)
        if (source, table) in self.model:
            partition = self.model[source, table]
            partition.marked_idle = idle
            if not idle:
                partition.active_at = self.now[source]

    @rule(
        source=st.sampled_from(SOURCES),
        table=st.sampled_from(TABLES),
        tolerance=st.sampled_from([0, 10, 50]),
        last=st.none() | st.integers(0, 500),
    )
    def add(self, source: str, table: str, tolerance: int, last: int | None) -> None:
        code = self.tracker.register(
            source, table, tolerance_us=tolerance, last_event=NO_TIME if last is None else last
        )
        assert self.codes.setdefault(code, (source, table)) == (source, table)
        known = self.model.get((source, table))
        if known is not None:
            known.tolerance = tolerance
            if known.times:
                known.marks.append(max(known.times) - tolerance)
            return
        partition = self.model[source, table] = Partition(tolerance, self.now[source])
        if last is not None:
            partition.times.append(last)
            partition.marks.append(last - tolerance)

    @rule(source=st.sampled_from(SOURCES), table=st.sampled_from(TABLES))
    def remove(self, source: str, table: str) -> None:
        self.tracker.remove(source, table)
        if self.model.pop((source, table), None):
            assert self.tracker.watermark == self.look_model()

    @rule(
        data=st.data(),
        times=st.lists(st.just(NO_TIME) | st.integers(0, 500), min_size=1, max_size=8),
    )
    def read(self, data: st.DataObject, times: list[int]) -> None:
        chosen = [data.draw(st.sampled_from([-1, *self.codes])) for _ in times]
        self.tracker.update(np.array(chosen, np.int32), np.array(times, np.int64))
        for code in {*chosen} - {-1}:
            partition = self.model.get(self.codes[code])
            if partition is None:
                continue
            source = self.codes[code][0]
            self.complete.discard(source)
            partition.active_at = self.now[source]
            of_it = [t for c, t in zip(chosen, times, strict=True) if c == code and t != NO_TIME]
            partition.times += of_it
            if of_it:
                partition.marks.append(max(partition.times) - partition.tolerance)

    @rule(source=st.sampled_from(SOURCES), passed=st.sampled_from([1, 30, IDLE, 3 * IDLE]))
    def wait(self, source: str, passed: int) -> None:
        self.now[source] += passed

    @rule(source=st.sampled_from(SOURCES))
    def end(self, source: str) -> None:
        self.tracker.complete(source)
        self.complete.add(source)

    @rule()
    def look(self) -> None:
        assert self.tracker.look() == self.look_model()
        for state in self.tracker.partitions():
            partition = self.model[state.source, state.table]
            assert state.watermark == self.mark_of(state.source, partition)
            assert state.last_event == max(partition.times, default=NO_TIME)
            silent = self.now[state.source] - partition.active_at >= IDLE
            assert state.idle == (silent or partition.marked_idle)
            assert state.idle_since == (partition.active_at + IDLE if silent else None)
        metrics = self.tracker.metrics
        assert metrics.partitions == len(self.model) == metrics.added - metrics.removed

    def mark_of(self, source: str, partition: Partition) -> int:
        # Of what was pushed before the partition was there it has all, as the source has.
        return max(*partition.marks, self.pushed.get(source, NO_TIME))

    def look_model(self) -> int:
        active: list[int] = []
        others: list[int] = []
        for (source, _), partition in self.model.items():
            quiet = self.now[source] - partition.active_at
            mark, last = self.mark_of(source, partition), max(partition.times, default=NO_TIME)
            if source in self.pushed:
                others.append(self.pushed[source] - MARGIN)
            if source in self.complete:
                others.append(last)
            elif quiet < IDLE and not partition.marked_idle:
                active.append(mark)
            elif last != NO_TIME:
                others.append(min(last, mark - MARGIN + max(0, quiet - IDLE)))
        found = NO_TIME
        if active and min(active) != NO_TIME:
            found = min(active) - MARGIN
        elif not active:
            found = max(others, default=NO_TIME)
        self.watermark = max(self.watermark, found, self.pushed.get(None, NO_TIME))
        return self.watermark

    @invariant()
    def the_watermark_never_goes_back(self) -> None:
        assert self.tracker.watermark == self.watermark


TestTrackedPartitions = TrackedPartitions.TestCase
TestTrackedPartitions.settings = settings(
    max_examples=examples(50), stateful_step_count=40, deadline=None
)


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 100)), min_size=1), st.data())
def test_how_a_history_is_cut_into_batches_does_not_matter(
    events: list[tuple[int, int]], data: st.DataObject
) -> None:
    def tracked(*batches: list[tuple[int, int]]) -> list[PartitionState]:
        tracker = WatermarkTracker(clock=lambda _: 0, idle_timeout_us=IDLE)
        for table in range(5):
            tracker.register("shop", str(table), tolerance_us=table)
        for batch in batches:
            if batch:
                update(tracker, *batch)
        return tracker.partitions()

    cut = data.draw(st.integers(0, len(events)))
    assert tracked(events) == tracked(events[:cut], events[cut:])
