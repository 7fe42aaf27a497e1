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
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, ProtocolError, TransientError
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
        self._segment = self._offset = self._indexed = 0
        self.next_batch = 0
        self.end = ORIGIN
        try:
            self._recover()
        except BaseException:
            os.close(self._lock)
            raise

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
        marker, header, body = encode_frame(self.next_batch, raw, schemas, first=first, high=high)
        try:
            if self._offset >= self._segment_bytes:
                self._roll()
            self._write(marker, header, body)
        except OSError as error:
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

    def _write(self, marker: Marker, header: bytes, body: pa.Buffer) -> None:
        """Append frame, then entry, behind exactly what is whole.

        A write that failed may have left a part; it is cut before the next one, and if it cannot
        be cut there is no next one.
        """
        entry = pack_index([index_entry(marker, self._offset)])
        _cut(self._data, self._offset)
        _cut(self._index, self._indexed * INDEX_DTYPE.itemsize)
        _write_all(self._data, [memoryview(header), memoryview(body)])
        if self._durability == "fsync":
            os.fdatasync(self._data)
        _write_all(self._index, [memoryview(entry)])

    def _recover(self) -> None:
        segments = list_segments(self._directory)
        for first_batch in segments[:-1]:
            self._check_sealed(first_batch)
        self._open(segments[-1] if segments else 0)

    def _check_sealed(self, first_batch: int) -> None:
        """A sealed segment is never cut: it is whole, or it is reported."""
        size = data_path(self._directory, first_batch).stat().st_size
        index = load_index(index_path(self._directory, first_batch))
        if not len(index) or int(index[-1]["offset"] + index[-1]["bytes"]) != size:
            entries, whole = self._scan(first_batch)
            if whole != size:
                raise CorruptionError(
                    f"the sealed segment {data_path(self._directory, first_batch)} is damaged at "
                    f"byte {whole} of {size}",
                    fix="restore it from a copy, or remove the source's log directory to read "
                    "again from the slot, which still holds everything above the restart cursor",
                )
            self._replace_index(first_batch, entries)
        self._sealed_bytes[first_batch] = size

    def _open(self, first_batch: int) -> None:
        """Make ``first_batch``'s segment the active one, cutting what is not whole."""
        path = data_path(self._directory, first_batch)
        path.touch()
        entries, offset = self._scan(first_batch)
        if offset < path.stat().st_size:
            os.truncate(path, offset)
        self._replace_index(first_batch, entries)
        with ExitStack() as opened:
            data = _open_to_append(path, opened)
            index = _open_to_append(index_path(self._directory, first_batch), opened)
            # What an earlier process wrote and never synced must be on disk before it counts.
            os.fdatasync(data)
            os.fdatasync(index)
            _sync_directory(self._directory)
            opened.pop_all()
        self._data, self._index = data, index
        self._segment, self._offset, self._indexed = first_batch, offset, len(entries)
        self.next_batch = first_batch + len(entries)
        if entries:
            self.end = Cursor(*entries[-1][-2:])
        elif self._sealed_bytes:
            last = load_index(index_path(self._directory, max(self._sealed_bytes)))[-1]
            self.end = Cursor(int(last["high_lsn"]), int(last["high_idx"]))

    def _scan(self, first_batch: int) -> tuple[list[tuple[int, ...]], int]:
        """The entries of a segment's whole frames, and where the last of them ends."""
        entries: list[tuple[int, ...]] = []
        offset = 0
        path = data_path(self._directory, first_batch)
        if not path.stat().st_size:
            return entries, offset
        with pa.memory_map(str(path)) as file:
            buffer = file.read_buffer()
        while (marker := read_marker(buffer, offset)) is not None:
            if marker.batch_idx != first_batch + len(entries):
                break
            entries.append(index_entry(marker, offset))
            offset += marker.frame_bytes
        return entries, offset

    def _replace_index(self, first_batch: int, entries: list[tuple[int, ...]]) -> None:
        index = index_path(self._directory, first_batch)
        packed = pack_index(entries)
        if not index.exists() or index.read_bytes() != packed:
            temporary = index.with_suffix(".tmp")
            temporary.write_bytes(packed)
            temporary.replace(index)

    def _roll(self) -> None:
        """Seal the active segment and open the next; a failure leaves the active one in use."""
        os.fdatasync(self._data)
        os.fdatasync(self._index)
        sealed, size, data, index = self._segment, self._offset, self._data, self._index
        self._sealed_bytes[sealed] = size
        try:
            self._open(self.next_batch)
        except OSError:
            del self._sealed_bytes[sealed]
            raise
        os.close(data)
        os.close(index)


def _open_to_append(path: Path, opened: ExitStack) -> int:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    opened.callback(os.close, handle)
    return handle


def _cut(handle: int, size: int) -> None:
    if os.fstat(handle).st_size != size:
        os.ftruncate(handle, size)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
