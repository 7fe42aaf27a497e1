"""The manifest: which segments are sealed, which term writes, which history the batches belong to.

Invariants: ``manifest.json`` is replaced whole or not at all, and is on disk before
anything relies on it. It lists the sealed segments without a hole; the active segment starts where
they end and its files are named by the manifest's own term and history. Batch numbers mean
something only within one history.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import orjson
import xxhash

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError
from cdc.log.files import give_up_spare, write_synced

FILE_NAME = "manifest.json"
_OPENING, _CLOSING = b'{"xxh3":"%016x","manifest":', b"}\n"
_OPENING_BYTES = len(_OPENING % 0)
# A segment is a line, so that those who know it already need not parse it again.
_SEGMENTS, _BETWEEN, _END = b',"segments":[\n', b",\n", b"\n]}"
# A clock tick: files changed twice within one may look unchanged.
_RACY_NS = 50_000_000


_Line = bytes


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

    @cached_property
    def line(self) -> _Line:
        """As the manifest says it: the fields in their order."""
        return orjson.dumps([getattr(self, field) for field in _FIELDS], default=tuple)


_FIELDS = tuple(field.name for field in fields(SegmentInfo))


@dataclass(frozen=True)
class Manifest:
    """What the log holds, all of it but the active segment's batches."""

    term: int = 0
    history: int = 0
    earliest: Cursor = ORIGIN  # the log is complete from here on
    evicted: Cursor = ORIGIN  # below this, unsettled changes were given up
    start_batch: int = 0  # the first batch, while there are no segments
    boot: str = ""  # the machine's boot in which it is being written; empty once closed well
    log_id: str = ""  # made with the first manifest; tells whose a folder of the tier is
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

    @cached_property
    def active_name(self) -> str:
        return segment_name(self.next_batch, self.term, self.history)

    @property
    def begun(self) -> SegmentInfo:
        """The active segment before its first batch."""
        return SegmentInfo(
            first_batch=self.next_batch,
            batches=0,
            rows=0,
            bytes=0,
            first=self.end,
            high=self.end,
            commit_from_us=0,
            commit_to_us=0,
            sealed_at=0.0,
            term=self.term,
            history=self.history,
            index_xxh3=0,
        )


def segment_name(first_batch: int, term: int, history: int) -> str:
    """The files' name without suffix; no two segments with different content ever share one."""
    return f"{first_batch:020d}-{term}-{history}"


def new_history() -> int:
    """The first history of a log: no log that stood here before can have had it."""
    return time.time_ns() // 1_000_000


def encode_manifest(manifest: Manifest) -> bytes:
    head = {
        "term": manifest.term,
        "history": manifest.history,
        "earliest": tuple(manifest.earliest),
        "evicted": tuple(manifest.evicted),
        "start_batch": manifest.start_batch,
        "boot": manifest.boot,
        "log_id": manifest.log_id,
    }
    lines = _BETWEEN.join([segment.line for segment in manifest.segments])
    body = orjson.dumps(head)[:-1] + _SEGMENTS + lines + _END
    return _OPENING % xxhash.xxh3_64_intdigest(body) + body + _CLOSING


def decode_manifest(data: bytes, known: Mapping[bytes, SegmentInfo] | None = None) -> Manifest:
    """Read what ``encode_manifest`` wrote; any other bytes are a CorruptionError.

    Segments that are ``known`` by their line are taken as they are.
    """
    body = data[_OPENING_BYTES : -len(_CLOSING)]
    if data != _OPENING % xxhash.xxh3_64_intdigest(body) + body + _CLOSING:
        raise CorruptionError(
            f"the log's {FILE_NAME} does not match its checksum",
            fix="stop the service and remove it: it is rebuilt from the segments",
        )
    head, _, lines = body.partition(_SEGMENTS)
    values = orjson.loads(head + b"}")
    for floor in ("earliest", "evicted"):
        values[floor] = Cursor(*values[floor])
    known = known or {}
    found = lines[: -len(_END)].split(_BETWEEN) if len(lines) > len(_END) else []
    return Manifest(**values, segments=tuple([known.get(one) or _segment(one) for one in found]))


def _segment(line: bytes) -> SegmentInfo:
    values = dict(zip(_FIELDS, orjson.loads(line), strict=True))
    values["first"], values["high"] = Cursor(*values["first"]), Cursor(*values["high"])
    # Checked by the manifest's checksum; a frozen dataclass sets its fields ten times slower.
    segment = object.__new__(SegmentInfo)
    vars(segment).update(values, line=line)
    return segment


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of the log in ``directory``; None when there is none (yet)."""
    try:
        return decode_manifest((directory / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return None


class ManifestFile:
    """A reader's view of the manifest: read again only when the file changed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._looked_at = str(self._path)
        self._stamp: tuple[int, int, int] | None = None
        self._data = b""
        self._manifest = Manifest()
        self._known: dict[bytes, SegmentInfo] = {}

    def read(self) -> Manifest:
        """The current manifest; an empty one while there is no log."""
        read_at = time.time_ns()
        stamp = stamp_of(self._looked_at)
        if stamp is None or stamp != self._stamp:
            self._load()
            # A file this young may be replaced by one that looks the same: look again next time.
            racy = stamp is None or read_at - stamp[1] <= _RACY_NS
            self._stamp = None if racy else stamp
        return self._manifest

    def read_anew(self) -> Manifest:
        """The current manifest, whatever the file looks like from outside."""
        self._stamp = None
        return self.read()

    def _load(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            self._data, self._manifest, self._known = b"", Manifest(), {}
            return
        if data != self._data:
            self._manifest = decode_manifest(data, self._known)
            self._data = data
            self._known = {segment.line: segment for segment in self._manifest.segments}


def stamp_of(path: str) -> tuple[int, int, int] | None:
    """What tells one manifest file from another without reading it: inode, mtime_ns, size."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def swap_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest; the caller syncs the directory before it relies on it."""
    path, data = directory / FILE_NAME, encode_manifest(manifest)
    try:
        write_synced(path, data)
    except OSError as error:
        if not give_up_spare(directory, error):
            raise
        write_synced(path, data)
