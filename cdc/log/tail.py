"""The end of the log as a reader that follows it sees it: the active segment, held open.

A follower of the log asks for the next few frames again and again; opening the same two files
each time costs more than reading them. Invariant: a file is held only once it has an entry: until
then its writer may begin it again under the same name. Whatever is not found here (more than a few
bytes, a segment that was sealed, damage) is for ``LogView`` to look up.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from cdc.log.segment import ENTRY_BYTES, Index, data_path, index_path, parse_index

_READ_BYTES_MAX = 64 << 10  # a mapping costs less than a copy of more


class LogTail:
    """Reads one segment at a time; opening another one lets go of the first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = ""
        self._index = self._data = -1

    def length(self, name: str) -> int | None:
        """How many entries the index of an active segment has; None if it is not held."""
        if name != self._name and not self._open(name):
            return None
        found = os.fstat(self._index)
        if not found.st_nlink:
            # A writer that was started again wrote the files again, under the same names.
            if not self._open(name):
                return None
            found = os.fstat(self._index)
        return found.st_size // ENTRY_BYTES

    def entries(self, name: str, start: int, stop: int) -> Index | None:
        """The entries ``[start, stop)`` by position, fewer where the index ends."""
        if name != self._name or start < 0:
            return None
        size = (stop - start) * ENTRY_BYTES
        return parse_index(os.pread(self._index, size, start * ENTRY_BYTES))

    def frames(self, name: str, part: Index) -> list[pa.Buffer] | None:
        """The bytes of a few frames that follow each other, as their entries say."""
        if name != self._name or not len(part):
            return None
        offsets, sizes = part["offset"].tolist(), part["bytes"].tolist()
        first, size = offsets[0], sum(sizes)
        if size > _READ_BYTES_MAX:
            return None
        found = pa.py_buffer(os.pread(self._data, size, first))
        if found.size < size:
            return None
        return [found.slice(at - first, each) for at, each in zip(offsets, sizes, strict=True)]

    def close(self) -> None:
        for handle in (self._index, self._data):
            if handle >= 0:
                os.close(handle)
        self._name, self._index, self._data = "", -1, -1

    def _open(self, name: str) -> bool:
        self.close()
        with suppress(FileNotFoundError):
            self._index = _opened(index_path(self._directory, name))
            self._data = _opened(data_path(self._directory, name))
            if os.fstat(self._index).st_size >= ENTRY_BYTES:
                self._name = name
                return True
        self.close()
        return False

    def __del__(self) -> None:
        self.close()


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
