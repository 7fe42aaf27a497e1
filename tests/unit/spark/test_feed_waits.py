"""Workers that wait in the feed: what wakes them, and what lets the body drop a range."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from cdc.cursor import Cursor
from spark_pipeline.feed.feed import BehindError, Feed
from tests.waiting import until


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
