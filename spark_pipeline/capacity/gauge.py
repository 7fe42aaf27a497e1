"""How much a source's feed has before it, since when, and how busy it is."""

from __future__ import annotations

from collections import deque

from cdc.log.view import LogReader
from spark_pipeline.capacity.backlog import Bounds
from spark_pipeline.capacity.pressure import Load

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
