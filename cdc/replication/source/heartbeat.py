"""Heartbeats: what was sent into the WAL, what came back through the slot, and what that tells.

No sockets here. A heartbeat is a logical message outside any transaction, so the server sends it
where it stands in the WAL, before anything later. It is addressed: slot, run and number must be
ours, because every slot of the database sees every reader's heartbeats. Invariant:

- A server that has sent past a heartbeat which never came is not the one it was written to.
- A server that has not yet got that far is busy, not idle; that is reported, and no reason to stop.
- At most ``_AWAITED_MAX`` are on their way; while that many are, no more are sent.
"""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import dataclass
from datetime import UTC, datetime

from cdc.cursor import format_lsn
from cdc.errors import TransientError
from cdc.state.health import Condition
from cdc.state.reader_state import HeartbeatState

_AWAITED_MAX = 64
_PASSED_S = 5.0  # the reader may hold received messages that it has not looked at yet
_LATE_S = 30.0


@dataclass(frozen=True)
class Heartbeat:
    """One on its way: the LSN is the end of its record, so a server beyond it has sent it."""

    number: int
    lsn: int
    sent: float  # monotonic
    sent_at: datetime


class HeartbeatLedger:
    """Who is on the way, and what came back last; safe to use from two threads."""

    def __init__(self, slot: str, *, interval_s: float) -> None:
        """``interval_s`` 0: none are sent."""
        self._slot = slot
        self._is_off = not interval_s
        self._run = secrets.token_hex(8)
        self._late_s = max(_LATE_S, 3 * interval_s)
        self._lock = threading.Lock()
        self._awaited: dict[int, Heartbeat] = {}
        self._returned_early: set[int] = set()
        self._number = 0
        self._passed_since: float | None = None
        self._was_passed = False
        self._sent_at: float | None = None  # monotonic, of the last one
        self.returned_at: datetime | None = None
        self.lag_s: float | None = None

    @property
    def room(self) -> bool:
        """Whether one more may be sent."""
        return len(self._awaited) < _AWAITED_MAX

    def next_content(self, now_at: datetime) -> tuple[int, str]:
        """The number and the text of the next heartbeat."""
        self._number += 1
        address = {"slot": self._slot, "run": self._run, "number": self._number}
        return self._number, json.dumps({**address, "sent_at": now_at.isoformat()})

    def sent(self, heartbeat: Heartbeat, now: float) -> None:
        """It is in the WAL; it may even be back before the server returns its LSN."""
        with self._lock:
            self._sent_at = heartbeat.sent
            if heartbeat.number in self._returned_early:
                self._returned_early.clear()
                self._note_return(heartbeat, now)
            else:
                self._awaited[heartbeat.number] = heartbeat

    def returned(self, content: bytes, now: float) -> None:
        """One came through the slot; those of others, and of earlier runs, do not count."""
        number = self._number_in(content)
        if number is None:
            return
        with self._lock:
            heartbeat = self._awaited.get(number)
            if heartbeat is None:
                if number == self._number:
                    self._returned_early = {number}
                return
            # WAL order: whatever was sent before this one has been passed as well.
            self._awaited = {n: h for n, h in self._awaited.items() if n > number}
            self._note_return(heartbeat, now)

    def attached(self, start_lsn: int) -> None:
        """A new stream starts there; what lies below does not come again."""
        with self._lock:
            self._awaited = {n: h for n, h in self._awaited.items() if h.lsn > start_lsn}
            self._passed_since = None

    def check(self, server_lsn: int, now: float) -> None:
        """Refuse a stream that went past a heartbeat without giving it."""
        with self._lock:
            oldest = self._oldest()
            if oldest is None or server_lsn <= oldest.lsn:
                self._passed_since = None
                return
            if self._passed_since is None:
                self._passed_since = now
            if now - self._passed_since < _PASSED_S:
                return
            self._awaited.clear()
            self._passed_since, self._was_passed = None, True
        raise TransientError(
            f"the stream has passed {format_lsn(oldest.lsn)} without the heartbeat written there: "
            "it comes from another server than the one that heartbeats go to",
            fix="it connects again; if this stays, let the source's address lead to one server, "
            "and primary_url to the primary of that same cluster and database",
            kind="heartbeat_missed",
        )

    def behind_since(self, now: float) -> datetime | None:
        """When the oldest was sent that should have come back, if there is one."""
        with self._lock:
            oldest = self._oldest()
        return None if oldest is None or now - oldest.sent < _PASSED_S else oldest.sent_at

    def state(self, now: float) -> HeartbeatState:
        """How heartbeats are doing."""
        if self._is_off:
            return HeartbeatState.OFF
        with self._lock:
            oldest = self._oldest()
            if self._was_passed:
                return HeartbeatState.LSN_ADVANCED
            if oldest is not None and now - oldest.sent >= self._late_s:
                return HeartbeatState.STALE
            if self._sent_at is not None and now - self._sent_at >= self._late_s:
                return HeartbeatState.NONE_RECENT
            if self.returned_at is None:
                return HeartbeatState.NOTHING_RECEIVED
            return HeartbeatState.OK

    def late(self, now: float) -> Condition | None:
        """What to say when the oldest has been on its way for long."""
        with self._lock:
            oldest = self._oldest()
        if oldest is None or now - oldest.sent < self._late_s:
            return None
        return Condition(
            "heartbeat_late",
            "warning",
            f"the heartbeat of {oldest.sent_at:%Y-%m-%d %H:%M:%S} UTC has not come back: the "
            f"server has not sent as far as {format_lsn(oldest.lsn)}, so it is busy decoding (a "
            "large transaction or a backlog), not idle",
            "nothing if it passes; else look into pg_stat_activity and pg_stat_replication_slots",
        )

    def _oldest(self) -> Heartbeat | None:
        return self._awaited[min(self._awaited)] if self._awaited else None

    def _note_return(self, heartbeat: Heartbeat, now: float) -> None:
        self._passed_since, self._was_passed = None, False
        self.returned_at = datetime.now(UTC)
        self.lag_s = now - heartbeat.sent

    def _number_in(self, content: bytes) -> int | None:
        try:
            said = json.loads(content)
            ours = said["slot"] == self._slot and said["run"] == self._run
            return int(said["number"]) if ours else None
        except (ValueError, TypeError, KeyError):
            return None
