"""Exponential backoff with jitter and a bound."""

from __future__ import annotations

import random


def pause_s(failures: int, first_s: float, max_s: float) -> float:
    """The pause after so many failures in a row, at least half of what doubling gives."""
    longest: float = min(max_s, first_s * 2.0 ** min(failures - 1, 40))
    return longest * random.uniform(0.5, 1.0)


class Backoff:
    """The pauses between tries: each failure doubles the pause, a success starts over."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self.failures = 0

    def next_s(self) -> float:
        """Count a failure; returns how long to wait before the next try."""
        self.failures += 1
        return pause_s(self.failures, self._first_s, self._max_s)

    def reset(self) -> None:
        self.failures = 0
