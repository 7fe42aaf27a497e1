"""Pressure: how much more there is to deliver than can be delivered, and the decisions about it.

First micro-batches are widened, step by step: fewer and larger ones cost less. If that is not
enough, the consumer of the lowest priority is deferred, one after another. When it is over the same
is undone in the other order. Invariant: without pressure no consumer is deferred; none is deferred
for longer than ``DEFERRED_MAX_S`` at a time; the consumer with the highest priority of those served
is not deferred, so one always is served, and among consumers of one priority none is; nothing is
ever dropped; the level changes at most every ``STEP_MIN_S``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from cdc.log.view import LogReader
from spark_pipeline.capacity.backlog import Bounds

LATENCY_HIGH_S, LATENCY_LOW_S = 10.0, 3.0
"""How long changes have waited in the log: twice what a micro-batch takes is too long."""

BACKLOG_HIGH, BACKLOG_LOW = 2.0, 0.5
"""What waits in the log, in largest micro-batches: one under way and one more are normal."""

BUSY_HIGH, BUSY_LOW = 0.8, 0.5
"""A feed that has time to spare is not under pressure, whatever waits for other reasons."""

WIDEN_AFTER_S = 2.0
"""Of strain: widening is harmless, so it comes soon."""

WIDENED_MAX = 4.0
"""Micro-batches are not widened beyond this: with the default target, to twenty seconds."""

DEFER_AFTER_S = 5.0
"""Of strain at the widest, and between two: long enough to see what the last step gave."""

CALM_S = 5.0
"""Without strain, before each step back."""

STEP_MIN_S = min(WIDEN_AFTER_S, DEFER_AFTER_S, CALM_S)

DEFERRED_MAX_S = 60.0
"""Then it has its turn all the same."""

TURN_MIN_S = 30.0
"""A consumer that was deferred is not deferred again before this has passed."""


@dataclass(frozen=True)
class Load:
    """What the feed of a source has before it, and how busy it is."""

    backlog: Bounds
    latency_s: float
    busy_ratio: float

    def is_high(self, micro_batch: Bounds) -> bool:
        waits = self.latency_s >= LATENCY_HIGH_S or self._batches(micro_batch) >= BACKLOG_HIGH
        return waits and self.busy_ratio >= BUSY_HIGH

    def is_low(self, micro_batch: Bounds) -> bool:
        waits = self.latency_s >= LATENCY_LOW_S or self._batches(micro_batch) >= BACKLOG_LOW
        return not waits or self.busy_ratio < BUSY_LOW

    def _batches(self, most: Bounds) -> float:
        return max(self.backlog.rows / most.rows, self.backlog.bytes / most.bytes)


@dataclass(frozen=True)
class Served:
    """A consumer in the feed, and how long its last delivery took."""

    priority: int
    took_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What is to be done: by how much to widen, whom to defer, and whom no longer."""

    level: int
    widened_by: float = 1.0
    defer: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()


class Pressure:
    """That of one source. Times are those of a monotonic clock, in seconds."""

    def __init__(self, micro_batch: Bounds) -> None:
        self._micro_batch = micro_batch
        self._widened_by = 1.0
        self._deferred: dict[str, float] = {}  # since when; the latest last
        self._resumed: dict[str, float] = {}
        self._strained = False
        self._so_since = float("-inf")  # strained, or not
        self._stepped_at = float("-inf")

    @property
    def level(self) -> int:
        """0: none; 1: micro-batches are widened; 2: a consumer is deferred."""
        return 2 if self._deferred else int(self._widened_by > 1)

    def tick(self, load: Load, served: Mapping[str, Served], now: float) -> Decision:
        """Asked about once a second; ``served`` are the consumers in the feed."""
        high, low = load.is_high(self._micro_batch), load.is_low(self._micro_batch)
        if high != self._strained and (high or low):  # between the two all stays as it is
            self._strained, self._so_since = high, now
        aged = [name for name, at in self._deferred.items() if now - at >= DEFERRED_MAX_S]
        resume = [self._resume(name, now) for name in aged]
        waited_s = now - max(self._so_since, self._stepped_at)
        defer: list[str] = []
        if high and self._widened_by < WIDENED_MAX and waited_s >= WIDEN_AFTER_S:
            self._widened_by *= 2
            self._stepped_at = now
        elif high and waited_s >= DEFER_AFTER_S:
            defer = self._defer(served, now)
        elif low and waited_s >= CALM_S and self._deferred:
            resume.append(self._resume(next(reversed(self._deferred)), now))
        elif low and waited_s >= CALM_S and self._widened_by > 1:
            self._widened_by /= 2
            self._stepped_at = now
        return Decision(self.level, self._widened_by, tuple(defer), tuple(resume))

    def _defer(self, served: Mapping[str, Served], now: float) -> list[str]:
        """The lowest, of those the one that costs most; none if all left have one priority."""
        here = {name: who for name, who in served.items() if name not in self._deferred}
        highest = max((who.priority for who in here.values()), default=0)
        may = [
            name
            for name, who in here.items()
            if who.priority < highest and now - self._resumed.get(name, float("-inf")) >= TURN_MIN_S
        ]
        if not may:
            return []
        lowest = min(may, key=lambda name: (here[name].priority, -here[name].took_s, name))
        self._deferred[lowest] = self._stepped_at = now
        return [lowest]

    def _resume(self, name: str, now: float) -> str:
        del self._deferred[name]
        self._resumed[name] = self._stepped_at = now
        return name


_BATCHES_LOOKED_AT_MAX = 100_000  # of the log's index; beyond them a backlog is large anyway
_ENDS_MAX = 4_096
_FORGETS = 0.5  # how much of what was before counts a second later


class Gauge:
    """Asked often whether the feed is at work, and about once a second for all the rest."""

    def __init__(self) -> None:
        self._asked = self._at_work = 0
        self._busy_ratio = 0.0
        self._ends: deque[tuple[int, float]] = deque()  # of the log, and when each was first seen

    def sample(self, *, at_work: bool) -> None:
        self._asked += 1
        self._at_work += at_work

    def read(self, log: LogReader, position: int, now: float) -> Load:
        """``position`` is the first batch of the log that is not settled."""
        end = log.next_batch()
        return Load(_between(log, position, end), self._waited_s(position, end, now), self._busy())

    def _busy(self) -> float:
        latest = self._at_work / max(1, self._asked)
        self._asked = self._at_work = 0
        self._busy_ratio = self._busy_ratio * _FORGETS + latest * (1 - _FORGETS)
        return round(self._busy_ratio, 2)

    def _waited_s(self, position: int, end: int, now: float) -> float:
        """How long ago the oldest that is not settled was first seen.

        Its commit time would not do: after a quiet night the first change would seem a night old.
        """
        while self._ends and self._ends[0][0] <= position:
            self._ends.popleft()
        if end > position and (not self._ends or self._ends[-1][0] < end):
            if len(self._ends) < _ENDS_MAX:
                self._ends.append((end, now))
            else:
                self._ends[-1] = (end, self._ends[-1][1])  # older than it is, never younger
        return round(now - self._ends[0][1], 1) if self._ends else 0.0


def _between(log: LogReader, position: int, end: int) -> Bounds:
    """Rows and bytes of the batches ``[position, end)``, of so many of them at most."""
    first = max(position, log.first_batch())
    last = min(end, first + _BATCHES_LOOKED_AT_MAX)
    if last <= first:
        return Bounds(0, 0)
    entries = log.entries(first, last)
    return Bounds(int(entries["rows"].sum()), int(entries["bytes"].sum()))
