"""Reading a whole log against everything it says of itself.

Manifest, indexes and frames say the same things three times: numbers, bounds, sizes. Here they are
all read and compared, and every frame with its checksum. Invariant: a damage is one
value that names file, byte, batch and cursors as far as they are known, and none keeps the rest of
the log from being looked at. A log that is being written can be verified: segments that are
removed meanwhile are let go, those that move are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.cursor_columns import at_or_above, cursor_columns
from cdc.errors import CorruptionError, WalbrookError
from cdc.log.frame import Frame, read_frame
from cdc.log.manifest import FILE_NAME as MANIFEST
from cdc.log.manifest import Manifest, SegmentInfo, read_manifest
from cdc.log.segment import (
    DATA,
    INDEX,
    data_path,
    index_entry,
    index_path,
    list_segments,
    parse_index,
    parse_name,
    scan,
)
from cdc.log.sync import FILE_NAME as DURABLE
from cdc.log.sync import read_durable
from cdc.log.tier.segment_reader import SegmentData, index_matches, open_data, read_index

Entry = tuple[int, ...]
"""An index entry as plain numbers, in ``INDEX_DTYPE``'s order."""


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it should be."""

    file: str
    what: str
    byte: int | None = None
    batch: int | None = None
    bounds: tuple[Cursor, Cursor] | None = None

    def __str__(self) -> str:
        where = [self.file]
        if self.byte is not None:
            where.append(f"byte {self.byte}")
        if self.batch is not None:
            where.append(f"batch {self.batch}")
        if self.bounds is not None:
            where.append(f"cursors {self.bounds[0]} to {self.bounds[1]}")
        return f"{', '.join(where)}: {self.what}"


@dataclass(frozen=True)
class _Stored:
    """A segment's bytes, and what is known of them beforehand; ``info`` only if it is sealed."""

    name: str
    first_batch: int
    data: SegmentData
    index: bytes
    info: SegmentInfo | None = None


class LogVerification:
    """One look through a log; counts what it has seen."""

    def __init__(self, directory: Path, *, hot_only: bool = False) -> None:
        self._directory = directory
        self._hot_only = hot_only
        self._high: Cursor | None = None
        self.segments = self.batches = self.rows = self.bytes = self.left_out = 0
        self.bytes_total = self._size()

    def run(self, progress: Callable[[int], None] = lambda _bytes: None) -> Iterator[Damage]:
        """All damages, in the log's order; ``progress`` is called with the bytes read so far."""
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(self._directory)
            if manifest is None and list_segments(self._directory):
                yield Damage(MANIFEST, "it is missing; the next open rebuilds it")
        except CorruptionError as error:
            yield Damage(MANIFEST, str(error))
        try:
            read_durable(self._directory)
        except CorruptionError as error:
            yield Damage(DURABLE, str(error))
        for stored in self._stored(manifest):
            if isinstance(stored, Damage):
                yield stored
                continue
            with closing(stored.data):
                try:
                    yield from self._segment(stored, progress)
                except (OSError, pa.ArrowException, WalbrookError) as error:
                    yield Damage(stored.name + DATA, f"it cannot be read further: {error}")

    def summary(self) -> str:
        """What was looked at, in a line."""
        left_out = f", {self.left_out} cold segments left out" if self.left_out else ""
        return (
            f"{self.segments} segments, {self.batches} batches, {self.rows} rows, "
            f"{self.bytes} bytes verified{left_out}"
        )

    def _size(self) -> int:
        try:
            manifest = read_manifest(self._directory)
        except CorruptionError:
            manifest = None
        sealed = manifest.segments if manifest else ()
        bare = [manifest.active_name] if manifest else list_segments(self._directory)
        paths = [data_path(self._directory, name) for name in bare]
        return sum(info.bytes for info in sealed if not (info.place and self._hot_only)) + sum(
            path.stat().st_size for path in paths if path.exists()
        )

    def _now(self, name: str) -> SegmentInfo | None:
        """What the manifest says of a sealed segment at this moment."""
        manifest = read_manifest(self._directory) or Manifest()
        return next((info for info in manifest.segments if info.name == name), None)

    def _stored(self, manifest: Manifest | None) -> Iterator[_Stored | Damage]:
        if manifest is None:
            for name in list_segments(self._directory):
                yield from self._found(name, (parse_name(name + DATA) or (0,))[0])
            return
        following: SegmentInfo | None = None
        for info in manifest.segments:
            if following is not None and info.first_batch != following.next_batch:
                yield Damage(
                    MANIFEST, f"batch {info.first_batch} comes where {following.next_batch} belongs"
                )
            following = info
            if info.place and self._hot_only:
                self.left_out += 1
                self._high = info.high
                continue
            stored = self._load(info)
            if stored is not None:
                yield stored
        yield from self._found(manifest.active_name, manifest.next_batch)

    def _load(self, info: SegmentInfo) -> _Stored | Damage | None:
        """A sealed segment from where it lies now; None if it was removed meanwhile."""
        try:
            index = read_index(self._directory, info)
            data = open_data(self._directory, info.name, info.place)
        except FileNotFoundError as error:
            current = self._now(info.name)
            if current is None:
                return None
            if current.place != info.place:
                return self._load(current)
            return Damage(
                info.name, f"a file is missing: {error}", None, info.first_batch, _bounds(info)
            )
        except (OSError, pa.ArrowException, WalbrookError) as error:
            return Damage(
                info.name, f"it cannot be read: {error}", None, info.first_batch, _bounds(info)
            )
        return _Stored(info.name, info.first_batch, data, index, info)

    def _found(self, name: str, first_batch: int) -> Iterator[_Stored]:
        """A segment of the log's directory that is not sealed: as far as its index goes."""
        try:
            # The index first: frames are written before their entries.
            index = index_path(self._directory, name).read_bytes()
            data = open_data(self._directory, name, "")
        except FileNotFoundError:
            # Nothing was appended yet, or it was sealed, moved or removed meanwhile.
            return
        yield _Stored(name, first_batch, data, index)

    def _segment(self, stored: _Stored, progress: Callable[[int], None]) -> Iterator[Damage]:
        self.segments += 1
        rows = self.rows
        entries, damages = _entries(stored)
        yield from damages
        for position, entry in enumerate(entries):
            batch = stored.first_batch + position
            try:
                for what in self._frame(stored, batch, entry):
                    yield _at(stored, batch, entry, what)
            except _CutOffError:
                missing = len(entries) - position
                yield _at(stored, batch, entry, f"the file ends here; batches missing: {missing}")
                return
            self.batches += 1
            self.bytes += max(0, entry[2])
            progress(self.bytes)
        info = stored.info
        if info and entries and not damages:
            found = (self.rows - rows, Cursor(*entries[0][4:6]), Cursor(*entries[-1][6:8]))
            if found != (info.rows, info.first, info.high):
                yield Damage(MANIFEST, f"rows or bounds of {info.name} are not its batches'")

    def _frame(self, stored: _Stored, batch: int, entry: Entry) -> Iterator[str]:
        offset, size, rows = entry[1:4]
        if entry[0] != batch or offset < 0 or size <= 0:
            yield "its index entry makes no sense, so it cannot be found"
            return
        data = stored.data.read(offset, size)
        if data.size < size:
            raise _CutOffError
        self.rows += rows
        try:
            frame = read_frame(data, 0, where=stored.name)
        except CorruptionError:
            yield "the frame does not match its checksum"
            return
        except (WalbrookError, pa.ArrowException, KeyError, StopIteration) as error:
            yield f"the frame is whole but cannot be read: {error}"
            return
        if index_entry(frame.marker, offset) != entry:
            yield "the frame's header and its index entry differ"
        yield from _row_problems(frame)
        if self._high is not None and frame.marker.first < self._high:
            yield f"it starts below {self._high}, where the batch before it ends"
        self._high = frame.marker.high


class _CutOffError(Exception):
    """A file ends before its index says."""


def _entries(stored: _Stored) -> tuple[Sequence[Entry], list[Damage]]:
    """The entries to go by; where the index is damaged, those that the frames themselves give."""
    entries: list[Entry] = parse_index(stored.index).tolist()
    info = stored.info
    if info is None:
        return entries, []
    if index_matches(info, stored.index):
        return entries, []
    data = stored.data.read(0, info.bytes)
    found = scan(data, stored.first_batch, batches=info.batches).entries
    missing = [(info.first_batch + at, -1, 0, 0, 0, 0, 0, 0) for at in range(info.batches)]
    # Behind a damaged frame only the damaged index can say where the next one starts.
    entries = [*found, *entries[len(found) :]]
    entries += missing[len(entries) :]
    what = "the index does not match its checksum"
    return entries, [Damage(stored.name + INDEX, what, None, info.first_batch, _bounds(info))]


def _row_problems(frame: Frame) -> Iterator[str]:
    if frame.raw.num_rows != frame.marker.rows:
        yield f"it has {frame.raw.num_rows} rows, and {frame.marker.rows} by its header"
    lsn, idx = cursor_columns(frame.raw)
    below = ~at_or_above(lsn, idx, frame.marker.first)
    above = at_or_above(lsn, idx, frame.marker.high)
    outside = int(np.count_nonzero(below | above))
    if outside:
        yield f"{outside} of its rows are outside its bounds"


def _at(stored: _Stored, batch: int, entry: Entry, what: str) -> Damage:
    bounds = (Cursor(*entry[4:6]), Cursor(*entry[6:8])) if any(entry[4:]) else None
    return Damage(stored.name + DATA, what, entry[1] if entry[1] >= 0 else None, batch, bounds)


def _bounds(info: SegmentInfo) -> tuple[Cursor, Cursor]:
    return info.first, info.high
