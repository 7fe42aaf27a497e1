"""Putting slices back in order by their markers. Pure.

Partitions finish in any order. A batch is handed on once the markers of all its parts are there and
every batch before it has been handed on. A marker that comes twice, one that contradicts another,
and one that never comes are errors, never something to work round.
"""

from __future__ import annotations

from collections.abc import Iterable

from cdc.errors import ProtocolError
from spark_pipeline.slices.exchange import SliceMarker


class Reorder:
    """The restore step of one source; ``next_batch`` is the first batch not handed on."""

    def __init__(self, next_batch: int) -> None:
        self.next_batch = next_batch
        self._waiting: dict[int, dict[int, SliceMarker]] = {}

    def accept(self, marker: SliceMarker) -> None:
        """Take one marker; the batches it completes come out of ``ready``."""
        parts = self._waiting.setdefault(marker.batch_idx, {})
        if marker.batch_idx < self.next_batch or marker.part in parts:
            raise _broken(f"the marker of batch {marker.batch_idx}, part {marker.part}, came twice")
        if any(other.parts != marker.parts for other in parts.values()) or not (
            0 <= marker.part < marker.parts
        ):
            raise _broken(f"markers of batch {marker.batch_idx} disagree on how many there are")
        parts[marker.part] = marker

    def ready(self) -> list[SliceMarker]:
        """The markers of all batches that are whole and next in line, in order."""
        released: list[SliceMarker] = []
        while (parts := self._waiting.get(self.next_batch)) and _whole(parts):
            released += (parts[part] for part in sorted(parts))
            del self._waiting[self.next_batch]
            self.next_batch += 1
        return released

    def micro_batch(self, markers: Iterable[SliceMarker]) -> list[SliceMarker]:
        """All slices of a micro-batch in order; anything missing from its range is an error."""
        start, ranges = self.next_batch, set()
        for marker in markers:
            ranges.add((marker.range_start, marker.range_end))
            self.accept(marker)
        if len(ranges) != 1:
            raise _broken(f"its markers name {len(ranges)} ranges, not one: {sorted(ranges)}")
        range_start, range_end = ranges.pop()
        if range_start != start:
            raise _broken(f"it starts at batch {range_start}, but batch {start} is next")
        ordered = self.ready()
        if self.next_batch != range_end or self._waiting:
            raise _broken(
                f"batches {self.next_batch} to {range_end} did not get the markers of all their "
                "parts"
            )
        return ordered


def _whole(parts: dict[int, SliceMarker]) -> bool:
    return len(parts) == next(iter(parts.values())).parts


def _broken(what: str) -> ProtocolError:
    return ProtocolError(
        f"a micro-batch does not add up: {what}",
        fix="nothing of it was delivered and it is read again; if it stays, report it",
    )
