"""Exponential backoff with jitter and a bound."""

from __future__ import annotations

import random


class Backoff:
    """The pauses between tries: each failure doubles the pause, a success starts over."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self.failures = 0

    def next_s(self) -> float:
        """Count a failure; returns how long to wait before the next try."""
        self.failures += 1
        longest = min(self._max_s, self._first_s * 2.0 ** min(self.failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.failures = 0
