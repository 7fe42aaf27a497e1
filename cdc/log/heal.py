"""Looking through the log for what is damaged: to be cut, to be mended, or only to be told of.

Frames that may hold an unsettled change are read and checked in full, one segment at a time; of
the settled past only what costs nothing. Nothing is changed here but indexes, which are put anew
from the frames.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cdc.cursor import Cursor, format_lsn
from cdc.errors import CorruptionError, TransientError
from cdc.log.files import write_synced
from cdc.log.manifest import SegmentInfo
from cdc.log.segment import INDEX, index_path
from cdc.log.stored import folder_at, reaching
from cdc.log.whole import Examined, examine

# How long the settled part of the tier is looked at.
_LOOK_BACK_S = 10.0


@dataclass(frozen=True)
class Findings:
    """What is not as it should be."""

    cut: Examined | None  # the first damage among the unsettled
    kept: tuple[SegmentInfo, ...]  # all before it, the last one up to its last whole frame
    to_mend: tuple[Examined, ...]  # whole, but not their indexes
    settled: tuple[Examined, ...]  # damage that nobody waits for

    def require_refetchable(self, end: Cursor, again_from: Cursor, has_from: Cursor) -> None:
        """Refuse a cut at ``end`` if the source does not have what is needed from there on."""
        if again_from >= has_from:
            return
        where = self.cut.what if self.cut else f"the log ends at {end}"
        raise CorruptionError(
            f"{where}: changes from {again_from} on are lost here, and "
            f"the source has them only from {has_from} on",
            fix="restore the file from a copy; or, with the service stopped, let them go: SELECT "
            f"walbrook.accept_gap(source, '{format_lsn(has_from.lsn)}')",
            kind="log_damaged",
        )


def look_through(
    directory: Path, segments: Sequence[SegmentInfo], unsettled_from: Cursor
) -> Findings:
    """Examine all segments up to the first damage that matters."""
    past = [segment for segment in segments if segment.high <= unsettled_from]
    looked_at = list(_look_back(directory, past))
    settled = tuple(found for found in looked_at if not found.whole)
    to_mend = [found for found in looked_at if found.whole and not found.index_stored]
    for position, segment in enumerate(segments[len(past) :], len(past)):
        found = examine(directory, segment, unsettled_from)
        if not found.whole:
            kept = (*segments[:position], *([found.kept] if found.kept else []))
            return Findings(found, kept, tuple(to_mend), settled)
        if not found.index_stored:
            to_mend.append(found)
    return Findings(None, tuple(segments), tuple(to_mend), settled)


def _look_back(directory: Path, past: Sequence[SegmentInfo]) -> Iterator[Examined]:
    """The settled past, the latest first: nothing waits for a tier that is slow or away."""
    deadline = time.monotonic() + _LOOK_BACK_S
    reachable = True
    for segment in reversed(past):
        if segment.place and (not reachable or time.monotonic() > deadline):
            continue
        try:
            yield examine(directory, segment, None)
        except TransientError:
            reachable = False


def mend_index(directory: Path, found: Examined) -> None:
    """Put the index of a sealed segment anew, where the segment lies."""
    segment = found.segment
    if not segment.place:
        write_synced(index_path(directory, segment.name), found.index)
        return
    with reaching(segment.place):
        folder_at(segment.place).put(segment.name + INDEX, iter([pa.py_buffer(found.index)]))
