"""The ring of decoded ranges: no gap, bounded, and a range is closed once, when nobody uses it."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import ORIGIN
from cdc.errors import CorruptionError, WalbrookError
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.feed import BehindError, Feed
from tests.examples import examples
from tests.feed_ranges import (
    HISTORY,
    CountedPlan,
    decoded_range,
    high_before,
    plan_of,
    plans_in,
)
from tests.waiting import until

NEVER = threading.Event()


def feed_at(position: int = 0, bytes_max: int = 10, patience_s: float = 60.0) -> Feed:
    feed = Feed(bytes_max, patience_s=patience_s)
    feed.begin(HISTORY, position, ORIGIN)
    return feed


def put(feed: Feed, end: int, size: int = 1, *, in_driver: bool = True) -> DecodedRange:
    """A range from where the feed ends."""
    decoded = decoded_range(feed.position, end, CountedPlan(size, in_driver))
    feed.put(decoded, NEVER)
    return decoded


def passed(feed: Feed, worker: str) -> tuple[int, int] | None:
    """Let a worker take its next range, and pass it."""
    with feed.next(worker, 0.0) as decoded:
        return None if decoded is None else (decoded.start, decoded.end)


def test_small_ranges_come_as_one_and_each_is_closed_when_all_have_passed_it() -> None:
    feed = feed_at()
    assert feed.join("a", HISTORY, 0)
    assert feed.join("b", HISTORY, 0)
    first, second = put(feed, 2), put(feed, 3)
    with feed.next("a", 0.0) as decoded:
        assert decoded is not None
        assert (decoded.start, decoded.end, decoded.high) == (0, 3, high_before(3))
        assert [piece.batch_idx for piece in decoded.slices] == [0, 1, 2]
    assert passed(feed, "a") is None
    assert (plan_of(first).closed, plan_of(second).closed) == (0, 0)
    assert feed.files == {"file 0", "file 1", "file 2"}
    feed.leave("b")
    assert (plan_of(first).closed, plan_of(second).closed) == (1, 1)
    assert feed.files == set()
    assert feed.depth.ranges == 0
    assert feed.high == high_before(3)


def test_a_range_with_changes_waits_for_a_worker_until_it_has_passed_it() -> None:
    feed = feed_at()
    assert not feed.has_rows("a"), "it is not in the feed"
    feed.join("a", HISTORY, 0)
    idle = [replace(each, rows=0) for each in decoded_range(0, 1).slices]
    feed.put(DecodedRange(HISTORY, 0, 1, idle, CountedPlan()), NEVER)
    assert not feed.has_rows("a"), "nothing but a position has come"
    put(feed, 2)
    assert feed.has_rows("a")
    passed(feed, "a")
    assert not feed.has_rows("a")


def test_a_range_that_is_delivered_from_stays_open_whatever_becomes_of_the_ring() -> None:
    feed = feed_at()
    feed.join("a", HISTORY, 0)
    first = put(feed, 1)
    with feed.next("a", 0.0) as decoded:
        assert decoded is first
        feed.leave("a")
        feed.close()
        assert plan_of(first).closed == 0
        assert feed.files == {"file 0"}
    assert plan_of(first).closed == 1
    assert feed.files == set()


def test_a_range_that_failed_is_taken_again_from_where_the_worker_stands() -> None:
    feed = feed_at()
    feed.join("a", HISTORY, 0)
    put(feed, 1)
    with pytest.raises(ZeroDivisionError), feed.next("a", 0.0):
        raise ZeroDivisionError
    assert feed.is_busy
    assert passed(feed, "a") == (0, 1)
    assert not feed.is_busy


def test_a_worker_that_needs_an_older_batch_or_another_history_does_not_join() -> None:
    feed = feed_at(5)
    assert not feed.join("old", HISTORY, 4)
    assert not feed.join("elsewhere", HISTORY + 1, 5)
    assert feed.join("a", HISTORY, 5)
    put(feed, 7)
    assert feed.join("late", HISTORY, 6), "it begins within a range"
    assert passed(feed, "late") == (5, 7)
    assert feed.join("ahead", HISTORY, 9), "the feed gets there"
    assert feed.demand() == 7
    feed.close()
    assert not feed.join("too late", HISTORY, 7)


@pytest.mark.parametrize("in_driver", [True, False])
def test_a_full_ring_holds_the_body_until_the_slowest_passes_a_range(in_driver: bool) -> None:
    feed = feed_at(bytes_max=4)
    feed.join("slow", HISTORY, 0)
    for end in (1, 2):
        put(feed, end, 2, in_driver=in_driver)
    body = threading.Thread(target=put, args=(feed, 3), kwargs={"size": 2, "in_driver": in_driver})
    body.start()
    body.join(0.3)
    assert body.is_alive()
    assert feed.position == 2
    passed(feed, "slow")
    body.join(10)
    assert feed.position == 3
    # What the driver decoded comes together.
    assert (feed.depth.ranges, feed.depth.bytes) == ((1, 2) if in_driver else (2, 0))


def test_ranges_of_executors_and_large_ones_come_alone() -> None:
    feed = feed_at(bytes_max=64 << 20)
    feed.join("a", HISTORY, 0)
    for end, size, in_driver in (
        (1, 1, False), (2, 1, True), (3, 1, True), (4, 1, False), (5, 3 << 20, True),
        (6, 3 << 20, True), (7, 1, True), (1_100, 1, True), (1_101, 1, True),
    ):  # fmt: skip
        put(feed, end, size, in_driver=in_driver)
    assert [passed(feed, "a") for _ in range(7)] == [
        (0, 1), (1, 3), (3, 4), (4, 5), (5, 7), (7, 1_100), (1_100, 1_101),
    ]  # fmt: skip


def test_after_a_failure_ranges_that_came_as_one_come_again_with_what_arrived_meanwhile() -> None:
    feed = feed_at()
    feed.join("a", HISTORY, 0)
    put(feed, 1)
    put(feed, 2)
    with pytest.raises(ZeroDivisionError), feed.next("a", 0.0):
        raise ZeroDivisionError
    put(feed, 3)
    assert passed(feed, "a") == (0, 3)
    assert feed.depth.ranges == 0


def test_a_range_above_the_bound_goes_into_an_empty_ring() -> None:
    feed = feed_at(bytes_max=4)
    feed.join("a", HISTORY, 0)
    put(feed, 1, 100)
    assert passed(feed, "a") == (0, 1)


def test_the_body_that_waits_for_room_is_given_up_and_its_range_closed() -> None:
    feed, given_up = feed_at(bytes_max=1), threading.Event()
    feed.join("slow", HISTORY, 0)
    put(feed, 1)
    dropped = decoded_range(1, 2)
    body = threading.Thread(target=feed.put, args=(dropped, given_up))
    body.start()
    given_up.set()
    body.join(10)
    assert (feed.position, plan_of(dropped).closed) == (1, 1)


def test_a_slow_worker_holds_the_others_no_longer_than_the_patience_and_reads_the_log_then() -> (
    None
):
    feed = feed_at(bytes_max=1, patience_s=0.3)
    feed.join("slow", HISTORY, 0)
    feed.join("quick", HISTORY, 0)
    first = put(feed, 1)
    with feed.next("slow", 0.0) as decoded:
        assert decoded is first
        assert passed(feed, "quick") == (0, 1)
        body = threading.Thread(target=put, args=(feed, 2))
        body.start()
        # It asks again and again, each time for less than the patience.
        until("the next range", lambda: passed_within(feed, "quick", 0.05) == (1, 2), 20)
        body.join(10)
        assert plan_of(first).closed == 0, "it is still delivered from"
    assert plan_of(first).closed == 1
    # Its own next batch is in the ring no more once the quick one is ahead by more than that.
    put(feed, 3)
    assert passed(feed, "quick") == (2, 3)
    with pytest.raises(BehindError):
        passed(feed, "slow")
    assert feed.readers == ["quick"]


def passed_within(feed: Feed, worker: str, wait_s: float) -> tuple[int, int] | None:
    with feed.next(worker, wait_s) as decoded:
        return None if decoded is None else (decoded.start, decoded.end)


def test_while_all_are_busy_no_child_is_dropped_however_long_it_takes() -> None:
    feed = feed_at(bytes_max=1, patience_s=0.05)
    feed.join("a", HISTORY, 0)
    feed.join("b", HISTORY, 0)
    put(feed, 1)
    with ExitStack() as both:
        for worker in ("a", "b"):
            both.enter_context(feed.next(worker, 0.0))
        body = threading.Thread(target=put, args=(feed, 2))
        body.start()
        body.join(0.5)
        assert body.is_alive()
    body.join(10)
    assert [passed(feed, worker) for worker in ("a", "b")] == [(1, 2), (1, 2)]


def test_an_undecodable_range_is_an_error_for_its_workers_until_the_feed_begins_again() -> None:
    feed = feed_at()
    feed.join("a", HISTORY, 0)
    feed.join("ahead", HISTORY, 5)
    put(feed, 1)
    feed.fail(CorruptionError("batch 1 is damaged"))
    assert passed(feed, "a") == (0, 1), "what lies before it is in the ring"
    with pytest.raises(WalbrookError, match="damaged"):
        passed(feed, "a")
    assert not feed.join("a", HISTORY, 1)
    assert feed.join("ahead", HISTORY, 5), "it does not need that batch"
    feed.begin(HISTORY, 1, ORIGIN)
    assert feed.join("a", HISTORY, 1)


def test_a_range_that_no_worker_needs_is_skipped_without_a_gap() -> None:
    feed = feed_at()
    assert feed.demand() is None
    left = put(feed, 2)
    feed.skip(6, high_before(6))
    assert plan_of(left).closed == 1
    assert (feed.position, feed.high) == (6, high_before(6))
    assert not feed.join("a", HISTORY, 5)
    assert feed.join("a", HISTORY, 6)
    put(feed, 7)
    assert passed(feed, "a") == (6, 7)


def test_another_history_empties_the_ring_and_a_delivery_of_the_old_one_moves_no_consumer() -> None:
    feed = feed_at()
    feed.join("a", HISTORY, 0)
    old = put(feed, 3)
    with feed.next("a", 0.0) as decoded:
        assert decoded is old
        feed.leave("a")
        feed.begin(HISTORY + 1, 0, ORIGIN)
        assert feed.join("a", HISTORY + 1, 0)
    assert plan_of(old).closed == 1
    feed.put(decoded_range(0, 1, history=HISTORY + 1), NEVER)
    assert passed(feed, "a") == (0, 1), "it was moved past batches that it never had"


def test_idle_means_that_a_worker_has_passed_all_or_that_there_is_none() -> None:
    feed = feed_at()
    feed.wait_for_idle(0.0)
    feed.join("a", HISTORY, 0)
    put(feed, 1)
    waiting = threading.Thread(target=feed.wait_for_idle, args=(30.0,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    passed(feed, "a")
    waiting.join(10)
    assert not waiting.is_alive()


@dataclass
class Model:
    """What the feed should do, for one thread."""

    feed: Feed
    ranges: list[DecodedRange] = field(default_factory=list)
    got: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    needs: dict[str, int] = field(default_factory=dict)

    def step(self, rng: random.Random) -> None:
        worker = rng.choice("abc")
        act = rng.choices(
            ["put", "take", "join", "leave", "breaks", "skip", "again"], [6, 9, 3, 1, 1, 1, 1]
        )[0]
        if act == "put":
            self.put(rng)
        elif act == "join":
            at = self.needs.get(worker, rng.randrange(self.feed.position + 3))
            if self.feed.join(worker, HISTORY, at):
                self.needs[worker] = at
        elif act == "leave":
            self.feed.leave(worker)
        elif act == "skip" and self.feed.demand() is None:
            self.feed.skip(self.feed.position + 1, high_before(self.feed.position + 1))
        elif act == "again":
            self.feed.begin(HISTORY, self.feed.position, self.feed.high)
        elif worker in self.feed.readers:
            self.take(worker, breaks=act == "breaks")

    def put(self, rng: random.Random) -> None:
        given_up = threading.Event()
        given_up.set()  # one thread: nobody would make room
        plan = CountedPlan(rng.randrange(1, 6), rng.random() < 0.8)
        decoded = decoded_range(self.feed.position, self.feed.position + rng.randrange(1, 4), plan)
        had = self.feed.depth
        if had.ranges == 0 or (plan.in_driver and had.bytes + plan.decoded_bytes <= 10):
            given_up.clear()
        self.feed.put(decoded, given_up)
        self.ranges.append(decoded)

    def take(self, worker: str, *, breaks: bool) -> None:
        needs = self.needs[worker]
        try:
            with self.feed.next(worker, 0.0) as decoded:
                if decoded is None:
                    assert needs >= self.feed.position
                    return
                assert not any(plan.closed for plan in plans_in(decoded))
                assert decoded.start <= needs < decoded.end
                if breaks:
                    raise ZeroDivisionError
                self.needs[worker] = decoded.end
                self.got.setdefault(worker, []).append((needs, decoded.end))
        except (ZeroDivisionError, BehindError):
            return
        lowest = min(self.needs[name] for name in self.feed.readers)
        for each in self.ranges:
            if each.end <= lowest:
                assert plan_of(each).closed == 1, "everybody has passed it"

    def check(self) -> None:
        assert all(plan_of(each).closed <= 1 for each in self.ranges)
        if self.feed.depth.ranges > 1:
            assert self.feed.depth.bytes <= 10
        for parts in self.got.values():
            ends = [end for _, end in parts]
            assert [start for start, _ in parts[1:]] == ends[:-1], "a gap or a repeat"


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_under_any_schedule_each_worker_gets_each_batch_once_and_ranges_are_closed_once(
    seed: int,
) -> None:
    rng = random.Random(seed)
    model = Model(feed_at(patience_s=0.0))
    for _ in range(80):
        model.step(rng)
        model.check()
    model.feed.close()
    assert all(plan_of(each).closed == 1 for each in model.ranges)


def test_with_threads_every_worker_has_every_batch_once_and_all_is_closed() -> None:
    feed, batches = feed_at(bytes_max=3, patience_s=30.0), 300
    got: dict[str, list[int]] = {name: [] for name in "abcd"}
    for name in got:
        assert feed.join(name, HISTORY, 0)
    ranges: list[DecodedRange] = []

    def work(name: str) -> None:
        while len(got[name]) < batches:
            with feed.next(name, 0.2) as decoded:
                if decoded is not None:
                    assert not any(plan.closed for plan in plans_in(decoded))
                    got[name] += range(decoded.start, decoded.end)

    workers = [threading.Thread(target=work, args=(name,)) for name in got]
    for worker in workers:
        worker.start()
    while feed.position < batches:
        ranges.append(put(feed, min(batches, feed.position + 1 + len(ranges) % 3)))
    for worker in workers:
        worker.join(60)
    assert got == {name: list(range(batches)) for name in got}
    assert [plan_of(each).closed for each in ranges] == [1] * len(ranges)
