"""Segments as readers open them: mapped from the log's directory, or by ranges from the tier."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import xxhash

from cdc.errors import CorruptionError, TransientError
from cdc.log.manifest import SegmentInfo
from cdc.log.segment import (
    DATA,
    ENTRY_BYTES,
    INDEX,
    Index,
    data_path,
    index_path,
    parse_index,
)
from cdc.log.tier.tier import Folder

_INDEXES_MAX = 64
_INDEX_BYTES_MAX = 64 << 20
_COPIED_BYTES_MAX = 64 << 10  # a mapping costs more than a copy of so much


class SegmentData(Protocol):
    """The bytes of one segment; a read beyond its end gives fewer."""

    def read(self, offset: int, size: int) -> pa.Buffer: ...

    def close(self) -> None: ...


def open_data(directory: Path, name: str, place: str) -> SegmentData:
    """Open a segment's data where it lies; FileNotFoundError if it is not there any more."""
    if place:
        with reaching(place):
            return _Ranged(place, folder_at(place).open(name + DATA))
    return _Local(str(data_path(directory, name)))


@contextmanager
def reaching(place: str) -> Iterator[None]:
    """What is not there is not there; anything else about the tier may pass by itself."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise TransientError(
            f"the log's tier at {place} cannot be read: {error}",
            fix="check log.tier.url and that its host can be reached",
            kind="tier",
        ) from error


@lru_cache(maxsize=8)
def folder_at(place: str) -> Folder:
    """The tier's folder; connections to remote ones are worth keeping."""
    return Folder(place)


def read_index(directory: Path, segment: SegmentInfo) -> bytes:
    """The index of a sealed segment, no more of it than the manifest says; FileNotFoundError."""
    size = segment.batches * ENTRY_BYTES
    if segment.place:
        with reaching(segment.place):
            return folder_at(segment.place).read(segment.name + INDEX, size)
    with index_path(directory, segment.name).open("rb") as file:
        return file.read(size)


def index_matches(segment: SegmentInfo, index: bytes) -> bool:
    """Whether these are the entries that the manifest speaks of."""
    return xxhash.xxh3_64_intdigest(index) == segment.index_xxh3


def require_reachable(place: str) -> None:
    """A file is missing in ``place``: raise if all of it is, as when nothing is mounted there."""
    if not place:
        return
    with reaching(place):
        there = folder_at(place).owner() is not None
    if not there:
        raise TransientError(
            f"the log's tier at {place} is not there: neither segments nor the file of its owner",
            fix="see that what log.tier.url names is mounted and can be reached",
            kind="tier",
        )


class SealedIndexes:
    """Indexes of sealed segments, checked once against the manifest; the last few are kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: OrderedDict[tuple[str, int], Index] = OrderedDict()
        self._bytes = 0

    def of(self, segment: SegmentInfo) -> Index:
        """FileNotFoundError if it is not there any more; CorruptionError if it is damaged."""
        key = (segment.name, segment.index_xxh3)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        index = self._read(segment)
        self._kept[key] = index
        self._bytes += index.nbytes
        while len(self._kept) > _INDEXES_MAX or (
            self._bytes > _INDEX_BYTES_MAX and len(self._kept) > 1
        ):
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return index

    def _read(self, segment: SegmentInfo) -> Index:
        data = read_index(self._directory, segment)
        if not index_matches(segment, data):
            raise CorruptionError(
                f"the index of segment {segment.name} does not match its checksum",
                fix="nothing if this passes: the service rebuilds indexes from their segments; "
                "else restart it",
                kind="log_damaged",
            )
        return parse_index(data)


class _Local:
    """Small frames are copied, the others mapped; a mapping ends with the last buffer over it."""

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._mapped: pa.Buffer | None = None

    def read(self, offset: int, size: int) -> pa.Buffer:
        start, size = max(offset, 0), max(size, 0)
        if size <= _COPIED_BYTES_MAX:
            return pa.py_buffer(os.pread(self._handle, size, start))
        if self._mapped is None:
            self._mapped = self._map()
        start = min(start, self._mapped.size)
        return self._mapped.slice(start, min(size, self._mapped.size - start))

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _map(self) -> pa.Buffer:
        if not os.fstat(self._handle).st_size:
            return pa.py_buffer(b"")
        return pa.py_buffer(mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ))


class _Ranged:
    def __init__(self, place: str, file: pa.NativeFile) -> None:
        self._place = place
        self._file = file

    def read(self, offset: int, size: int) -> pa.Buffer:
        with reaching(self._place):
            start = min(max(offset, 0), self._file.size())
            left = self._file.size() - start
            return pa.py_buffer(self._file.read_at(max(0, min(size, left)), start))

    def close(self) -> None:
        self._file.close()
