"""Slots among threads: never more at once than there are, and all come to their turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_pipeline.capacity import slot_queue
from spark_pipeline.capacity.slot_queue import BYTES_MAX, COUNTED_S, SlotQueue
from spark_pipeline.capacity.slots import Slots
from tests.waiting import until

NEVER = threading.Event()


def test_never_more_deliver_at_once_than_there_are_slots_and_all_come_to_their_turn() -> None:
    slots, lock = Slots(3), threading.Lock()
    now_inside, most_inside, done = 0, 0, 0

    def deliver(number: int) -> None:
        nonlocal now_inside, most_inside, done
        with slots.hold("shop", str(number % 20), 1 + number % 10, NEVER):
            with lock:
                now_inside += 1
                most_inside = max(most_inside, now_inside)
            threading.Event().wait(0.001)
            with lock:
                now_inside -= 1
                done += 1

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(deliver, range(400)))
    assert (most_inside, done) == (3, 400)
    assert slots.in_use("shop") == (0, 0)
    assert slots.took_s("shop", "7") > 0


def test_a_delivery_that_breaks_gives_its_slot_back() -> None:
    slots = Slots(1)
    with pytest.raises(ValueError, match="odd"), slots.hold("shop", "a", 5, NEVER):
        raise ValueError("odd")
    with slots.hold("shop", "b", 5, NEVER):
        assert slots.in_use("shop") == (1, 0)
        assert slots.in_use("other") == (0, 0)


def test_a_delivery_that_hangs_holds_its_slot_no_longer_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_queue, "HELD_MAX_S", 0.2)
    slots, end = Slots(1), threading.Event()
    served: list[str] = []

    def deliver(name: str, until_set: threading.Event | None) -> None:
        with slots.hold("shop", name, 5, NEVER):
            served.append(name)
            if until_set is not None:
                until_set.wait(30)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(deliver, "hangs", end)
        until("it to hang", lambda: served == ["hangs"])
        threads.submit(deliver, "next", None)
        until("the next to be served", lambda: served == ["hangs", "next"])
        end.set()


def test_large_deliveries_go_one_after_another_and_small_ones_beside_them() -> None:
    queue = SlotQueue(4)
    large = [queue.enter(("shop", f"large {n}"), 5, 0.0, size=BYTES_MAX) for n in range(3)]
    small = [queue.enter(("shop", f"small {n}"), 5, 0.0) for n in range(2)]
    granted = list(iter(lambda: queue.next(0.0), None))
    assert set(granted) == {large[0], *small}
    queue.leave(large[0], 1.0)
    assert list(iter(lambda: queue.next(1.0), None)) == [large[1]]


def test_a_large_delivery_has_its_turn_while_smaller_ones_keep_coming() -> None:
    queue = SlotQueue(2)
    half = BYTES_MAX // 2 + 1
    holding = [queue.enter(("shop", "first"), 5, 0.0, size=half)]
    assert queue.next(0.0) is holding[0]
    large = queue.enter(("shop", "large"), 1, 0.0, size=2 * BYTES_MAX)
    for now in range(1, 40):
        queue.enter(("shop", f"small {now}"), 10, float(now), size=1)
        while (granted := queue.next(float(now))) is not None:
            holding.append(granted)
        if large in holding:
            break
        queue.leave(holding.pop(0), float(now))
    assert large in holding


def test_a_large_delivery_that_hangs_holds_others_back_for_a_moment_only() -> None:
    queue = SlotQueue(4)
    hangs = queue.enter(("shop", "hangs"), 5, 0.0, size=BYTES_MAX)
    assert queue.next(0.0) is hangs
    others = [queue.enter(("shop", f"other {n}"), 5, 0.1, size=BYTES_MAX // 4) for n in range(3)]
    assert queue.next(0.1) is None
    assert set(iter(lambda: queue.next(COUNTED_S), None)) == set(others)
