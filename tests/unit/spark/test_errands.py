"""Nobody waits for the slowest for long, and what it was at comes to its end by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from cdc.config import FileDestination, Sink
from cdc.cursor import Cursor
from spark_pipeline.delivery import Origin, Share
from spark_pipeline.errands import Deliveries, Errand, Leg
from spark_pipeline.exchange import SliceMarker
from spark_pipeline.outcome import Outcome
from spark_pipeline.slots import Slots
from tests.waiting import until


class Waits:
    """A plan whose deliveries wait to be let through."""

    driver_bytes = 0

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def decode(self) -> list[SliceMarker]:
        return []

    def deliver(self, share: Share) -> Outcome:
        if share.consumer.name == "slow":
            assert self.go_on.wait(30)
        return Outcome(share.consumer.name, share.end, delivered=1)

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        return iter(())

    def close(self) -> None:
        pass


def _share(sink: Sink, start: int, end: int) -> Share:
    return Share(sink, Origin("", "", ""), "", Cursor(start, 0), Cursor(end, 0), [])


def _errand(name: str, plan: Waits, *bounds: int) -> Errand:
    sink = Sink(name=name, database="shop", destination=FileDestination(path=Path(name)))
    legs = [
        Leg(_share(sink, start, end), plan, prepare=lambda share: share)
        for start, end in pairwise(bounds)
    ]
    return Errand(name, tuple(legs))


def test_the_slow_one_goes_on_by_itself_while_the_others_are_done() -> None:
    plan, deliveries = Waits(), Deliveries(threading.Event(), Slots(16))
    late: list[tuple[str, Outcome]] = []
    errands = [_errand(name, plan, 1, 2) for name in ("a", "slow", "b")]
    outcomes = deliveries.run(
        errands, lambda errand, done: late.append((errand.consumer, done)), 0.05
    )
    assert set(outcomes) == {"a", "b"}
    assert deliveries.waiting_for == ["slow"]
    plan.go_on.set()
    until("the slow one to end", lambda: late)
    assert late == [("slow", Outcome("slow", Cursor(2, 0), delivered=1))]
    deliveries.close()


class Breaks(Waits):
    """Nothing of it works, not even looking for what is wrong."""

    def deliver(self, share: Share) -> Outcome:
        raise ValueError("odd")

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        raise RuntimeError("odder")


def test_one_that_breaks_in_an_unforeseen_way_has_an_outcome_all_the_same() -> None:
    deliveries = Deliveries(threading.Event(), Slots(16))
    errands = [_errand("odd", Breaks(), 1, 2), _errand("fine", Waits(), 1, 2)]
    outcomes = deliveries.run(errands, lambda *_late: None, 1.0)
    assert outcomes["odd"].cursor == Cursor(1, 0)
    assert "RuntimeError" in str(outcomes["odd"].error)
    assert outcomes["fine"].error is None
    deliveries.close()


def test_one_alone_is_waited_for_whatever_it_takes() -> None:
    plan, deliveries = Waits(), Deliveries(threading.Event(), Slots(16))
    threading.Timer(0.2, plan.go_on.set).start()
    outcomes = deliveries.run([_errand("slow", plan, 1, 2)], lambda *_late: None, 0.0)
    assert outcomes["slow"].cursor == Cursor(2, 0)
    deliveries.close()


def test_when_the_lane_is_given_up_nobody_is_waited_for() -> None:
    plan, given_up = Waits(), threading.Event()
    deliveries = Deliveries(given_up, Slots(16))
    late: list[Outcome] = []
    threading.Timer(0.1, given_up.set).start()
    outcomes = deliveries.run(
        [_errand("slow", plan, 1, 2)], lambda _, done: late.append(done), 30.0
    )
    assert outcomes == {}
    plan.go_on.set()
    until("it to end all the same", lambda: late)
    deliveries.close()


def test_the_legs_of_an_errand_count_as_one() -> None:
    plan = Waits()
    outcome = _errand("a", plan, 1, 2, 3).run()
    assert (outcome.cursor, outcome.delivered) == (Cursor(3, 0), 2)


class Works(Waits):
    """Each delivery takes a while; ``slow`` waits to be let through as ever."""

    def deliver(self, share: Share) -> Outcome:
        threading.Event().wait(0.1)
        return super().deliver(share)


def test_waiting_for_a_slot_is_not_being_slow() -> None:
    plan, deliveries = Works(), Deliveries(threading.Event(), Slots(1))
    errands = [_errand(name, plan, 1, 2) for name in "abcdef"]
    outcomes = deliveries.run(errands, lambda *_late: None, 0.05)
    assert set(outcomes) == set("abcdef"), "the last had waited for half a second"
    deliveries.close()


def test_one_that_is_late_gives_its_slot_back_and_the_others_go_on() -> None:
    plan, slots = Works(), Slots(2)
    deliveries = Deliveries(threading.Event(), slots)
    late: list[str] = []
    errands = [_errand(name, plan, 1, 2) for name in ("a", "slow", "b", "c")]
    outcomes = deliveries.run(errands, lambda errand, _: late.append(errand.consumer), 0.05)
    assert set(outcomes) == {"a", "b", "c"}
    assert slots.in_use("") == (0, 0)
    with slots.hold("", "d", 5, threading.Event()), slots.hold("", "e", 5, threading.Event()):
        assert slots.in_use("") == (2, 0)
    plan.go_on.set()
    until("the slow one to end", lambda: late == ["slow"])
    assert slots.in_use("") == (0, 0)
    deliveries.close()


def test_whoever_waits_for_a_slot_when_the_lane_is_given_up_ends_without_delivering() -> None:
    plan, given_up, slots = Waits(), threading.Event(), Slots(1)
    deliveries = Deliveries(given_up, slots)
    late: list[Outcome] = []
    with slots.hold("other", "sink", 5, threading.Event()):
        threading.Timer(0.1, given_up.set).start()
        errands = [_errand("a", plan, 1, 2)]
        in_time = deliveries.run(errands, lambda _, done: late.append(done), 9.0)
        (ended,) = until("it to end", lambda: [*in_time.values(), *late])
    assert (ended.cursor, ended.delivered) == (Cursor(1, 0), 0)
    assert "given up before its turn" in str(ended.error)
    assert slots.in_use("") == (0, 0)
    deliveries.close()
