"""Reading the log: any number of processes, none of which the writer knows.

A view searches the manifest and then the one index it needs, maps segments or reads ranges of
them, and checks each frame against its checksum and against the index. It never writes and holds
no lock. Invariants: a view stays within one history; batches of another are never
handed out under the same numbers. A segment that was trimmed away while mapped stays readable
until it is let go. A view is for one thread.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.errors import CorruptionError, GapError
from cdc.log.files import make_directory
from cdc.log.frame import Frame, Marker, open_frame, read_marker
from cdc.log.inotify import DirectoryWatch
from cdc.log.manifest import Manifest, ManifestFile, SegmentInfo
from cdc.log.segment import (
    INDEX_DTYPE,
    Index,
    high_of,
    index_entry,
    index_length,
    index_path,
    read_entries,
)
from cdc.log.tail import LogTail
from cdc.log.tier.segment_reader import SealedIndexes, SegmentData, open_data

_EMPTY = np.empty(0, dtype=INDEX_DTYPE)
# How often the log may change under one look.
_LOOKS_MAX = 20
_Found = TypeVar("_Found")


class LogReader(Protocol):
    """What reads a log, here or over the network. Batches are numbered; ranges are half-open."""

    def next_batch(self) -> int: ...

    def first_batch(self) -> int: ...

    def history(self) -> int: ...

    def floors(self) -> tuple[Cursor, Cursor]: ...

    def wait(self, beyond: int, timeout_s: float) -> int: ...

    def seek(self, cursor: Cursor) -> int: ...

    def entries(self, start: int, end: int) -> Index: ...

    def frames(self, start: int, end: int) -> Iterator[Frame]: ...

    def close(self) -> None: ...


class _NotListedError(Exception):
    """Neither the manifest nor the active index has it."""


class LogView:
    """What a reader in the same filesystem sees."""

    def __init__(self, directory: Path, *, history: int | None = None) -> None:
        """Read the given history only; without one (or 0: no log yet), the first that is found."""
        self._directory = directory
        self._history = history or 0
        self._file = ManifestFile(directory)
        self._indexes = SealedIndexes(directory)
        self._highs: tuple[Manifest | None, list[Cursor]] = (None, [])
        self._waker: DirectoryWatch | None = None
        self._seen = 0  # what ``next_batch`` said last
        self._tail = LogTail(directory)
        self._recent: tuple[str, int, Index] = ("", 0, _EMPTY)  # of the active segment, read last

    def next_batch(self) -> int:
        """The number that the next batch will have: the end of what is readable."""
        while True:
            manifest = self._manifest()
            length = self._active_length(manifest)
            # An index that is empty or gone may have been sealed, and trimmed, meanwhile.
            if length or self._manifest().active_name == manifest.active_name:
                self._seen = manifest.next_batch + length
                return self._seen

    def first_batch(self) -> int:
        """The first batch that is still readable (or will be the first)."""
        return self._manifest().first_batch

    def history(self) -> int:
        """Within which batch numbers mean something; 0 while there is no log."""
        return self._manifest().history

    def floors(self) -> tuple[Cursor, Cursor]:
        """From where on the log is complete, and below where unsettled changes were evicted."""
        manifest = self._manifest()
        return manifest.earliest, manifest.evicted

    def wait(self, beyond: int, timeout_s: float) -> int:
        """``next_batch`` as soon as it exceeds ``beyond``, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        # The waker knows of whatever was written since the last look, so that none is needed.
        looks_first = self._waker is None or self._seen > beyond
        if self._waker is None:
            make_directory(self._directory)
            self._waker = DirectoryWatch(self._directory)
        end = self.next_batch() if looks_first else None
        while end is None or end <= beyond:
            remaining = deadline - time.monotonic()
            if remaining > 0:
                self._waker.wait(remaining)
            elif end is not None:
                break
            end = self.next_batch()
        return end

    def seek(self, cursor: Cursor) -> int:
        """The first batch that may hold a change at or above ``cursor``."""
        return self._looked_up(partial(self._seek, cursor), f"the batch of cursor {cursor} is")

    def entries(self, start: int, end: int) -> Index:
        """The index entries of the batches ``[start, end)``; all of them must be readable."""
        if (known := self._known(start, end)) is not None:
            return known
        parts: list[Index] = []
        at = start
        while at < end:
            found = partial(self._entries, at, end)
            _segment, part = self._looked_up(found, f"batches {start} to {end} are")
            parts.append(part)
            at += len(part)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else _EMPTY

    def stored(self, start: int, end: int) -> Iterator[pa.Buffer]:
        """The frames of ``[start, end)`` as they are stored, header and body, each checked."""
        for _marker, buffer in self._checked(start, end):
            yield buffer

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """The batches ``[start, end)`` in order, mapped, each checked."""
        for marker, buffer in self._checked(start, end):
            yield open_frame(buffer, 0, marker)

    def close(self) -> None:
        if self._waker is not None:
            self._waker.close()
            self._waker = None
        self._tail.close()

    def _manifest(self) -> Manifest:
        manifest = self._file.read()
        if self._history and manifest.history != self._history:
            raise GapError(
                f"the log at {self._directory} was cut or restarted: history {self._history} "
                f"ended, this is {manifest.history}",
                fix="start again from a cursor: batch numbers of one history mean nothing in "
                "another",
                kind="log_cut",
            )
        self._history = manifest.history
        return manifest

    def _checked(self, start: int, end: int) -> Iterator[tuple[Marker, pa.Buffer]]:
        self.entries(start, end)
        at = start + len(held := self._at_the_tail(start, end))
        yield from held
        while at < end:
            name, part, data = self._looked_up(
                partial(self._open, at, end), f"batches {start} to {end} are"
            )
            try:
                for entry in part:
                    yield self._frame(name, entry, data)
            finally:
                data.close()
            at += len(part)

    def _looked_up(self, look: Callable[[Manifest], _Found], what: str) -> _Found:
        """What ``look`` finds; a segment that was moved or trimmed meanwhile is looked up again."""
        manifest, missing = self._manifest(), ""
        for _ in range(_LOOKS_MAX):
            try:
                return look(manifest)
            except _NotListedError:
                missing = ""
            except FileNotFoundError as error:
                missing = str(error) or "it was not found"
            looked_in, manifest = manifest, self._manifest_anew()
            if manifest == looked_in:
                break
        if missing:
            raise self._damaged(f"{what} in the manifest, but a file is missing ({missing}): it")
        raise GapError(
            f"{what} not all in the log at {self._directory}",
            fix="start again from the restart cursor; if this was it, the log was removed "
            "while changes in it were still unsettled",
            kind="log_gap",
        )

    def _manifest_anew(self) -> Manifest:
        self._file.read_anew()
        return self._manifest()

    def _seek(self, cursor: Cursor, manifest: Manifest) -> int:
        if self._highs[0] is not manifest:
            self._highs = (manifest, [segment.high for segment in manifest.segments])
        position = bisect.bisect_right(self._highs[1], cursor)
        if position < len(manifest.segments):
            index = self._indexes.of(manifest.segments[position])
            first_batch = manifest.segments[position].first_batch
            within = range(len(index))
            return first_batch + bisect.bisect_right(
                within, cursor, key=lambda at: high_of(index[at])
            )
        path = str(index_path(self._directory, manifest.active_name))

        def high(at: int) -> Cursor:
            entry = read_entries(path, at, at + 1)
            if not len(entry):
                raise _NotListedError
            return high_of(entry[0])

        return manifest.next_batch + bisect.bisect_right(
            range(index_length(path)), cursor, key=high
        )

    def _entries(
        self, start: int, end: int, manifest: Manifest
    ) -> tuple[SegmentInfo | None, Index]:
        """The segment of batch ``start`` (None: the active one), and its entries up to ``end``."""
        segment: SegmentInfo | None = None
        if start >= manifest.next_batch:
            part = self._active_entries(start, end, manifest)
        else:
            position = bisect.bisect_right(
                manifest.segments, start, key=lambda segment: segment.first_batch
            )
            if not position:
                raise _NotListedError
            segment = manifest.segments[position - 1]
            part = self._indexes.of(segment)[
                start - segment.first_batch : end - segment.first_batch
            ]
        if not len(part):
            raise _NotListedError
        if not _follow(part, start):
            raise self._damaged(f"the index entries of batches {start} to {start + len(part)}")
        return segment, part

    def _active_entries(self, start: int, end: int, manifest: Manifest) -> Index:
        """A range is often asked for several times in a row; an entry never changes."""
        name, base = manifest.active_name, manifest.next_batch
        part = self._tail.entries(name, start - base, end - base)
        if part is None:
            part = read_entries(index_path(self._directory, name), start - base, end - base)
        if len(part) and _follow(part, start):
            self._recent = (name, start, part)
        return part

    def _active_length(self, manifest: Manifest) -> int:
        length = self._tail.length(manifest.active_name)
        if length is None:
            return index_length(index_path(self._directory, manifest.active_name))
        return length

    def _known(self, start: int, end: int) -> Index | None:
        """The entries of a range, if they were read last; None if not all of them were."""
        _name, first, known = self._recent
        if first <= start < end <= first + len(known):
            return known[start - first : end - first]
        return None

    def _at_the_tail(self, start: int, end: int) -> list[tuple[Marker, pa.Buffer]]:
        """All frames of a range that was looked at last, read at once; else none of them."""
        known = self._known(start, end)
        buffers = None if known is None else self._tail.frames(self._recent[0], known)
        if known is None or buffers is None:
            return []
        found = [_whole(entry, buffer) for entry, buffer in zip(known, buffers, strict=True)]
        return [] if None in found else [each for each in found if each is not None]

    def _open(self, start: int, end: int, manifest: Manifest) -> tuple[str, Index, SegmentData]:
        segment, part = self._entries(start, end, manifest)
        name = manifest.active_name if segment is None else segment.name
        place = "" if segment is None else segment.place
        return name, part, open_data(self._directory, name, place)

    def _frame(self, name: str, entry: np.void, data: SegmentData) -> tuple[Marker, pa.Buffer]:
        offset = int(entry["offset"])
        found = _whole(entry, data.read(offset, int(entry["bytes"])))
        if found is None:
            first = Cursor(int(entry["first_lsn"]), int(entry["first_idx"]))
            raise self._damaged(
                f"the frame at byte {offset} of {name}.seg (changes from {first} to "
                f"{high_of(entry)}) does not match its checksum or its index: it",
                high_of(entry),
            )
        return found

    def _damaged(self, what: str, behind: Cursor | None = None) -> CorruptionError:
        # In a log that was cut meanwhile this is not damage but another history.
        self._manifest_anew()
        return CorruptionError(
            f"{what} cannot be read as written",
            fix="the reader looks at it, and reads again what the source still has; else restore "
            "the segment from a copy"
            + ("" if behind is None else f", or go on without: walbrook.skip_to(…, '{behind}')"),
            kind="log_damaged",
        )


def _whole(entry: np.void, buffer: pa.Buffer) -> tuple[Marker, pa.Buffer] | None:
    """A frame with its marker; None if it is not what its entry says."""
    marker = read_marker(buffer, 0)
    if marker is None or index_entry(marker, int(entry["offset"])) != entry.item():
        return None
    return marker, buffer


def _follow(part: Index, start: int) -> bool:
    """Whether these are the entries of the batches from ``start`` on."""
    numbers = part["batch_idx"]
    if len(numbers) == 1:
        return int(numbers[0]) == start
    return bool((numbers == np.arange(start, start + len(part))).all())
