"""The manifest: which segments are sealed, which term writes, which history the batches belong to.

What must always hold: ``manifest.json`` is replaced whole or not at all, and is on disk before
anything relies on it. It lists the sealed segments without a hole; the active segment starts where
they end and its files are named by the manifest's own term and history. Batch numbers mean
something only within one history.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import xxhash

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError

FILE_NAME = "manifest.json"
_OPENING, _CLOSING = b'{"xxh3":"%016x","manifest":', b"}\n"
_OPENING_BYTES = len(_OPENING % 0)
# A clock tick: files changed twice within one may look unchanged.
_RACY_NS = 50_000_000


@dataclass(frozen=True)
class SegmentInfo:
    """A sealed segment: readers take this many batches and bytes of it, and never more."""

    first_batch: int
    batches: int
    rows: int
    bytes: int
    first: Cursor
    high: Cursor
    commit_from_us: int  # 0 without rows
    commit_to_us: int
    sealed_at: float  # unix seconds; of the active segment: when its first batch came
    term: int
    history: int  # the history in which its file was begun; with the term, part of its name
    index_xxh3: int
    place: str = ""  # the log's directory, or else the URL of the tier's folder

    @property
    def next_batch(self) -> int:
        return self.first_batch + self.batches

    @property
    def name(self) -> str:
        return segment_name(self.first_batch, self.term, self.history)


@dataclass(frozen=True)
class Manifest:
    """What the log holds, all of it but the active segment's batches."""

    term: int = 0
    history: int = 0
    earliest: Cursor = ORIGIN  # the log is complete from here on
    evicted: Cursor = ORIGIN  # below this, unsettled changes were given up
    start_batch: int = 0  # the first batch, while there are no segments
    boot: str = ""  # the machine's boot in which it is being written; empty once closed well
    segments: tuple[SegmentInfo, ...] = ()

    @property
    def first_batch(self) -> int:
        return self.segments[0].first_batch if self.segments else self.start_batch

    @property
    def next_batch(self) -> int:
        """The end of the sealed part: where the active segment starts."""
        return self.segments[-1].next_batch if self.segments else self.start_batch

    @property
    def end(self) -> Cursor:
        """The cursor at which the sealed part ends."""
        return self.segments[-1].high if self.segments else self.earliest

    @property
    def active_name(self) -> str:
        return segment_name(self.next_batch, self.term, self.history)


def segment_name(first_batch: int, term: int, history: int) -> str:
    """The files' name without suffix; no two segments with different content ever share one."""
    return f"{first_batch:020d}-{term}-{history}"


def new_history() -> int:
    """The first history of a log: no log that stood here before can have had it."""
    return time.time_ns() // 1_000_000


def encode_manifest(manifest: Manifest) -> bytes:
    body = orjson.dumps(manifest, default=tuple)  # a cursor is written as a pair
    return _OPENING % xxhash.xxh3_64_intdigest(body) + body + _CLOSING


def decode_manifest(data: bytes) -> Manifest:
    """Read what ``encode_manifest`` wrote; any other bytes are a CorruptionError."""
    body = data[_OPENING_BYTES : -len(_CLOSING)]
    if data != _OPENING % xxhash.xxh3_64_intdigest(body) + body + _CLOSING:
        raise CorruptionError(
            f"the log's {FILE_NAME} does not match its checksum",
            fix="stop the service and remove it: it is made anew from the segments",
        )
    fields = orjson.loads(body)
    segments = tuple(
        SegmentInfo(
            **{**segment, "first": Cursor(*segment["first"]), "high": Cursor(*segment["high"])}
        )
        for segment in fields.pop("segments")
    )
    for floor in ("earliest", "evicted"):
        fields[floor] = Cursor(*fields[floor])
    return Manifest(**fields, segments=segments)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of the log in ``directory``; None when there is none (yet)."""
    try:
        return decode_manifest((directory / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return None


class ManifestFile:
    """A reader's view of the manifest: read again only when the file changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stamp: tuple[int, int, int] | None = None
        self._manifest = Manifest()

    def read(self) -> Manifest:
        """The current manifest; an empty one while there is no log."""
        read_at = time.time_ns()
        stamp = stamp_of(self._directory)
        if stamp is None:
            self._stamp, self._manifest = None, Manifest()
        elif stamp != self._stamp:
            self._manifest = read_manifest(self._directory) or Manifest()
            # A file this young may be replaced by one that looks the same: look again next time.
            self._stamp = stamp if read_at - stamp[1] > _RACY_NS else None
        return self._manifest


def stamp_of(directory: Path) -> tuple[int, int, int] | None:
    """What tells one manifest file from another without reading it: inode, mtime_ns, size."""
    try:
        stat = os.stat(directory / FILE_NAME)
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def swap_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest; the caller syncs the directory before it relies on it."""
    write_synced(directory / FILE_NAME, encode_manifest(manifest))


def write_synced(path: Path, data: bytes | pa.Buffer) -> None:
    """Put a whole file on disk beside ``path``, then let it take its place."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
