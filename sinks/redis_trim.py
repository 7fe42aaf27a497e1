"""Trimming a stream by the age of its entries.

Entry ids are cursors and say nothing of time, but every entry carries the time of its commit in its
metadata, and commit times rise with the ids. So the first entry that is young enough is searched
for in the stream itself, by halving the range of LSNs. Nothing is kept in memory that a restart
could lose.

Invariants: an entry is removed only if the commit of a later or the same entry is too old. A search
is bounded by the bits of an LSN. A stream is searched once per ``_PART`` of the age at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

import orjson

from sinks.redis_record import entry_cursor

_PART = 50  # of the age
_STEPS_MAX = 64
_STREAMS_MAX = 10_000
AT_ONCE = 10
"""How many streams are searched before one delivery; the others wait for a later one."""

Entry = tuple[bytes, list[bytes]]
First = Callable[[str, str], Entry | None]
"""The first entry of a stream at or above an id."""


class AgeTrim:
    """Which streams are due, and up to where each may go."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._pause_s = max(1.0, age_s / _PART)
        self._due: OrderedDict[str, float] = OrderedDict()  # Unix seconds

    def due(self, streams: list[str], now: float) -> list[str]:
        return [key for key in streams if self._due.get(key, 0.0) <= now][:AT_ONCE]

    def least_id(self, key: str, first: First, now: float) -> str | None:
        """The id from which on entries stay; None if all do."""
        cutoff = now - self._age_s
        oldest = first(key, "-")
        since = None if oldest is None else committed_at(oldest)
        if oldest is None or since is None or since < cutoff:
            self._next(key, now + self._pause_s)
        else:
            self._next(key, since + self._age_s + self._pause_s)
        if oldest is None or since is None or since >= cutoff:
            return None
        old, young = entry_cursor(oldest[0]).lsn, None
        for _ in range(_STEPS_MAX):
            # Without an upper end, the distance from the first one doubles.
            if young is None:
                middle = old + max(1, old - entry_cursor(oldest[0]).lsn)
            elif young - old > 1:
                middle = (old + young) // 2
            else:
                break
            found = first(key, f"{middle}-0")
            at = None if found is None else committed_at(found)
            if found is None or at is None or at >= cutoff:
                young = middle
            else:
                old = entry_cursor(found[0]).lsn
        return f"{old + 1}-0"

    def _next(self, key: str, at: float) -> None:
        self._due[key] = at
        self._due.move_to_end(key)
        while len(self._due) > _STREAMS_MAX:
            self._due.popitem(last=False)


def committed_at(entry: Entry) -> float | None:
    """When an entry's change was committed, in Unix seconds; None if it does not say."""
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    try:
        said = orjson.loads(fields[b"metadata"])["commit_timestamp"]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(said, int):
        return said / 1e6
    return datetime.fromisoformat(said).astimezone(UTC).timestamp()
