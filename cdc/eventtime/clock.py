"""A source's own time, by which its partitions become idle.

Invariant: it never goes back, and it passes only as the source itself shows: by the
commit times of what was read, or, once everything there is was read, by the time that passes then.
So neither a backlog that is being caught up, nor a consumer that waits, nor databases whose clocks
differ make a partition look idle.
"""

from __future__ import annotations

SET_BACK_US = 10_000_000
"""A commit this far behind the time says that the database's clock was set back: from there on the
differences count. Commits that only overtook each other are much nearer."""


class SourceClock:
    """Microseconds from 0 on, where the source was first looked at."""

    def __init__(self) -> None:
        self._now = 0
        self._offset: int | None = None  # commit time minus ours
        self._end_seen: int | None = None  # when the end was last seen, with nothing read since

    @property
    def now(self) -> int:
        return self._now

    def read(self, commit_us: int) -> None:
        """Rows were read, up to this commit time."""
        self._end_seen = None
        if self._offset is None or commit_us - self._offset < self._now - SET_BACK_US:
            self._offset = commit_us - self._now
        self._now = max(self._now, commit_us - self._offset)

    def at_end(self, mono_us: int) -> None:
        """Everything that there is was read; between two such looks the time passes by itself."""
        if self._end_seen is not None:
            self._now += max(0, mono_us - self._end_seen)
        self._end_seen = mono_us

    def waiting(self, mono_us: int) -> None:
        """There is more to read, or may be: the time that passes until the end does not count."""
        self._end_seen = None
