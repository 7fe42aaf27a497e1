"""The states of heartbeats, by a clock of the test."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from cdc.errors import TransientError
from cdc.replication.source.heartbeat import Heartbeat, HeartbeatLedger
from cdc.state.reader_state import HeartbeatState

AT = datetime(2026, 11, 16, tzinfo=UTC)


def sent(ledger: HeartbeatLedger, lsn: int, now: float) -> bytes:
    number, content = ledger.next_content(AT)
    ledger.sent(Heartbeat(number, lsn, now, AT), now)
    return content.encode()


def test_heartbeats_that_come_back_are_ok_and_before_the_first_nothing_is_received() -> None:
    ledger = HeartbeatLedger("slot", interval_s=10)
    assert ledger.state(0) is HeartbeatState.NOTHING_RECEIVED
    content = sent(ledger, 100, now=1)
    assert ledger.state(2) is HeartbeatState.NOTHING_RECEIVED
    ledger.returned(content, now=2)
    assert ledger.state(3) is HeartbeatState.OK


def test_a_heartbeat_that_does_not_come_back_is_stale() -> None:
    ledger = HeartbeatLedger("slot", interval_s=10)
    ledger.returned(sent(ledger, 100, now=0), now=1)
    content = sent(ledger, 200, now=10)
    assert ledger.state(39) is HeartbeatState.OK
    assert ledger.state(41) is HeartbeatState.STALE
    ledger.returned(content, now=42)
    sent(ledger, 300, now=42)
    assert ledger.state(43) is HeartbeatState.OK


def test_heartbeats_that_cannot_be_written_are_none_recent() -> None:
    ledger = HeartbeatLedger("slot", interval_s=10)
    ledger.returned(sent(ledger, 100, now=0), now=1)
    assert ledger.state(29) is HeartbeatState.OK
    assert ledger.state(31) is HeartbeatState.NONE_RECENT


def test_a_stream_that_passes_a_heartbeat_is_lsn_advanced_until_one_comes_back() -> None:
    ledger = HeartbeatLedger("slot", interval_s=10)
    sent(ledger, 100, now=0)
    ledger.check(101, now=1)
    with pytest.raises(TransientError):
        ledger.check(101, now=7)
    assert ledger.state(8) is HeartbeatState.LSN_ADVANCED
    ledger.returned(sent(ledger, 300, now=9), now=10)
    assert ledger.state(11) is HeartbeatState.OK


def test_a_source_without_heartbeats_has_them_off() -> None:
    assert HeartbeatLedger("slot", interval_s=0).state(0) is HeartbeatState.OFF
