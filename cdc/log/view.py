"""Reading the log: any number of processes, none of which the writer knows.

A view maps segments and searches their indexes; it never writes and holds no lock. A segment that
was trimmed away while mapped stays readable until it is let go.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.errors import GapError
from cdc.log.frame import Frame, read_frame
from cdc.log.segment import (
    INDEX_DTYPE,
    Index,
    data_path,
    index_length,
    index_path,
    list_readable,
    load_index,
)
from cdc.log.wake import Waker

_EMPTY = np.empty(0, dtype=INDEX_DTYPE)


class LogView:
    """What a reader of the log sees. Batches are numbered; ranges are half-open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waker: Waker | None = None

    def next_batch(self) -> int:
        """The number that the next batch will have: the end of what is readable."""
        segments = list_readable(self._directory)
        if not segments:
            return 0
        return segments[-1] + index_length(index_path(self._directory, segments[-1]))

    def first_batch(self) -> int:
        """The first batch that is still readable (or will be the first)."""
        return next(iter(list_readable(self._directory)), 0)

    def wait(self, beyond: int, timeout_s: float) -> int:
        """``next_batch`` as soon as it exceeds ``beyond``, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        if self._waker is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._waker = Waker(self._directory)
        while (end := self.next_batch()) <= beyond:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            self._waker.wait(remaining)
        return end

    def seek(self, cursor: Cursor) -> int:
        """The first batch that may hold a change at or above ``cursor``."""
        segments = list_readable(self._directory)
        highs = [self._last_high(first) for first in segments]
        position = bisect.bisect_right(highs, cursor)
        if position == len(segments):
            return self.next_batch()
        index = load_index(index_path(self._directory, segments[position]))
        batch_highs = list(zip(index["high_lsn"].tolist(), index["high_idx"].tolist(), strict=True))
        return segments[position] + bisect.bisect_right(batch_highs, tuple(cursor))

    def entries(self, start: int, end: int) -> Index:
        """The index entries of the batches ``[start, end)``; all of them must be readable."""
        segments = list_readable(self._directory)
        position = max(0, bisect.bisect_right(segments, start) - 1)
        parts = []
        for first in segments[position:]:
            if first >= end:
                break
            index = load_index(index_path(self._directory, first))
            parts.append(index[max(0, start - first) : end - first])
        found = np.concatenate(parts) if parts else _EMPTY
        if len(found) != end - start:
            raise self._gone(start, end)
        return found

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """The batches ``[start, end)`` in order, mapped, each checked against its checksum."""
        segments = list_readable(self._directory)
        mapped = -1
        for entry in self.entries(start, end):
            batch_idx = int(entry["batch_idx"])
            segment = segments[bisect.bisect_right(segments, batch_idx) - 1]
            if segment != mapped:
                path = data_path(self._directory, segment)
                try:
                    with pa.memory_map(str(path)) as file:
                        buffer = file.read_buffer()
                except FileNotFoundError:
                    raise self._gone(start, end) from None
                mapped = segment
            yield read_frame(buffer, int(entry["offset"]), where=path.name)

    def close(self) -> None:
        if self._waker is not None:
            self._waker.close()
            self._waker = None

    def _gone(self, start: int, end: int) -> GapError:
        return GapError(
            f"batches {start} to {end} are not all in the log at {self._directory}",
            fix="start again from the restart cursor; if this was it, the log was removed while "
            "changes in it were still unsettled",
        )

    def _last_high(self, segment: int) -> Cursor:
        index = load_index(index_path(self._directory, segment))
        if not len(index):
            # Only the active segment can be empty: everything in it is still to come.
            return Cursor(1 << 63, 0)
        return Cursor(int(index[-1]["high_lsn"]), int(index[-1]["high_idx"]))
