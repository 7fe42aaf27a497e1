"""Heartbeats as numbers and times: what is late, what was missed, what is not ours."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from cdc.errors import TransientError
from cdc.replication.source.heartbeat import Heartbeat, HeartbeatLedger

NOON = datetime(2024, 5, 1, 12, 0, 0, tzinfo=UTC)


def ledger(slot: str = "s") -> HeartbeatLedger:
    return HeartbeatLedger(slot, interval_s=10)


def send(ours: HeartbeatLedger, lsn: int, at: float) -> bytes:
    number, content = ours.next_content(NOON)
    ours.sent(Heartbeat(number, lsn, at, NOON), at)
    return content.encode()


def test_a_heartbeat_that_comes_back_says_how_long_it_was_on_its_way() -> None:
    ours = ledger()
    content = send(ours, 100, at=1.0)
    ours.returned(content, 1.25)
    assert ours.lag_s == 0.25
    assert ours.returned_at is not None
    ours.check(10_000, 100.0)
    assert ours.late(1000.0) is None


def test_a_heartbeat_may_be_back_before_the_server_returns_its_lsn() -> None:
    ours = ledger()
    number, content = ours.next_content(NOON)
    ours.returned(content.encode(), 1.0)
    ours.sent(Heartbeat(number, 100, 0.5, NOON), 1.5)
    assert ours.lag_s == 1.0
    ours.check(200, 1.0)
    ours.check(200, 100.0)
    assert ours.late(1000.0) is None


def test_a_server_that_sent_past_one_is_not_the_one_it_was_written_to() -> None:
    ours = ledger()
    send(ours, 100, at=1.0)
    ours.check(100, 10.0)
    ours.check(101, 10.0)  # the reader may still hold it unread
    ours.check(101, 14.0)
    with pytest.raises(TransientError, match="without the heartbeat") as caught:
        ours.check(101, 15.0)
    assert caught.value.kind == "heartbeat_missed"
    ours.check(101, 30.0)  # a new stream gets a new chance


def test_a_server_that_has_not_got_that_far_is_busy_and_only_that() -> None:
    ours = ledger()
    send(ours, 100, at=1.0)
    send(ours, 200, at=11.0)
    ours.check(99, 1000.0)
    assert ours.late(30.9) is None
    early, later = ours.late(31.0), ours.late(60.0)
    assert early is not None
    assert early == later, "the same text, or every report would be a write"
    assert early.severity == "warning"
    assert "2024-05-01 12:00:00 UTC" in early.what
    assert "busy decoding" in early.what


def test_heartbeats_of_others_and_of_earlier_runs_do_not_count() -> None:
    ours, before, other = ledger(), ledger(), ledger("t")
    mine = send(ours, 100, at=1.0)
    broken = [b"", b"{", b"[]", b"7", b'{"slot":"s"}', json.dumps({"slot": "s"}).encode()]
    for content in [send(before, 100, at=1.0), send(other, 100, at=1.0), *broken]:
        ours.returned(content, 2.0)
    assert ours.returned_at is None
    ours.returned(mine, 2.0)
    assert ours.returned_at is not None


def test_a_new_stream_awaits_only_what_lies_before_it() -> None:
    ours = ledger()
    send(ours, 100, at=1.0)
    send(ours, 200, at=2.0)
    ours.attached(150)
    ours.check(199, 10.0)
    ours.check(199, 100.0)
    assert ours.late(31.9) is None
    assert ours.late(32.0) is not None


def test_no_more_are_sent_while_many_are_on_their_way() -> None:
    ours = ledger()
    last = b""
    while ours.room:
        last = send(ours, 100, at=1.0)
    assert json.loads(last)["number"] == 64
    ours.returned(last, 2.0)
    assert ours.room
