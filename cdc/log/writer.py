"""The one process that appends.

What must always hold: frames follow each other without holes in ``batch_idx`` and never go back in
cursor; an index entry is written after its frame (and, with durability ``fsync``, after the frame
is on disk); on open, everything after the last whole frame is cut. A lock file keeps a second
writer out.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import ProtocolError, TransientError
from cdc.log.frame import Marker, encode_frame, read_marker
from cdc.log.segment import (
    INDEX_DTYPE,
    data_path,
    index_entry,
    index_path,
    list_segments,
    load_index,
    pack_index,
)

Durability = Literal["disk", "fsync"]


class LogWriter:
    """Appends sealed batches; opening recovers what an earlier process left."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = 64 << 20,
        durability: Durability = "disk",
        lock_timeout_s: float = 10.0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._durability = durability
        self._lock = _lock(directory, lock_timeout_s)
        self._sealed_bytes: dict[int, int] = {}
        self._data = self._index = -1
        self.next_batch = 0
        self.end = ORIGIN
        self._recover()

    @property
    def size_bytes(self) -> int:
        """Bytes in all segments, the active one included."""
        return sum(self._sealed_bytes.values()) + self._offset

    def append(
        self, raw: pa.RecordBatch, schemas: Mapping[int, bytes], *, first: Cursor, high: Cursor
    ) -> Marker:
        """Write one batch and publish it to readers."""
        if not self.end <= first <= high:
            raise ProtocolError(
                f"a batch from {first} to {high} cannot follow the log's end {self.end}",
                fix="report this: the reader must skip what the log already holds",
            )
        if self._offset and self._offset >= self._segment_bytes:
            self._roll()
        marker, header, body = encode_frame(self.next_batch, raw, schemas, first=first, high=high)
        try:
            _write_all(self._data, [memoryview(header), memoryview(body)])
            if self._durability == "fsync":
                os.fdatasync(self._data)
            _write_all(self._index, [memoryview(pack_index([index_entry(marker, self._offset)]))])
        except OSError as error:
            self._cut_back()
            raise TransientError(
                f"the log in {self._directory} cannot be written: {error.strerror}",
                fix="free space on that disk; reading goes on by itself",
            ) from error
        self._offset += marker.frame_bytes
        self._indexed += 1
        self.next_batch += 1
        self.end = high
        return marker

    def trim(self, below: Cursor) -> int:
        """Remove sealed segments that end at or below ``below``; says how many."""
        removed = 0
        for first_batch in sorted(self._sealed_bytes):
            last = load_index(index_path(self._directory, first_batch))[-1]
            if Cursor(int(last["high_lsn"]), int(last["high_idx"])) > below:
                break
            # The index goes first: without it a reader no longer finds the segment.
            index_path(self._directory, first_batch).unlink(missing_ok=True)
            data_path(self._directory, first_batch).unlink(missing_ok=True)
            del self._sealed_bytes[first_batch]
            removed += 1
        return removed

    def close(self) -> None:
        """Sync and let go; what was appended stays readable."""
        if self._data >= 0:
            os.fdatasync(self._data)
            os.close(self._data)
            os.close(self._index)
            self._data = self._index = -1
        os.close(self._lock)

    def _recover(self) -> None:
        segments = list_segments(self._directory)
        for first_batch in segments[:-1]:
            self._sealed_bytes[first_batch] = data_path(self._directory, first_batch).stat().st_size
            if not len(load_index(index_path(self._directory, first_batch))):
                self._rebuild_index(first_batch)
        self._open(segments[-1] if segments else 0)

    def _open(self, first_batch: int) -> None:
        """Make ``first_batch``'s segment the active one, cutting what is not whole."""
        entries, self._offset = self._rebuild_index(first_batch)
        self._segment = first_batch
        self._indexed = len(entries)
        self.next_batch = first_batch + len(entries)
        if entries:
            self.end = Cursor(*entries[-1][-2:])
        elif self._sealed_bytes:
            last = load_index(index_path(self._directory, max(self._sealed_bytes)))[-1]
            self.end = Cursor(int(last["high_lsn"]), int(last["high_idx"]))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._data = os.open(data_path(self._directory, first_batch), flags)
        self._index = os.open(index_path(self._directory, first_batch), flags)

    def _rebuild_index(self, first_batch: int) -> tuple[list[tuple[int, ...]], int]:
        """Scan a segment's frames, cut the torn tail, write the index anew if it differs."""
        path = data_path(self._directory, first_batch)
        path.touch()
        entries: list[tuple[int, ...]] = []
        offset = 0
        with pa.OSFile(str(path)) as file:
            buffer = file.read_buffer()
        while (marker := read_marker(buffer, offset)) is not None:
            if marker.batch_idx != first_batch + len(entries):
                break
            entries.append(index_entry(marker, offset))
            offset += marker.frame_bytes
        if offset < buffer.size:
            os.truncate(path, offset)
        index = index_path(self._directory, first_batch)
        packed = pack_index(entries) if entries else b""
        if not index.exists() or index.read_bytes() != packed:
            temporary = index.with_suffix(".tmp")
            temporary.write_bytes(packed)
            temporary.replace(index)
        return entries, offset

    def _roll(self) -> None:
        os.fdatasync(self._data)
        os.close(self._data)
        os.close(self._index)
        self._sealed_bytes[self._segment] = self._offset
        self._open(self.next_batch)

    def _cut_back(self) -> None:
        """After a failed write: leave exactly what was whole before it."""
        os.ftruncate(self._data, self._offset)
        os.ftruncate(self._index, self._indexed * INDEX_DTYPE.itemsize)


def _lock(directory: Path, timeout_s: float) -> int:
    """Take the writer's lock; an earlier process may need a moment to die."""
    handle = os.open(directory / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(handle)
                raise TransientError(
                    f"another process writes the log in {directory}",
                    fix="stop the other service, or give this one a log.directory of its own",
                ) from None
            time.sleep(0.05)


def _write_all(handle: int, parts: list[memoryview]) -> None:
    """``writev`` until everything is written; the kernel may take less than offered."""
    while parts:
        written = os.writev(handle, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]
