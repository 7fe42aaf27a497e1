"""The active segment: two open files, and what has been written to them.

Invariants: an entry is written after its frame, both behind exactly what is whole. A
write that failed may have left a part; it is cut before the next one, and if it cannot be cut
there is no next one.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pyarrow as pa
import xxhash

from cdc.cursor import Cursor
from cdc.log.files import FILE_MODE
from cdc.log.frame import Marker
from cdc.log.manifest import Manifest, SegmentInfo
from cdc.log.segment import (
    ENTRY_BYTES,
    Scan,
    commit_range,
    data_path,
    index_entry,
    index_path,
    pack_index,
    widened,
)


class ActiveSegment:
    """Appends frames and their entries; a sync has to reach ``files`` and their directory."""

    def __init__(self, directory: Path, manifest: Manifest, found: Scan | None = None) -> None:
        """Begin the segment that ``manifest`` names, or go on with the one that was ``found``."""
        self._first_batch = manifest.next_batch
        self._term, self._history = manifest.term, manifest.history
        paths = [path(directory, manifest.active_name) for path in (data_path, index_path)]
        with ExitStack() as opened:
            if found is None:
                # What an earlier attempt left is empty or was never published.
                for path in paths:
                    path.unlink(missing_ok=True)
            create = os.O_CREAT | os.O_EXCL if found is None else 0
            self.files = [_open_to_append(path, create, opened) for path in paths]
            opened.pop_all()
        self._data, self._index = self.files
        found = found or Scan([], 0, 0, (0, 0))
        self._digest = xxhash.xxh3_64(found.index)
        self._batches, self._rows = len(found.entries), found.rows
        self._commits = found.commits
        self.bytes = found.end
        self._first = Cursor(*found.entries[0][4:6]) if found.entries else manifest.end
        self._high = Cursor(*found.entries[-1][6:8]) if found.entries else manifest.end
        self._since = time.time()

    @property
    def batches(self) -> int:
        return self._batches

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def high(self) -> Cursor:
        return self._high

    def age_s(self) -> float:
        """Seconds since its first batch; nothing ages while there is none."""
        return time.time() - self._since if self._batches else 0.0

    def write(self, marker: Marker, header: bytes, body: pa.Buffer, commits: pa.Array) -> None:
        """Append frame, then entry: from then on readers see it."""
        entry = pack_index([index_entry(marker, self.bytes)])
        widest = widened(self._commits, commit_range(commits))
        self._cut()
        try:
            _write_all(self._data, [memoryview(header), memoryview(body)])
            _write_all(self._index, [memoryview(entry)])
        except OSError:
            # A part of a frame takes room that a full disk needs; the next write cuts it else.
            with suppress(OSError):
                self._cut()
            raise
        if not self._batches:
            self._first, self._since = marker.first, time.time()
        self._digest.update(entry)
        self._commits = widest
        self.bytes += marker.frame_bytes
        self._batches += 1
        self._rows += marker.rows
        self._high = marker.high

    def index_is_whole(self, path: Path) -> bool:
        """Whether the index in ``path`` still says what was written to it."""
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return False
        return xxhash.xxh3_64_intdigest(found) == self._digest.intdigest()

    def _cut(self) -> None:
        _cut(self._data, self.bytes)
        _cut(self._index, self._batches * ENTRY_BYTES)

    def info(self, sealed_at: float | None = None) -> SegmentInfo:
        """What the manifest will say of it once it is sealed."""
        return SegmentInfo(
            first_batch=self._first_batch,
            batches=self._batches,
            rows=self._rows,
            bytes=self.bytes,
            first=self._first,
            high=self._high,
            commit_from_us=self._commits[0],
            commit_to_us=self._commits[1],
            sealed_at=self._since if sealed_at is None else sealed_at,
            term=self._term,
            history=self._history,
            index_xxh3=self._digest.intdigest(),
        )

    def close(self) -> None:
        for handle in self.files:
            # What matters was synced; closing only gives the descriptor back.
            with suppress(OSError):
                os.close(handle)


def _open_to_append(path: Path, create: int, opened: ExitStack) -> int:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | create, mode=FILE_MODE)
    opened.callback(os.close, handle)
    return handle


def _cut(handle: int, size: int) -> None:
    if os.fstat(handle).st_size != size:
        os.ftruncate(handle, size)


def _write_all(handle: int, parts: list[memoryview]) -> None:
    """``writev`` until everything is written; the kernel may take less than offered."""
    while parts:
        written = os.writev(handle, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]
