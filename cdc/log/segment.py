"""Where segments and their indexes lie, what an index entry says, and how one is rebuilt.

A segment is named by its first batch, its term and its history. An index is a plain array of
fixed-size entries, one a batch: its length says how many batches are readable, any range of it is
read alone, and NumPy searches it without parsing. Invariant: an index can be made
again, byte for byte, from the frames it describes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from cdc.cursor import Cursor
from cdc.log.frame import Marker, read_marker
from cdc.log.manifest import SegmentInfo

INDEX_DTYPE = np.dtype(
    [
        ("batch_idx", "<i8"),
        ("offset", "<i8"),
        ("bytes", "<i8"),
        ("rows", "<i8"),
        ("first_lsn", "<i8"),
        ("first_idx", "<i8"),
        ("high_lsn", "<i8"),
        ("high_idx", "<i8"),
    ]
)
Index = npt.NDArray[np.void]
ENTRY_BYTES = INDEX_DTYPE.itemsize

DATA, INDEX = ".seg", ".idx"
_NAME = re.compile(r"(\d{20})-(\d+)-(\d+)")
_NO_RANGE = (0, 0)
_FEW = 48  # up to about so many values a loop costs less than a call of Arrow


def data_path(directory: Path, name: str) -> Path:
    return directory / f"{name}{DATA}"


def index_path(directory: Path, name: str) -> Path:
    return directory / f"{name}{INDEX}"


def parse_name(file_name: str) -> tuple[int, int, int] | None:
    """First batch, term and history of a segment's file, or None if it is not one."""
    stem, _, suffix = file_name.partition(".")
    found = _NAME.fullmatch(stem)
    if found is None or f".{suffix}" not in (DATA, INDEX):
        return None
    first_batch, term, history = (int(group) for group in found.groups())
    return first_batch, term, history


def list_segments(directory: Path) -> list[str]:
    """The names of all segment files in the directory, the oldest first."""
    return sorted(
        (Path(name).stem for name in os.listdir(directory) if name.endswith(DATA)),
        key=lambda name: parse_name(name + DATA) or (0, 0, 0),
    )


def index_entry(marker: Marker, offset: int) -> tuple[int, ...]:
    """What the index says of the frame at ``offset``, in ``INDEX_DTYPE``'s order."""
    return (
        marker.batch_idx,
        offset,
        marker.frame_bytes,
        marker.rows,
        *marker.first,
        *marker.high,
    )


def pack_index(entries: list[tuple[int, ...]]) -> bytes:
    return np.array(entries, dtype=INDEX_DTYPE).tobytes() if entries else b""


def parse_index(data: bytes) -> Index:
    """All whole entries in ``data``."""
    return np.frombuffer(data, dtype=INDEX_DTYPE, count=len(data) // ENTRY_BYTES)


def index_length(path: Path | str) -> int:
    """How many whole entries an index has, without reading them."""
    try:
        return os.stat(path).st_size // ENTRY_BYTES
    except FileNotFoundError:
        return 0


def read_entries(path: Path | str, start: int, stop: int) -> Index:
    """The entries ``[start, stop)`` by position, fewer where the file ends; reads no others."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return parse_index(b"")
    try:
        start = max(0, start)
        stop = min(stop, os.fstat(handle).st_size // ENTRY_BYTES)
        if start >= stop:
            return parse_index(b"")
        return parse_index(os.pread(handle, (stop - start) * ENTRY_BYTES, start * ENTRY_BYTES))
    finally:
        os.close(handle)


def high_of(entry: np.void | Index) -> Cursor:
    return Cursor(int(entry["high_lsn"]), int(entry["high_idx"]))


def map_file(path: Path) -> pa.Buffer:
    """The file's bytes, mapped: they stay readable when it is removed."""
    if not path.stat().st_size:
        return pa.py_buffer(b"")
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def commit_range(commit_ts: pa.Array) -> tuple[int, int]:
    """The first and last commit time in microseconds; zeros without rows."""
    if not len(commit_ts):
        return _NO_RANGE
    if len(commit_ts) <= _FEW:
        times = commit_ts.to_pylist()
        return min(times), max(times)
    found = pc.min_max(commit_ts)
    return found["min"].as_py(), found["max"].as_py()


def widened(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The range of both; one without rows adds nothing."""
    if _NO_RANGE in (one, other):
        return other if one == _NO_RANGE else one
    return min(one[0], other[0]), max(one[1], other[1])


@dataclass(frozen=True)
class Scan:
    """What a segment's whole frames say, read from the frames themselves."""

    entries: list[tuple[int, ...]]
    end: int  # the byte at which the last whole frame ends
    rows: int
    commits: tuple[int, int]

    @property
    def index(self) -> bytes:
        return pack_index(self.entries)

    @property
    def first(self) -> Cursor | None:
        return Cursor(*self.entries[0][4:6]) if self.entries else None

    @property
    def high(self) -> Cursor:
        return Cursor(*self.entries[-1][6:8])


def info_of(
    found: Scan, first_batch: int, *, term: int, history: int, at: float, place: str = ""
) -> SegmentInfo:
    """A sealed segment of exactly the frames that were found, which must be some."""
    return SegmentInfo(
        first_batch=first_batch,
        batches=len(found.entries),
        rows=found.rows,
        bytes=found.end,
        first=Cursor(*found.entries[0][4:6]),
        high=found.high,
        commit_from_us=found.commits[0],
        commit_to_us=found.commits[1],
        sealed_at=at,
        term=term,
        history=history,
        index_xxh3=xxhash.xxh3_64_intdigest(found.index),
        place=place,
    )


def scan(
    data: pa.Buffer,
    first_batch: int,
    *,
    batches: int | None = None,
    start: int = 0,
) -> Scan:
    """Read frames up to the first that is not whole or not next, or ``batches`` of them."""
    entries: list[tuple[int, ...]] = []
    offset, rows = start, 0
    commits = _NO_RANGE
    while batches is None or len(entries) < batches:
        marker = read_marker(data, offset)
        if marker is None or marker.batch_idx != first_batch + len(entries):
            break
        if marker.rows:
            body = data.slice(offset + marker.header_bytes, marker.body_bytes)
            with pa.ipc.open_stream(body) as stream:
                commits = widened(commits, commit_range(stream.read_next_batch()["commit_ts"]))
        entries.append(index_entry(marker, offset))
        offset += marker.frame_bytes
        rows += marker.rows
    return Scan(entries, offset, rows, commits)
