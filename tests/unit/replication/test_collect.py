"""When a batch is due: a lone transaction at once, a stream of them at the pace of the linger."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.replication.batch_collector import BatchCollector
from cdc.replication.protocol import Keepalive
from cdc.replication.spill.spilled_transaction import BatchLimits
from tests import pgoutput

ENVELOPE = b"w" + bytes(24)
LIMITS = BatchLimits(rows=100, bytes=10_000)
WHOLE = [pgoutput.begin(8, 0, 1), pgoutput.insert(1, ["7"]), pgoutput.commit(8, 16, 0)]


class Stream:
    """Gives the messages that it was given, once."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def drain(
        self, into: list[bytes], *, bytes_max: int, rows_max: int
    ) -> tuple[int, Keepalive | None]:
        into += (ENVELOPE + message for message in self.messages)
        taken, self.messages = sum(map(len, self.messages)), []
        return taken, None


def filled(collector: BatchCollector, now: float, messages: list[bytes]) -> None:
    stream: Any = Stream()
    stream.messages = messages
    collector.fill(stream, now)


def test_a_lone_transaction_is_due_at_once() -> None:
    collector = BatchCollector(LIMITS, 0.005)
    assert not collector.due(10.0)
    filled(collector, 10.0, WHOLE)
    assert collector.due(10.0)
    assert len(collector.hand_over(10.0)) == 3
    assert collector.empty


def test_transactions_that_follow_each_other_are_gathered_for_the_linger() -> None:
    collector = BatchCollector(LIMITS, 0.005)
    filled(collector, 10.0, WHOLE)
    collector.hand_over(10.0)
    filled(collector, 10.001, WHOLE)
    assert not collector.due(10.001)
    assert collector.patience_s(10.001, 11.0) == pytest.approx(0.004)
    filled(collector, 10.004, WHOLE)
    assert not collector.due(10.004)
    assert collector.due(10.0051)
    assert len(collector.hand_over(10.0051)) == 6
    filled(collector, 10.02, WHOLE)
    assert collector.due(10.02), "it had waited long enough before it came"


def test_a_transaction_that_is_not_whole_yet_waits_for_the_linger_at_most() -> None:
    collector = BatchCollector(LIMITS, 0.005)
    filled(collector, 10.0, WHOLE[:2])
    assert not collector.due(10.0)
    assert collector.patience_s(10.0, 11.0) == pytest.approx(0.005)
    assert collector.due(10.0051)
    filled(collector, 10.002, WHOLE[2:])
    assert collector.due(10.002), "its commit has come"


def test_a_full_batch_does_not_linger() -> None:
    collector = BatchCollector(LIMITS, 60.0)
    collector.hand_over(10.0)
    filled(collector, 10.0, [pgoutput.insert(1, ["7"])] * 100)
    assert collector.due(10.0)
    collector.hand_over(10.0)
    filled(collector, 10.0, [pgoutput.insert(1, ["7" * 10_000])])
    assert collector.due(10.0)


def test_a_few_whole_transactions_are_gathered_without_reading_the_socket() -> None:
    collector = BatchCollector(BatchLimits(rows=10_000, bytes=1_000_000), 0.005)
    assert not collector.gathers
    filled(collector, 10.0, WHOLE)
    assert collector.gathers
    filled(collector, 10.0, WHOLE[:2])
    assert not collector.gathers, "its commit is awaited"
    filled(collector, 10.0, WHOLE[2:] * 300)
    assert not collector.gathers, "so many must not wait in the buffers of the socket"
