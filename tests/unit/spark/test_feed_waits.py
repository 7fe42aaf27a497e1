"""Workers that wait in the feed: what wakes them, and what lets the body drop a range."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any, cast

import pytest

from cdc.cursor import Cursor
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.feed import BehindError, Feed
from spark_pipeline.slices.exchange import SliceMarker
from tests.waiting import until


class _Rows:
    """Decoded rows of 100 bytes in the driver."""

    in_driver, decoded_bytes, closed = True, 100, False

    def close(self) -> None:
        self.closed = True


def _decoded(batch: int) -> DecodedRange:
    marker = SliceMarker(batch, batch + 1, batch, 0, 1, 1, Cursor(batch + 1, 0), 1, "", 0, 0)
    return DecodedRange(0, batch, batch + 1, [marker], cast("Any", _Rows()))


def test_short_waits_of_a_starved_worker_add_up_until_a_full_feed_drops_its_oldest_range() -> None:
    feed, over = Feed(100, patience_s=0.3), threading.Event()
    for worker in ("slow", "fast"):
        feed.join(worker, 0, 0)
    first = _decoded(0)
    feed.put(first, over)
    with feed.next("fast", 0.0) as decoded:
        assert decoded is first
    body = threading.Thread(target=feed.put, args=(_decoded(1), over))
    body.start()

    def fast_has_more() -> bool:
        with feed.next("fast", 0.01) as found:
            return found is not None

    until("the next range, though another worker has not passed the first", fast_has_more, 10)
    body.join()
    with pytest.raises(BehindError), feed.next("slow", 0.0):
        pass
    assert first.plan.closed  # type: ignore[attr-defined]


def test_a_range_says_when_it_was_decoded_and_since_when_it_waits() -> None:
    class Plan(_Rows):
        def decode(self) -> list[SliceMarker]:
            return list(_decoded(0).slices)

    before_us, before = time.time_ns() // 1000, time.monotonic()
    decoded = DecodedRange.decode(0, 0, 1, cast("Any", Plan()))
    assert before <= decoded.decoded_at <= time.monotonic()
    timing = decoded.timing
    assert before_us <= timing.decoded_from_us <= timing.decoded_us <= time.time_ns() // 1000


def test_idle_workers_do_not_wake_each_other() -> None:
    feed, takes, over = Feed(1 << 20), Counter[str](), threading.Event()

    def wait(worker: str) -> None:
        feed.join(worker, 0, 0)
        while not over.is_set():
            takes[worker] += 1
            with feed.next(worker, 0.5) as decoded:
                assert decoded is None

    threads = [threading.Thread(target=wait, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    until("three waits of each worker", lambda: min(takes[name] for name in "abc") >= 3)
    over.set()
    for thread in threads:
        thread.join()
    assert max(takes.values()) <= 6, takes


def test_wake_ends_a_wait_in_the_feed() -> None:
    feed, ended = Feed(1 << 20), threading.Event()
    feed.join("a", 0, 0)

    def wait() -> None:
        with feed.next("a", 60.0) as decoded:
            assert decoded is None
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()

    def woken() -> bool:
        feed.wake()
        return ended.wait(0.01)

    until("the wait to end", woken)
    thread.join()


def test_a_worker_that_waits_hears_that_the_feed_passed_its_batch() -> None:
    feed, behind = Feed(1 << 20), threading.Event()
    feed.join("a", 0, 0)

    def wait() -> None:
        with pytest.raises(BehindError), feed.next("a", 60.0):
            pass
        behind.set()

    thread = threading.Thread(target=wait)
    thread.start()
    until("the worker to wait", lambda: feed.demand() == 0)
    feed.skip(5, Cursor(1, 0))
    assert behind.wait(10), "the worker still waits for a batch that the feed is past"
    thread.join()


def test_a_worker_gets_nothing_of_another_history_of_the_log() -> None:
    feed = Feed(1 << 20)
    feed.begin(1, 10, Cursor(1, 0))
    assert feed.join("a", 1, 12)
    feed.begin(2, 5, Cursor(1, 0))
    with pytest.raises(BehindError), feed.next("a", 0.0):
        pass
    assert not feed.join("a", 1, 12), "its batch has another number now"
    assert feed.join("a", 2, 5)
