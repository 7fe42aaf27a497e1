"""Up to which commit a consumer has everything, though some of what it read is held back. Pure."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta

from cdc.cursor import Cursor

_RANGES_MAX = 1_000
_EPOCH = datetime.fromtimestamp(0, UTC)


class CommitTimes:
    """The commit times of the ranges of which something may be held back."""

    def __init__(self) -> None:
        self._ranges: deque[tuple[Cursor, int]] = deque()  # where each began; its last commit
        self._settled_us = 0

    def read(self, start: Cursor, commit_us: int) -> None:
        """A range was read from there on; without a commit it says nothing."""
        if not commit_us:
            return
        self._ranges.append((start, commit_us))
        if len(self._ranges) > _RANGES_MAX:  # two as one: half as exact
            first = list(self._ranges)
            self._ranges = deque(
                (one[0], other[1]) for one, other in zip(first[::2], first[1::2], strict=False)
            )
            if len(first) % 2:
                self._ranges.append(first[-1])

    def settled(self, oldest: Cursor | None) -> datetime | None:
        """Up to when all is settled, if the oldest that is held back stands there."""
        while self._ranges and self._is_past(oldest):
            _, self._settled_us = self._ranges.popleft()
        return _EPOCH + timedelta(microseconds=self._settled_us) if self._settled_us else None

    def _is_past(self, oldest: Cursor | None) -> bool:
        """Whether the first range is settled to its end."""
        return oldest is None or (len(self._ranges) > 1 and self._ranges[1][0] <= oldest)
