"""Reading the log back against its checksums in a thread of its own.

Invariants: nothing is changed here. What was removed or moved while it was looked at is not damage,
and neither is a tier that cannot be reached: its segments are left out, and the caller looks again
later. One segment is in memory at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from cdc.cursor import Cursor
from cdc.errors import CorruptionError, TransientError
from cdc.log.manifest import SegmentInfo, read_manifest
from cdc.log.recovery.damage_scan import Findings, look_back
from cdc.log.recovery.segment_check import CheckedSegment, examine

_logger = structlog.get_logger("walbrook.log")
_CLOSE_S = 10.0  # a filesystem that does not answer is not waited for


class Inspection:
    """One look through the segments that a log had when it began."""

    def __init__(
        self,
        directory: Path,
        segments: Sequence[SegmentInfo],
        unsettled_from: Cursor,
        refetchable_from: Cursor,
    ) -> None:
        """What the source can still send, from ``refetchable_from`` on, is looked at first."""
        self._directory = directory
        self._segments = segments
        self._unsettled_from = unsettled_from
        self._refetchable_from = refetchable_from
        self._stopping = False
        self.found: Findings | None = None  # once all was looked at
        self.left_out = False  # whether something could not be reached
        self.tail_is_whole = False  # what the source can still send was looked at, and is whole
        self._thread = threading.Thread(target=self._run, name="log-inspection", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._thread.join(_CLOSE_S)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        unsettled = [one for one in self._segments if one.high > self._unsettled_from]
        tail = [one for one in unsettled if one.high > self._refetchable_from]
        looked_at = self._look(tail)
        self.tail_is_whole = not self.left_out and all(one.whole for one in looked_at)
        looked_at += self._look([one for one in unsettled if one.high <= self._refetchable_from])
        past = [one for one in self._segments if one.high <= self._unsettled_from]
        settled = [one for one in look_back(self._directory, past) if self._is_current(one)]
        if self._stopping:
            return
        looked_at.sort(key=lambda one: one.segment.first_batch)
        self.found = Findings(
            damaged=tuple(one for one in looked_at if not one.whole),
            to_mend=tuple(
                one for one in [*looked_at, *settled] if one.whole and not one.index_stored
            ),
            settled=tuple(one for one in settled if not one.whole),
        )

    def _look(self, segments: Sequence[SegmentInfo]) -> list[CheckedSegment]:
        looked_at: list[CheckedSegment] = []
        for segment in segments:
            if self._stopping:
                break
            try:
                found = examine(self._directory, segment, self._unsettled_from)
            except (OSError, TransientError) as error:
                self.left_out = True
                _logger.warning("log.not_inspected", segment=segment.name, error=str(error))
                continue
            if self._is_current(found):
                looked_at.append(found)
        return looked_at

    def _is_current(self, found: CheckedSegment) -> bool:
        """Whether what was not whole is still where it was looked for."""
        if found.whole and found.index_stored:
            return True
        try:
            manifest = read_manifest(self._directory)
        except CorruptionError:
            return True
        if manifest is None or found.segment.name == manifest.active_name:
            return manifest is not None
        names = {one.name: one.place for one in manifest.segments}
        return names.get(found.segment.name) == found.segment.place
