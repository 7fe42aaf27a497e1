"""Moving sealed segments to the tier, in a thread.

What must always hold: one copy at a time; the files in the log's directory stay until the writer,
in its own thread, has switched the manifest to the copy. A failure is kept in ``problem`` and tried
again with growing pauses. Whatever lies in the log's folder of the tier and is in no manifest (a
copy that was interrupted before the switch, a removal that was) goes at the next open.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import xxhash

from cdc.errors import CorruptionError, WalbrookError
from cdc.log.manifest import SegmentInfo, segment_name
from cdc.log.segment import (
    DATA,
    ENTRY_BYTES,
    INDEX,
    TEMPORARY,
    data_path,
    index_path,
    map_file,
    parse_name,
    scan,
)
from cdc.log.tier import Folder, chunks_of

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 1.0, 60.0
_PATIENCE_S = 10.0  # how long closing waits for a filesystem that does not answer


class Mover:
    """Copies and removes segments in the tier; the writer asks and collects."""

    def __init__(self, directory: Path, place: str | None, known: Iterable[SegmentInfo]) -> None:
        self._directory = directory
        self._place = place
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._folders: dict[str, Folder] = {}
        self._copying: SegmentInfo | None = None
        self._copied: SegmentInfo | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.problem: str | None = None
        if place is not None:
            names = {segment.name for segment in known if segment.place == place}
            self._ask(partial(self._sweep, place, names))

    @property
    def idle(self) -> bool:
        """Whether another copy may be asked for."""
        return self._place is not None and self._copying is None

    def copy(self, segment: SegmentInfo) -> None:
        """Copy a segment to the tier; ``collect`` says when it is there."""
        self._copying = segment
        self._ask(partial(self._copy, segment))

    def collect(self) -> tuple[SegmentInfo, SegmentInfo] | None:
        """The segment whose copy is finished, as it was and as it is now; each only once."""
        with self._changed:
            copied, self._copied = self._copied, None
        if copied is None or self._copying is None:
            return None
        asked, self._copying = self._copying, None
        return asked, copied

    def remove(self, segments: Iterable[SegmentInfo]) -> None:
        """Remove segments from the tier; nobody must find them in a manifest any more."""
        for segment in segments:
            self._ask(partial(self._remove, segment))

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _ask(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log-tier", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._jobs)
                if self._stopping:
                    return
                job = self._jobs[0]
            try:
                job()
            except _StoppedError:
                return
            except (OSError, pa.ArrowException, WalbrookError) as error:
                self.problem = f"the log's tier: {error}"
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, backoff_s)
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
            else:
                self.problem, backoff_s = None, _BACKOFF_FIRST_S
                with self._changed:
                    self._jobs.popleft()

    def _copy(self, segment: SegmentInfo) -> None:
        assert self._place is not None
        moved = replace(segment, place=self._place)
        try:
            data = map_file(data_path(self._directory, segment.name)).slice(0, segment.bytes)
            index = map_file(index_path(self._directory, segment.name))
        except FileNotFoundError:
            # It was removed meanwhile; the writer sees that it is not in the manifest any more.
            pass
        else:
            index = index.slice(0, segment.batches * ENTRY_BYTES)
            _check(segment, data, index)
            folder = self._folder(self._place)
            folder.put(segment.name + DATA, self._stoppable(data))
            folder.put(segment.name + INDEX, self._stoppable(index))
        with self._changed:
            self._copied = moved

    def _remove(self, segment: SegmentInfo) -> None:
        folder = self._folder(segment.place)
        for suffix in (INDEX, DATA):
            folder.delete(segment.name + suffix)

    def _sweep(self, place: str, names: set[str]) -> None:
        folder = self._folder(place)
        for file_name in folder.names():
            segment = parse_name(file_name.removesuffix(TEMPORARY))
            if segment is None:
                continue
            if segment_name(*segment) not in names or file_name.endswith(TEMPORARY):
                folder.delete(file_name)

    def _folder(self, place: str) -> Folder:
        if place not in self._folders:
            self._folders[place] = Folder(place)
        return self._folders[place]

    def _stoppable(self, buffer: pa.Buffer) -> Iterator[pa.Buffer]:
        for chunk in chunks_of(buffer):
            if self._stopping:
                raise _StoppedError
            yield chunk


class _StoppedError(Exception):
    """The log is being closed in the middle of a copy."""


def _check(segment: SegmentInfo, data: pa.Buffer, index: pa.Buffer) -> None:
    """What is damaged is not moved: here it may still be mended from its other half."""
    whole = scan(data, segment.first_batch, batches=segment.batches)
    if whole.end != segment.bytes or xxhash.xxh3_64_intdigest(index) != segment.index_xxh3:
        raise CorruptionError(
            f"the sealed segment {segment.name} is damaged and was not moved to the tier",
            fix="open the log again: an index is made anew, damaged data is reported",
        )
