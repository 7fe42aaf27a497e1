"""What is found damaged in a log, and what can be done about it.

What the source can send again is cut. An index is written again from its frames. Anything else
stays as it is, and concerns the consumers that stand before it.
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
from cdc.log.recovery.segment_check import CheckedSegment, examine
from cdc.log.segment import INDEX, index_path
from cdc.log.tier.segment_reader import folder_at, reaching

# How long the settled part of the tier is looked at.
_LOOK_BACK_S = 10.0


@dataclass(frozen=True)
class Findings:
    """What is not as it should be; of each segment only the first damage."""

    damaged: tuple[CheckedSegment, ...] = ()  # among the unsettled, in the log's order
    to_mend: tuple[CheckedSegment, ...] = ()  # whole, but not their indexes
    settled: tuple[CheckedSegment, ...] = ()  # damage that no consumer waits for

    def refetchable(self, unsettled_from: Cursor, has_from: Cursor) -> CheckedSegment | None:
        """The first damage from which on the source has everything, so that it can be cut."""
        return next(
            (one for one in self.damaged if max(one.whole_to, unsettled_from) >= has_from), None
        )


def require_refetchable(source: str, end: Cursor, again_from: Cursor, has_from: Cursor) -> None:
    """Refuse a log that ends at ``end`` if its ``source`` does not have what follows."""
    if again_from >= has_from:
        return
    raise CorruptionError(
        f"the log ends at {end}: changes from {again_from} on are lost here, and "
        f"the source has them only from {has_from} on",
        fix="restore the file from a copy; or, with the service stopped, let them go: SELECT "
        f"walbrook.accept_gap('{source}', '{format_lsn(has_from.lsn)}')",
        kind="log_ends_early",
    )


def look_back(directory: Path, past: Sequence[SegmentInfo]) -> Iterator[CheckedSegment]:
    """The settled past, the latest first: nothing waits for a tier that is slow or away."""
    deadline = time.monotonic() + _LOOK_BACK_S
    reachable = True
    for segment in reversed(past):
        if segment.place and (not reachable or time.monotonic() > deadline):
            continue
        try:
            yield examine(directory, segment, None)
        except (OSError, TransientError):
            reachable = reachable and not segment.place


def mend_index(directory: Path, found: CheckedSegment) -> None:
    """Rebuild the index of a sealed segment, where the segment lies."""
    segment = found.segment
    if not segment.place:
        write_synced(index_path(directory, segment.name), found.index)
        return
    with reaching(segment.place):
        folder_at(segment.place).put(segment.name + INDEX, iter([pa.py_buffer(found.index)]))
