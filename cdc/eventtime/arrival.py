"""Processing time: when rows arrived, by a time that is the same however often they are read.

The time of a row is when it was committed, but never before that of a row in front of it in its
log, and never at or below the watermark that was reached when the row was first read. Of the last
of the three nothing stands in the log, so it is kept as a bound (``Bound``) and stored with what
was read. Invariants:

- no row is late, and the rows of a log have their times in the order of the log;
- a row has the same time whenever it is read again, from whatever cursor on and cut into whatever
  pieces, as long as the bounds that were stored up to there are given. A cursor that moved forward
  passes only rows at or below the watermark, so what they would raise is at or below it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from cdc.cursor import Cursor
from cdc.cursor_columns import count_below
from cdc.eventtime.clock import SourceClock
from cdc.eventtime.times import NO_TIME, TIME_MAX, TIME_MIN, Times
from cdc.eventtime.tracker import PartitionState, WatermarkTracker


class Bound(NamedTuple):
    """Rows from ``start`` on have no smaller time than ``time``."""

    start: Cursor
    time: int


class Arrivals:
    """The times of one log's rows, in its order.

    Rows below ``known_to`` were read before; ``bounds`` are those that were found then.
    """

    def __init__(self, bounds: Iterable[Bound] = (), known_to: Cursor | None = None) -> None:
        self._known_to = known_to
        self._bounds = sorted(each for each in bounds if known_to and each.start < known_to)
        self._applied = 0  # so many of the bounds are in ``_reached``
        self._reached = NO_TIME

    def times(self, lsn: Times, idx: Times, commits: Times, watermark: int) -> Times:
        """The times of the next rows, by their cursors and commit times."""
        found: Times = np.clip(commits, TIME_MIN, TIME_MAX)
        if not len(found):
            return found
        found[0] = max(int(found[0]), self._reached)
        while self._applied < len(self._bounds):
            bound = self._bounds[self._applied]
            at = count_below(lsn, idx, bound.start)
            if at == len(found):
                break
            found[at] = max(int(found[at]), bound.time)
            self._applied += 1
        np.maximum.accumulate(found, out=found)
        new = 0 if self._known_to is None else count_below(lsn, idx, self._known_to)
        if new < len(found) and found[new] <= watermark:
            self._bounds.append(Bound(Cursor(int(lsn[new]), int(idx[new])), watermark + 1))
            self._applied = len(self._bounds)
            np.maximum(found[new:], watermark + 1, out=found[new:])
        self._reached = int(found[-1])
        return found

    def bounds(self, cursor: Cursor, read: Cursor) -> list[Bound]:
        """What has to be known to read the rows from ``cursor`` to ``read`` again."""
        if cursor >= read:
            return []
        passed = [each for each in self._bounds if each.start <= cursor]
        later = [each for each in self._bounds if cursor < each.start < read]
        return [*passed[-1:], *later]

    def forget(self, cursor: Cursor) -> None:
        """Nothing below ``cursor`` is read again: the bounds in front of the last one go."""
        passed = sum(each.start <= cursor for each in self._bounds)
        gone = min(max(0, passed - 1), self._applied)
        del self._bounds[:gone]
        self._applied -= gone


class ArrivalClock(SourceClock):
    """How far the arrivals of a log have come, in microseconds since 1970.

    While there is more to read, that is what the commits say; at the end of the log it is
    ``clock``. It never goes back.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__()
        self._clock = clock
        self._now = NO_TIME
        self.is_at_end = False

    def read(self, commit_us: int) -> None:
        self.is_at_end = False
        self._now = max(self._now, min(commit_us, TIME_MAX))

    def at_end(self, mono_us: int) -> None:
        self.is_at_end = True
        self._now = max(self._now, self._clock())

    def waiting(self, mono_us: int) -> None:
        self.is_at_end = False


class ArrivalTracker(WatermarkTracker):
    """The watermark by the clocks of arrival; no partition is waited for, and none is idle.

    Without ``held``, it reaches everything that was read, so that nothing waits. With it, rows wait
    for windows, and it goes as far as the clock that is behind the others. The clock moves it in
    steps of ``step_us``: with windows the distance of their ends, so that the number of watermarks
    in the time of a window, and of the bounds that come of them, is bounded.
    """

    def __init__(
        self,
        sources: Iterable[str],
        *,
        clock: Callable[[str], int],
        is_at_end: Callable[[str], bool],
        step_us: int,
        held: bool,
    ) -> None:
        super().__init__(clock=clock, idle_timeout_us=TIME_MAX)
        self._names = [*sources]
        self._now_of = clock
        self._is_at_end = is_at_end
        self._step = step_us
        self._held = held
        self._highest = NO_TIME

    def update(self, codes: np.typing.NDArray[np.int32], times: Times) -> None:
        super().update(codes, times)
        self._highest = max(self._highest, int(times.max(initial=NO_TIME)))

    def look(self) -> int:
        behind = min(map(self._now_of, self._names))
        found = behind if behind == NO_TIME else behind // self._step * self._step - 1
        return self._advanced(found if self._held else max(found, self._highest))

    def holders(self) -> set[str]:
        nows = {name: self._now_of(name) for name in self._names}
        return {name for name, now in nows.items() if now == min(nows.values())}

    def active_sources(self) -> set[str]:
        return {name for name in self._names if not self._is_at_end(name)}

    def partitions(self) -> list[PartitionState]:
        """Each of them has the watermark of all."""
        return [
            PartitionState(
                each.source, each.table, self.watermark, each.last_event, each.last_activity,
                idle=False, idle_since=None,
            )
            for each in super().partitions()
        ]  # fmt: skip
