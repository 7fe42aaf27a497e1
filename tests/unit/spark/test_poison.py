"""A share on which delivery breaks is cut until the message is found; everything else arrives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config import FileDestination, SinkConfig
from cdc.cursor import Cursor
from cdc.errors import DecodeError, TransientError
from spark_pipeline.delivery.deliver import Origin, Share
from spark_pipeline.delivery.isolate import as_walbrook_error, deliver_carefully, is_suspect
from spark_pipeline.delivery.outcome import Outcome, Poison

_SINK = SinkConfig(name="hook", database="shop", destination=FileDestination(path=Path("out")))


class Fragile:
    """Delivers numbered messages; breaks on some of them, always or once."""

    def __init__(self, messages: int, poison: set[int], *, works: bool = True) -> None:
        self.cursors = [Cursor(8, at) for at in range(messages)]
        self._poison = poison
        self._works = works
        self.arrived: list[int] = []

    def share(self) -> Share:
        end = Cursor(8, len(self.cursors))
        return Share(_SINK, Origin("shop", "", ""), "run", Cursor(8, 0), end, [])

    def deliver(self, share: Share) -> Outcome:
        if not self._works:
            raise ValueError("nothing works")
        mine = list(range(share.start.idx, share.end.idx))
        for at in mine:
            if at in self._poison:
                raise ValueError(f"message {at}")
            self.arrived.append(at)
        return Outcome("hook", share.end, delivered=len(mine))

    def run(self) -> Outcome:
        return deliver_carefully(self.deliver, self.share(), self.within)

    def within(self, share: Share) -> list[Cursor]:
        return [cursor for cursor in self.cursors if share.start <= cursor < share.end]


@given(st.integers(1, 80), st.data())
def test_the_poison_is_found_and_everything_else_arrives_in_order(
    messages: int, data: st.DataObject
) -> None:
    poison = data.draw(st.sets(st.integers(0, messages - 1), max_size=10))
    sink = Fragile(messages, poison)
    share, dead = sink.share(), list[Poison]()
    while share.start < share.end:
        outcome = deliver_carefully(sink.deliver, share, sink.within)
        dead += outcome.dead
        assert max(sink.arrived, default=-1) < outcome.cursor.idx, "sent past what is not settled"
        assert (outcome.is_whole, outcome.more) == (not outcome.dead, bool(outcome.dead))
        share = replace(share, start=outcome.cursor)
    assert [one.cursor.idx for one in dead] == sorted(poison)
    assert all(f"message {one.cursor.idx}" in one.error for one in dead)
    first = list(dict.fromkeys(sink.arrived))
    assert first == [at for at in range(messages) if at not in poison], "first arrivals, in order"


def test_a_message_is_not_dead_if_its_second_try_fails_for_another_reason() -> None:
    sink = Fragile(3, {1})
    tries: list[Share] = []

    def gives_up(share: Share) -> Outcome:
        tries.append(share)
        if share.start == Cursor(8, 1) and share.end == Cursor(8, 2):
            alone = [one for one in tries if (one.start, one.end) == (share.start, share.end)]
            if len(alone) > 1:
                raise TransientError("the pipeline was given up")
        return sink.deliver(share)

    outcome = deliver_carefully(gives_up, sink.share(), sink.within)
    assert outcome.dead == ()
    assert outcome.cursor == Cursor(8, 1)
    assert str(outcome.error) == "the pipeline was given up"


def test_nothing_is_dead_while_an_empty_share_fails_too() -> None:
    outcome = Fragile(10, set(), works=False).run()
    assert outcome.dead == ()
    assert outcome.cursor == Cursor(8, 0)
    assert outcome.error is not None
    assert "nothing works" in outcome.error.detail


def test_a_failure_that_was_foreseen_blames_no_message() -> None:
    sink = Fragile(10, set())

    def down(_share: Share) -> Outcome:
        raise TransientError("the destination is down")

    outcome = deliver_carefully(down, sink.share(), sink.within)
    assert (outcome.dead, str(outcome.error)) == ((), "the destination is down")


class SparkError(Exception):
    __module__ = "pyspark.errors"


@pytest.mark.parametrize(
    ("error", "suspect", "says"),
    [
        (ValueError("odd"), True, "ValueError: odd"),
        (DecodeError("bad bytes"), True, "bad bytes"),
        (TransientError("later"), False, "later"),
        (ConnectionResetError("gone"), False, "ConnectionResetError: gone"),
        (MemoryError("no more"), False, "MemoryError: no more"),
        (
            SparkError("Traceback (most recent call last):\n  File \"x.py\", line 1, in f\n"
                       "    g()\nBlockingIOError: [Errno 11] not now\n\n\tat x"),
            False,
            "BlockingIOError",
        ),
        (SparkError("Job 3 cancelled"), False, "SparkError: Job 3 cancelled"),
        (SparkError("Python worker exited unexpectedly (crashed)"), True, "worker"),
        (
            SparkError(
                "Job aborted.\nTraceback (most recent call last):\n  File \"x.py\", line 1, in f\n"
                "    g()\nRuntimeError: what it was\n\n\tat org.apache.spark.Task\n"
            ),
            True,
            "RuntimeError: what it was",
        ),
        (
            SparkError("Traceback\n  File\ncdc.errors.TransientError: the log moved\n\n\tat x"),
            False,
            "the log moved",
        ),
    ],
)  # fmt: skip
def test_errors_that_may_be_a_messages_fault_are_suspect(
    error: Exception, suspect: bool, says: str
) -> None:
    assert is_suspect(error) is suspect
    assert says in as_walbrook_error(error).full_text


_STACK = "An error occurred while calling o52.load.\n: {}\n\tat org.apache.spark.X.y(X.scala:1)\n"


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (
            "java.lang.ClassNotFoundException: walbrook.DefaultSource",
            "SparkError: java.lang.ClassNotFoundException: walbrook.DefaultSource",
        ),
        (
            "org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed: a value",
            "SparkError: org.apache.spark.SparkClassNotFoundException [DATA_SOURCE_NOT_FOUND]",
        ),
        (
            "org.apache.spark.SparkArithmeticException: a value",
            "SparkError: org.apache.spark.SparkArithmeticException",
        ),
        ("a value", "SparkError"),
    ],
)
def test_an_error_of_java_is_named_without_what_may_quote_a_row(raised: str, shown: str) -> None:
    error = as_walbrook_error(SparkError(_STACK.format(raised)))
    assert str(error) == shown
    assert raised.partition(": ")[2] in error.full_text
