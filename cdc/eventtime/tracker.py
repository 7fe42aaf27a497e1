"""Computes watermarks: up to which event time everything has come, per partition and for all.

A partition is a table of a source. Invariant:

- its watermark is the largest time seen minus its tolerance, and never goes back;
- the combined one is the smallest of the active partitions' minus the safety margin, and never
  goes back; one with no event yet holds it;
- a partition is idle when its source's clock shows no event of it for the idle timeout. It then
  holds back no other until its next event, and neither does one of a source that is complete. A
  partition that was marked idle is so until the mark is taken back, whatever comes of it;
- a watermark that was pushed counts like one that was seen: that of a source for each of its
  partitions, that of all for the combined one as it is, without the margin;
- when none is active the largest counts, and goes on with the clock until the last event is due,
  so that the last events are released too. Of a complete source nothing more is to come: that
  its last event is due is waited for no longer.

Partitions are places in arrays, so nothing here goes through them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdc.eventtime.times import NO_TIME, Codes, Times, as_it_is

_CAPACITY = 16


@dataclass(frozen=True)
class PartitionState:
    """A partition as the last look found it; its activity is in its source's own time."""

    source: str
    table: str
    watermark: int
    last_event: int
    last_activity: int
    idle: bool
    idle_since: int | None  # None also while it is idle by its mark alone


@dataclass(frozen=True)
class TrackerMetrics:
    """Partitions as the last look found them, and counts since the start."""

    partitions: int
    active: int
    idle: int
    advances: int
    added: int
    removed: int


class WatermarkTracker:
    """Follows the event times of partitions; ``clock`` gives a source's own time.

    ``due`` says at which watermark an event of a time leaves; where none is active that is how
    far it goes on.
    """

    def __init__(
        self,
        *,
        clock: Callable[[str], int],
        idle_timeout_us: int,
        safety_margin_us: int = 0,
        due: Callable[[Times], Times] = as_it_is,
    ) -> None:
        self._clock = clock
        self._due = due
        self._idle_timeout = idle_timeout_us
        self._margin = safety_margin_us
        self._combined = NO_TIME
        self._advances = self._added = self._removed = 0
        self._codes: dict[tuple[str, str], int] = {}
        self._sources: dict[str, int] = {}
        self._nows: Times = np.empty(0, np.int64)
        self._complete: NDArray[np.bool_] = np.empty(0, np.bool_)  # by source
        self._some_complete = False
        self._pushed: Times = np.empty(0, np.int64)  # by source
        self._pushed_to = NO_TIME  # of all
        self._marked_idle: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._watermarks: Times = np.empty(0, np.int64)
        self._last_events: Times = np.empty(0, np.int64)
        self._last_activity: Times = np.empty(0, np.int64)
        self._tolerances: Times = np.empty(0, np.int64)
        self._source_of: NDArray[np.intp] = np.empty(0, np.intp)
        self._there: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._idle: NDArray[np.bool_] = np.empty(0, np.bool_)

    @property
    def watermark(self) -> int:
        """The combined watermark at the last look, ``NO_TIME`` if there is none yet."""
        return self._combined

    @property
    def metrics(self) -> TrackerMetrics:
        there, active = int(self._there.sum()), int(self._active().sum())
        idle = int((self._idle & self._there).sum())
        return TrackerMetrics(there, active, idle, self._advances, self._added, self._removed)

    def register(
        self, source: str, table: str, *, tolerance_us: int = 0, last_event: int = NO_TIME
    ) -> int:
        """Follow a partition from its last known event on.

        The same one again has the same code and keeps what it has seen; the tolerance is the new
        one.
        """
        code = self._codes.setdefault((source, table), len(self._codes))
        of = self._sources.setdefault(source, len(self._sources))
        self._grow()
        if self._there[code]:
            self._raise_watermarks()  # what came until now came under the old tolerance
        else:
            self._there[code], self._idle[code], self._marked_idle[code] = True, False, False
            self._source_of[code] = of
            self._last_events[code] = last_event
            self._watermarks[code] = NO_TIME
            self._last_activity[code] = self._clock(source)
            self._added += 1
        self._tolerances[code] = tolerance_us
        return code

    def remove(self, source: str, table: str) -> None:
        """Forget a partition. Its code stays its own, since rows that carry it may still wait."""
        code = self.code(source, table)
        if code is None:
            return
        self._there[code] = False
        self._removed += 1
        self.look()

    def code(self, source: str, table: str) -> int | None:
        """The code of a partition, if it is followed."""
        code = self._codes.get((source, table))
        return code if code is not None and self._there[code] else None

    def update(self, codes: Codes, times: Times) -> None:
        """A batch was read. A row without a time shows activity; one of no partition nothing."""
        if not len(codes):
            return
        at = codes.astype(np.intp)
        if codes.min() < 0:
            known = codes >= 0
            at, times = at[known], times[known]
        np.maximum.at(self._last_events, at, times)
        if len(at) > len(self._there):  # each partition once instead of each row
            seen: NDArray[np.bool_] = np.zeros(len(self._there), np.bool_)
            seen[at] = True
            at = np.flatnonzero(seen)
        if self._removed:
            at = at[self._there[at]]
        of = self._source_of[at]
        self._read_clocks()
        self._last_activity[at] = self._nows[of]
        if self._some_complete:
            self._complete[of] = False

    def complete(self, source: str) -> None:
        """A source has ended and holds back no other; its next event makes it active again."""
        of = self._sources.setdefault(source, len(self._sources))
        self._grow()
        self._complete[of] = self._some_complete = True

    def resume(self, source: str) -> None:
        """It has not ended after all."""
        if source in self._sources:
            self._complete[self._sources[source]] = False

    def push(self, watermark: int, source: str | None = None) -> None:
        """Nothing at or below it is waited for, of one source or of all; it never goes back."""
        if source is None:
            self._pushed_to = max(self._pushed_to, watermark)
            return
        of = self._sources.setdefault(source, len(self._sources))
        self._grow()
        self._pushed[of] = max(int(self._pushed[of]), watermark)

    def mark_idle(self, source: str, table: str) -> None:
        """The partition holds back no other until it is marked active."""
        code = self.code(source, table)
        if code is not None:
            self._marked_idle[code] = True

    def mark_active(self, source: str, table: str) -> None:
        """The partition counts from its last event on; the idle timeout starts again."""
        code = self.code(source, table)
        if code is not None:
            self._marked_idle[code] = self._idle[code] = False
            self._last_activity[code] = self._clock(source)

    def look(self) -> int:
        """Find out who is idle by now; the combined watermark."""
        self._raise_watermarks()
        self._read_clocks()
        quiet = self._nows[self._source_of] - self._last_activity
        self._idle = (quiet >= self._idle_timeout) | self._marked_idle
        active = self._active()
        if active.any():
            found = int(self._watermarks[active].min()) - self._margin
        else:
            found = self._with_nobody_active(quiet)
        return self._advanced(max(found, self._pushed_to))

    def holders(self) -> set[str]:
        """The sources of the active partitions whose watermark is the smallest."""
        active = self._active()
        if not active.any():
            return set()
        lowest = self._watermarks[active].min()
        held = np.unique(self._source_of[active & (self._watermarks == lowest)])
        names = [*self._sources]
        return {names[of] for of in held}

    def active_sources(self) -> set[str]:
        """The sources that have an active partition."""
        names = [*self._sources]
        return {names[of] for of in np.unique(self._source_of[self._active()])}

    def partitions(self) -> list[PartitionState]:
        """Every partition that is followed, in the order of its code."""
        self._raise_watermarks()
        return [
            PartitionState(
                source,
                table,
                int(self._watermarks[code]),
                int(self._last_events[code]),
                int(self._last_activity[code]),
                bool(self._idle[code]),
                self._idle_since(code),
            )
            for (source, table), code in self._codes.items()
            if self._there[code]
        ]

    def _idle_since(self, code: int) -> int | None:
        """Since when the clock shows no event of it for too long, as the last look found it."""
        since = int(self._last_activity[code]) + self._idle_timeout
        now = int(self._nows[self._source_of[code]])
        return since if self._idle[code] and since <= now else None

    def _advanced(self, found: int) -> int:
        if found > self._combined:
            self._combined = found
            self._advances += 1
        return self._combined

    def _raise_watermarks(self) -> None:
        """To what events and pushes since the last time say; no event minus a tolerance is none."""
        marks = np.maximum(self._last_events, self._tolerances + NO_TIME)
        marks -= self._tolerances
        np.maximum(marks, self._pushed[self._source_of], out=marks, where=self._there)
        np.maximum(self._watermarks, marks, out=self._watermarks)

    def _active(self) -> NDArray[np.bool_]:
        active = self._there > self._idle
        return active > self._complete[self._source_of] if self._some_complete else active

    def _with_nobody_active(self, quiet: Times) -> int:
        pushed = self._pushed[self._source_of[self._there]].max(initial=NO_TIME)
        least = NO_TIME if pushed == NO_TIME else int(pushed) - self._margin
        known = self._there & (self._last_events != NO_TIME)
        if not known.any():
            return least
        last = self._due(self._last_events[known])
        # A partition that was marked idle may have had an event just now.
        silent = np.maximum(quiet[known] - self._idle_timeout, 0)
        goes_on = self._watermarks[known] - self._margin + silent
        complete = self._complete[self._source_of[known]]
        return max(least, int(np.where(complete, last, np.minimum(last, goes_on)).max()))

    def _read_clocks(self) -> None:
        for source, of in self._sources.items():
            self._nows[of] = self._clock(source)

    def _grow(self) -> None:
        """Room for every code and source that was given out, by doubling."""
        if len(self._sources) > len(self._nows):
            more = max(_CAPACITY, len(self._nows))
            self._nows = np.append(self._nows, np.zeros(more, np.int64))
            self._complete = np.append(self._complete, np.zeros(more, np.bool_))
            self._pushed = np.append(self._pushed, np.full(more, NO_TIME, np.int64))
        if len(self._codes) > len(self._there):
            more = max(_CAPACITY, len(self._there))
            none: Times = np.full(more, NO_TIME, np.int64)
            self._watermarks = np.append(self._watermarks, none)
            self._last_events = np.append(self._last_events, none)
            self._last_activity = np.append(self._last_activity, np.zeros(more, np.int64))
            self._tolerances = np.append(self._tolerances, np.zeros(more, np.int64))
            self._source_of = np.append(self._source_of, np.zeros(more, np.intp))
            self._there = np.append(self._there, np.zeros(more, np.bool_))
            self._idle = np.append(self._idle, np.zeros(more, np.bool_))
            self._marked_idle = np.append(self._marked_idle, np.zeros(more, np.bool_))
