"""What a measure is kept in: a count, a level or a distribution, safe to use from any thread."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Count:
    """Only grows."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0.0

    def add(self, more: float = 1.0) -> None:
        with self._lock:
            self.value += more


class Level:
    """As it was set last."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def set(self, value: float | None) -> None:
        """None: it is not known any more."""
        self.value = value


class Distribution:
    """How many values lie between fixed bounds, and their sum."""

    __slots__ = ("_bounds", "_bounds_us", "_lock", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._bounds_us = [round(bound * 1e6) for bound in bounds]
        self._lock = threading.Lock()
        self.counts = [0.0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: float = 1.0) -> None:
        """One value, or ``weight`` of the same."""
        at = bisect_left(self._bounds, value)
        with self._lock:
            self.counts[at] += weight
            self.total += value * weight

    def observe_ages(self, times_us: npt.NDArray[np.int64], now_us: int) -> None:
        """How old each of these times is, in seconds; they are in order, give or take a little.

        There is at least one. A column costs as many binary searches as there are bounds between
        its ends, however many rows it has.
        """
        rows = len(times_us)
        # Most often all are of one bucket; the oldest comes first.
        oldest, newest = now_us - int(times_us[0]), now_us - int(times_us[-1])
        first = bisect_left(self._bounds_us, min(oldest, newest))
        last = bisect_left(self._bounds_us, max(oldest, newest))
        edges = [now_us - bound for bound in self._bounds_us[first:last]]
        # How many are as old as each bound between the two, or older.
        within = [rows - at for at in np.searchsorted(times_us, edges).tolist()] if edges else []
        total = (rows * now_us - int(times_us.sum())) / 1e6
        before = 0
        with self._lock:
            for at, count in enumerate([*within, rows], first):
                self.counts[at] += count - before
                before = count
            self.total += max(0.0, total)
