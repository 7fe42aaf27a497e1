"""Where the time of a thread goes, by phase, and how busy it was lately.

Invariant: a clock belongs to one thread; ``read`` may be called from another.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from cdc.metrics.catalogue import BUSY_RATIO, PHASE_SECONDS

WAIT = "wait"

_clocks: weakref.WeakSet[PhaseClock] = weakref.WeakSet()
_listing = threading.Lock()
"""Held while clocks come, go or are listed: a set that changes cannot be gone through."""


class PhaseClock:
    """``rest`` is the phase of all time that no other phase took."""

    def __init__(self, stage: str, source: str, consumer: str = "", *, rest: str = WAIT) -> None:
        self._labels = (stage, source, consumer)
        self._rest = rest
        self._spent: dict[str, float] = {}
        self._open: tuple[str, float] | None = None
        self._read_at = time.monotonic()
        self._read_spent: dict[str, float] = {}
        with _listing:
            _clocks.add(self)

    def begin(self, phase: str) -> None:
        """A phase within another one is a part of it."""
        if self._open is None:
            self._open = phase, time.monotonic()

    def end(self, phase: str) -> None:
        if self._open is not None and self._open[0] == phase:
            self._spent[phase] = self._spent.get(phase, 0.0) + time.monotonic() - self._open[1]
            self._open = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.begin(phase)
        try:
            yield
        finally:
            self.end(phase)

    def read(self) -> None:
        """Add what was spent since the last time to the metrics."""
        now, under_way = time.monotonic(), self._open
        spent = dict(self._spent)
        if under_way is not None:
            spent[under_way[0]] = spent.get(under_way[0], 0.0) + now - under_way[1]
        elapsed = now - self._read_at
        more = {phase: s - self._read_spent.get(phase, 0.0) for phase, s in spent.items()}
        more[self._rest] = more.get(self._rest, 0.0) + elapsed - sum(more.values())
        for phase, seconds in more.items():
            PHASE_SECONDS.of(*self._labels, phase).add(max(0.0, seconds))
        if elapsed > 0:
            idle = more.get(WAIT, 0.0) / elapsed
            BUSY_RATIO.of(*self._labels).set(min(1.0, max(0.0, 1.0 - idle)))
        self._read_at, self._read_spent = now, spent

    def close(self) -> None:
        """The thread ends."""
        with _listing:
            _clocks.discard(self)
        BUSY_RATIO.of(*self._labels).set(None)


def read_clocks() -> None:
    """Bring the metrics of all clocks of this process up to date."""
    with _listing:
        clocks = list(_clocks)
    for clock in clocks:
        clock.read()
