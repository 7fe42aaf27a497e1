"""A stop of the whole process reaches its parts, and only parts that are there."""

from __future__ import annotations

import gc
import os

from cdc.stop import StopReason, StopSignal


def test_a_part_stops_with_the_whole_and_for_the_same_reason() -> None:
    whole = StopSignal()
    with whole.follower() as part:
        whole.request(StopReason.OPERATOR)
        assert part.by_operator
    with whole.follower() as later:
        assert later.by_operator


def test_a_part_that_ends_while_it_is_reported_a_stop_is_harmless() -> None:
    whole = StopSignal()
    with whole.follower() as part:
        pass
    reading, writing = os.pipe()  # may have the numbers that the part had
    os.set_blocking(reading, False)
    part.request()  # what a stop of the whole does to each part that it has found
    assert part.wait(0)
    os.close(writing)
    assert os.read(reading, 1) == b"", "nothing was written to somebody else's pipe"
    os.close(reading)


def test_the_descriptors_of_parts_that_ended_are_free_again() -> None:
    whole = StopSignal()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with whole.follower():
            pass
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
