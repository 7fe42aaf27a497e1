"""Many sources, one order of event time: what is read waits until the watermark has reached it.

A step moves the watermark from W0 to W1 and gives what was late and what is due by then. Before it
is delivered its (W0, W1, reads) are stored. After a crash the rows from each source's cursor on are
read again, and the same step is made again: with the watermark at W0 push the rows up to ``reads``,
then ``step(to=W1)``.

Invariants: it gives the same rows in the same order, however the rows are cut into
pieces. It rests on this: the watermark changes in a step only, so all rows between two steps are
judged by the same one; of the rows that a settled step has read exactly those due at or below its
watermark are settled (``SavedPosition``); and a row without a time follows rows with one, of
which those that are settled weigh no more than the watermark does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at, prefix_below
from cdc.errors import ProtocolError
from cdc.eventtime.buffer import EventTimeBuffer
from cdc.eventtime.released import Released, RowSelection, gathered, taken
from cdc.eventtime.times import NO_TIME, Codes, Times, as_it_is
from cdc.eventtime.tracker import WatermarkTracker
from cdc.eventtime.untimed import HighestDue

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class SavedPosition:
    """Everything below ``cursor`` is settled; of the rows from there to below ``read`` exactly
    those that are due at or below ``floor`` are settled too."""

    cursor: Cursor
    read: Cursor
    floor: int = NO_TIME
    cut: bool = False
    """Whether the cursor was moved forward, over rows that others may follow: those that may or
    may not be settled come, perhaps once more."""


@dataclass(frozen=True)
class WatermarkStep:
    """The watermark went from ``before`` to ``watermark``; this came of it."""

    before: int
    watermark: int
    late: Released | None  # at or below the watermark when they came; by source and cursor
    released: Released | None  # by due, ties by source and cursor
    reads: dict[str, Cursor]  # up to where each source was read
    cursors: dict[str, Cursor]  # where each source stands once this step is settled


class Sequencer:
    """Rows of each source in, steps out; ``due`` says when a row of a time may leave."""

    def __init__(
        self,
        saved: Mapping[str, SavedPosition],
        tracker: WatermarkTracker,
        *,
        max_bytes: int,
        watermark: int = NO_TIME,
        due: Callable[[Times], Times] = as_it_is,
        followers: bool = True,
    ) -> None:
        self._saved = dict(saved)
        self._codes = {source: code for code, source in enumerate(saved)}
        self._reads = {source: position.cursor for source, position in saved.items()}
        self._followed = {source: HighestDue() for source in saved} if followers else None
        self._late: dict[str, list[RowSelection]] = {source: [] for source in saved}
        self._tracker = tracker
        self._buffer = EventTimeBuffer([*saved], max_bytes=max_bytes)
        self._watermark = watermark
        self._due = due

    @property
    def watermark(self) -> int:
        return self._watermark

    @property
    def tracker(self) -> WatermarkTracker:
        return self._tracker

    @property
    def buffer(self) -> EventTimeBuffer:
        return self._buffer

    def cursor(self, source: str) -> Cursor:
        """The oldest row that waits, or else up to where the source was read."""
        return self._buffer.oldest(source) or self._reads[source]

    def wants(self, source: str) -> bool:
        """Whether more of a source may be pushed.

        What was read before a restart is always wanted: it had room then, and until it is there no
        step can be made. A source that is ahead waits there: what more it has at or below its floor
        could not be distinguished from what is settled.
        """
        if not self._caught_up(source):
            return True
        late = sum(part.rows.nbytes for part in self._late[source])
        return not self._is_ahead(source) and self._buffer.has_room(source, besides=late)

    def complete(self, source: str) -> None:
        """A source has ended; its next row makes it active again."""
        self._tracker.complete(source)

    def resume(self, source: str) -> None:
        """It has not ended after all."""
        self._tracker.resume(source)

    def stuck(self, behind: Collection[str]) -> bool:
        """Whether nothing that may be read can make room; to ask after a step of None.

        ``behind`` are the sources of which there is more to read. One of them is at its bound, and
        the partition that holds the watermark is its own, or none holds it: it is not read until
        rows are released, and they are not until it is read.
        """
        if not self._all_caught_up():
            return False
        holders = self._tracker.holders()
        return any(not self._buffer.has_room(s) and (s in holders or not holders) for s in behind)

    def push(
        self, source: str, rows: pa.RecordBatch, times: Times, codes: Codes, read: Cursor
    ) -> None:
        """Rows in cursor order, all that there are from the last ``read`` to below this one.

        ``times`` is ``NO_TIME`` for a change without an event time, ``codes`` is -1 for one that
        belongs to no partition.
        """
        self._check_order(source, rows, read)
        self._reads[source] = read
        if not rows.num_rows:
            return
        self._tracker.update(codes, times)
        due, follows = self._dues(source, times, codes)
        again = np.arange(len(due)) < prefix_below(rows, self._saved[source].read)
        settled = again & (due <= self._saved[source].floor)
        if self._saved[source].cut:
            settled &= ~(follows & (due == NO_TIME))
        if follows.any():
            # Only now: one that followed what is settled is settled, whatever the watermark is.
            due = np.where(follows, np.maximum(due, self._watermark), due)
        late = ~again & ~follows & (due <= self._watermark)
        kept = ~late & ~settled
        if self._followed is None:
            kept &= ~follows
        if late.any():
            self._late[source].append(self._late_part(source, rows, times, due, codes, late))
        keep = None if kept.all() else np.flatnonzero(kept)
        self._buffer.add(source, rows, times, due, codes, keep)

    def step(self, *, to: int | None = None, flush: bool = False) -> WatermarkStep | None:
        """Move the watermark as far as the tracker says; None if nothing came of it.

        To exactly ``to``: a step that is made again. With ``flush`` so far that nothing waits.
        While a source has not yet been read again up to where it once was, there is no step.
        """
        if not self._all_caught_up():
            if to is None:
                self.keep_left()
                return None
            raise ProtocolError("a step was to be made again before its rows were read again")
        before = self._watermark
        if to is not None and to < before:
            raise ProtocolError(f"a step would take the watermark back from {before} to {to}")
        if to is not None:
            self._watermark = to
        elif flush:
            self._watermark = max(before, self._buffer.max_due)
        else:
            self._watermark = max(before, self._reachable())
        late = gathered([part for parts in self._late.values() for part in parts])
        released = self._buffer.flush() if flush else self._buffer.release(self._watermark)
        if late is None and released is None and before == self._watermark:
            return None
        for parts in self._late.values():
            parts.clear()
        cursors = {source: self.cursor(source) for source in self._reads}
        return WatermarkStep(before, self._watermark, late, released, dict(self._reads), cursors)

    def keep_left(self) -> None:
        """Hold what waits in memory of its own, as each step does; for when there is none."""
        self._buffer.keep_left()

    def _dues(self, source: str, times: Times, codes: Codes) -> tuple[Times, Mask]:
        """When each row is due, and which ones follow others: NO_TIME if there is none."""
        follows = times == NO_TIME
        if not follows.any():
            due = self._due(times)
        else:
            due = np.full(len(times), NO_TIME, np.int64)
            due[~follows] = self._due(times[~follows])
        if self._followed is not None:
            due = self._followed[source].due(codes, due)
        return due, follows

    def _reachable(self) -> int:
        """How far the tracker lets the watermark go; not past a source that is ahead.

        Where no other source is waited for, such a source is met where it stands: it was there
        before.
        """
        found = self._tracker.look()
        ahead = {s: each.floor for s, each in self._saved.items() if self._is_ahead(s)}
        if not ahead:
            return found
        lowest = min(ahead.values())
        return lowest if self._tracker.active_sources() <= ahead.keys() else min(found, lowest)

    def _is_ahead(self, source: str) -> bool:
        """Whether more of it was released than the watermark says: another was moved back."""
        return self._saved[source].floor > self._watermark

    def _caught_up(self, source: str) -> bool:
        return self._reads[source] >= self._saved[source].read

    def _all_caught_up(self) -> bool:
        return all(self._caught_up(source) for source in self._saved)

    def _check_order(self, source: str, rows: pa.RecordBatch, read: Cursor) -> None:
        first = cursor_at(rows, 0) if rows.num_rows else read
        last = cursor_at(rows, rows.num_rows - 1) if rows.num_rows else None
        if first < self._reads[source] or (last is not None and last >= read):
            raise ProtocolError(
                f"rows of {source} from {first} to {last} do not lie between {self._reads[source]},"
                f" up to where it was read, and {read}"
            )

    def _late_part(
        self, source: str, rows: pa.RecordBatch, times: Times, due: Times, codes: Codes, late: Mask
    ) -> RowSelection:
        """A copy, as of what waits: no file of the log stays mapped until the step."""
        at = np.flatnonzero(late)
        all_of_it = np.arange(len(at))
        return RowSelection(
            taken(rows, at), times[at], due[at], codes[at], self._codes[source], all_of_it
        )
