"""Slots are shared by weight, nobody starves, and none is idle while somebody waits."""

from __future__ import annotations

import heapq
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from spark_pipeline.capacity.slot_queue import (
    AGED_S,
    HELD_MAX_S,
    SlotQueue,
    Ticket,
    Who,
    longest_wait_s,
)

weights = st.integers(1, 10)


def who(number: int) -> Who:
    return ("shop", str(number))


def granted(queue: SlotQueue, now: float) -> list[Ticket]:
    """All that get a slot now; afterwards none is free while somebody waits."""
    found = []
    while (ticket := queue.next(now)) is not None:
        found.append(ticket)
    assert not queue.waiting or len(queue.holding) == queue.slots
    return found


@given(
    of=st.lists(weights, min_size=2, max_size=6),
    holds=st.lists(st.floats(0.001, 0.1), min_size=1, max_size=20),
)
def test_as_long_as_all_want_more_each_gets_slot_time_by_its_weight(
    of: list[int], holds: list[float]
) -> None:
    queue, now = SlotQueue(1), 0.0
    used: dict[int, float] = defaultdict(float)
    for number, weight in enumerate(of):
        queue.enter(who(number), weight, now)
    for turn in range(500):
        (ticket,) = granted(queue, now)
        held_s = holds[turn % len(holds)]
        now += held_s
        number = int(ticket.consumer[1])
        used[number] += held_s
        queue.leave(ticket, now)
        queue.enter(ticket.consumer, ticket.weight, now)
    longest = max(holds)
    for one, its_weight in enumerate(of):
        for other, weight in enumerate(of):
            apart = abs(used[one] / its_weight - used[other] / weight)
            assert apart <= longest / its_weight + longest / weight + 1e-9


@given(
    slots=st.integers(1, 4),
    coming=st.lists(
        # When one first comes, its weight, how long it holds each time, how long it stays away.
        st.tuples(
            st.integers(0, 60),
            weights,
            st.one_of(st.integers(1, 20), st.integers(20, 1000)),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_no_delivery_waits_longer_than_the_bound_whatever_the_others_do(
    slots: int, coming: list[tuple[int, int, int, int]]
) -> None:
    queue = SlotQueue(slots)
    ahead: dict[Ticket, int] = {}
    comes = [(at, number) for number, (at, *_) in enumerate(coming)]
    ends: list[tuple[int, int, Ticket]] = []
    heapq.heapify(comes)
    for now in range(600):
        while ends and ends[0][0] <= now:
            _, number, ticket = heapq.heappop(ends)
            queue.leave(ticket, now)
            heapq.heappush(comes, (now + coming[number][3], number))
        while comes and comes[0][0] <= now:
            _, number = heapq.heappop(comes)
            before = len(queue.waiting)
            ahead[queue.enter(who(number), coming[number][1], now)] = before
        for ticket in granted(queue, now):
            number = int(ticket.consumer[1])
            heapq.heappush(ends, (now + coming[number][2], number, ticket))
        for ticket in (*queue.waiting, *queue.holding):
            until = now if ticket.held_since is None else ticket.held_since
            assert until - ticket.entered_at <= longest_wait_s(ahead[ticket], slots)


def test_a_worker_that_comes_late_shares_from_then_on_and_has_no_credit() -> None:
    queue, now = SlotQueue(1), 0.0
    for _ in range(100):
        ticket = queue.enter(who(1), 5, now)
        assert granted(queue, now) == [ticket]
        now += 1.0
        queue.leave(ticket, now)
    order = []
    queue.enter(who(1), 5, now)
    queue.enter(who(2), 5, now)
    for _ in range(6):
        (ticket,) = granted(queue, now)
        order.append(ticket.consumer[1])
        now += 1.0
        queue.leave(ticket, now)
        queue.enter(ticket.consumer, 5, now)
    assert sorted(order) == ["1", "1", "1", "2", "2", "2"]


def test_a_delivery_that_hangs_loses_its_slot_to_the_next_and_may_still_leave() -> None:
    queue = SlotQueue(1)
    hangs = queue.enter(who(1), 10, 0.0)
    waits = queue.enter(who(2), 1, 0.0)
    assert granted(queue, 0.0) == [hangs]
    assert granted(queue, HELD_MAX_S - 1) == []
    assert granted(queue, HELD_MAX_S) == [waits]
    queue.leave(hangs, HELD_MAX_S + 1)
    assert queue.holding == [waits]


def test_a_delivery_that_has_waited_long_goes_before_others_that_have_used_less() -> None:
    queue = SlotQueue(1)
    first = queue.enter(who(0), 1, 0.0)
    granted(queue, 0.0)
    for rival in (1, 2):
        queue.enter(who(rival), 10, 0.0)
    queue.leave(first, 20.0)  # it has used much: by weight the others would have a hundred turns
    aged, now = queue.enter(who(0), 1, 20.0), 20.0
    while aged.held_since is None:
        (ticket,) = granted(queue, now)
        now += 4.0
        queue.leave(ticket, now)
        queue.enter(ticket.consumer, 10, now)
    assert AGED_S <= aged.held_since - 20.0 <= AGED_S + 8.0


def test_a_worker_that_is_away_for_a_moment_keeps_its_share() -> None:
    queue, now = SlotQueue(1), 0.0
    turns = {"strong": 0, "weak": 0, "weaker": 0}
    comes = dict.fromkeys(turns, 0.0)
    weight = {"strong": 10, "weak": 2, "weaker": 1}
    ends: tuple[float, Ticket] | None = None
    for step in range(6000):
        now = step / 100
        if ends is not None and now >= ends[0]:
            queue.leave(ends[1], now)
            comes[ends[1].consumer[1]], ends = now + 0.05, None  # half of what a delivery takes
        for name in [name for name, at in comes.items() if now >= at]:
            queue.enter(("shop", name), weight[name], now)
            del comes[name]
        for ticket in granted(queue, now):
            turns[ticket.consumer[1]] += 1
            ends = now + 0.1, ticket
    # It cannot have two turns in a row, but every second one, as if it had never been away.
    assert turns["strong"] >= 0.48 * sum(turns.values())
    assert 1.5 <= turns["weak"] / turns["weaker"] <= 2.5


def test_a_delivery_that_waits_no_more_is_not_waited_for() -> None:
    queue = SlotQueue(1)
    holds, gone, next_one = (queue.enter(who(number), 5, 0.0) for number in range(3))
    granted(queue, 0.0)
    queue.leave(gone, 1.0)
    queue.leave(holds, 1.0)
    assert granted(queue, 1.0) == [next_one]
