"""Moving sealed segments to the tier, in a thread.

Invariants: one copy at a time; the files in the log's directory stay until the writer,
in its own thread, has switched the manifest to the copy. Nothing is believed or removed in a folder
that belongs to another log. What fails is tried again with growing pauses and keeps nothing else
waiting; damaged segments are not moved but reported. Whatever lies in the log's folder of the tier
and is in no manifest (a copy interrupted before the switch, a removal that was) goes at the next
open.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from cdc.backoff import Backoff
from cdc.cursor import ORIGIN
from cdc.errors import OperatorError, WalbrookError
from cdc.log.damage_note import report_damage
from cdc.log.files import TEMPORARY
from cdc.log.manifest import Manifest, SegmentInfo, read_manifest, segment_name
from cdc.log.recovery.segment_check import examine, read_data
from cdc.log.segment import DATA, INDEX, parse_name
from cdc.log.tier.segment_reader import folder_at
from cdc.log.tier.tier import chunks_of

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 1.0, 60.0
_PATIENCE_S = 10.0  # how long closing waits for a filesystem that does not answer
_JOBS_MAX = 10_000  # removals beyond it are left to the next open


@dataclass
class _Job:
    """Something to be done in the tier; ``problem`` says why it was not, the last time."""

    run: Callable[[], None]
    due_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S))
    problem: str | None = None


class TierMover:
    """Copies and removes segments in the tier; the writer asks and collects."""

    def __init__(self, directory: Path, place: str | None, log_id: str) -> None:
        self._directory = directory
        self._place = place
        self._log_id = log_id
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._copying: SegmentInfo | None = None
        self._copied: SegmentInfo | None = None
        self._damaged: dict[SegmentInfo, str] = {}
        self._claimed = self._stopping = False
        self._thread: threading.Thread | None = None
        self._refusal: OperatorError | None = None
        if place is not None:
            self._ask(self._sweep)

    @property
    def idle(self) -> bool:
        """Whether another copy may be asked for."""
        return self._place is not None and self._copying is None

    @property
    def problem(self) -> str | None:
        """Why something is not done in the tier at the moment."""
        with self._changed:
            problems = [job.problem for job in self._jobs if job.problem is not None]
            return next(iter([*problems, *self._damaged.values()]), None)

    def check(self) -> None:
        """Raise what only a person can change: the folder is another log's."""
        if self._refusal is not None:
            raise self._refusal

    def movable(self, segments: Collection[SegmentInfo]) -> SegmentInfo | None:
        """The first that may be copied: damaged ones stay, for as long as they are the same."""
        with self._changed:
            if self._damaged:
                self._damaged = {
                    one: self._damaged[one] for one in segments if one in self._damaged
                }
            return next((one for one in segments if one not in self._damaged), None)

    def copy(self, segment: SegmentInfo) -> None:
        """Copy a segment to the tier; ``collect`` says when it is there."""
        self._copying = segment
        self._ask(partial(self._copy, segment))

    def collect(self) -> tuple[SegmentInfo, SegmentInfo] | None:
        """The segment whose copy is finished, as it was and as it is now, until it is ``done``."""
        with self._changed:
            if self._copied is None or self._copying is None:
                return None
            return self._copying, self._copied

    def done(self) -> None:
        """What was collected is in the manifest, or not wanted any more."""
        with self._changed:
            self._copying = self._copied = None

    def remove(self, segments: Iterable[SegmentInfo]) -> None:
        """Remove segments from the tier; no manifest may name them any more."""
        for segment in segments:
            if len(self._jobs) < _JOBS_MAX:
                self._ask(partial(self._remove, segment))

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _ask(self, run: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(_Job(run))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log-tier", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.run()
            except _StoppedError:
                return
            except (OSError, pa.ArrowException, WalbrookError) as error:
                if isinstance(error, OperatorError):
                    self._refusal = error
                with self._changed:
                    job.problem = f"the log's tier: {error}"
                    job.due_at = time.monotonic() + job.backoff.next_s()
                    self._jobs.rotate(-1)
            else:
                with self._changed:
                    self._jobs.popleft()

    def _next(self) -> _Job | None:
        """The first job that is due, now at the head; None once it is time to stop."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                for _ in range(len(self._jobs)):
                    if self._jobs[0].due_at <= now:
                        return self._jobs[0]
                    self._jobs.rotate(-1)
                soonest = min((job.due_at for job in self._jobs), default=None)
                self._changed.wait(None if soonest is None else max(0.0, soonest - now))
            return None

    def _copy(self, segment: SegmentInfo) -> None:
        assert self._place is not None
        found = examine(self._directory, segment, ORIGIN)
        if not found.whole:
            self._give_up(segment)
            return
        self._claim()
        folder = folder_at(self._place)
        data = read_data(self._directory, segment)
        if data.size != segment.bytes:
            self._give_up(segment)
            return
        folder.put(segment.name + DATA, self._stoppable(data))
        folder.put(segment.name + INDEX, self._stoppable(pa.py_buffer(found.index)))
        with self._changed:
            self._copied = replace(segment, place=self._place)

    def _give_up(self, segment: SegmentInfo) -> None:
        """Nothing was copied: the segment is damaged, or else it was removed meanwhile."""
        damaged = segment in self._manifest().segments
        with self._changed:
            self._copying = None
            if damaged:
                self._damaged[segment] = (
                    f"the sealed segment {segment.name} is damaged and was not moved to the tier"
                )
        if damaged:
            report_damage(self._directory)

    def _remove(self, segment: SegmentInfo) -> None:
        folder = folder_at(segment.place)
        for suffix in (INDEX, DATA):
            folder.delete(segment.name + suffix)

    def _sweep(self) -> None:
        assert self._place is not None
        self._claim()
        folder = folder_at(self._place)
        # Whatever way its place was written: what the manifest calls cold may lie here.
        names = {segment.name for segment in self._manifest().segments if segment.place}
        with self._changed:
            names |= {one.name for one in (self._copying,) if one is not None}
        for file_name in folder.names():
            segment = parse_name(file_name.removesuffix(TEMPORARY))
            if segment is None:
                continue
            if segment_name(*segment) not in names or file_name.endswith(TEMPORARY):
                folder.delete(file_name)

    def _claim(self) -> None:
        if self._claimed:
            return
        assert self._place is not None
        cold = (one for one in self._manifest().segments if one.place == self._place)
        known = next((one.name + DATA for one in cold), None)
        folder = folder_at(self._place)
        folder.claim(self._log_id, known)
        folder.keep_private()
        self._claimed, self._refusal = True, None

    def _manifest(self) -> Manifest:
        """As it is now, whatever the writer is about to do."""
        manifest = read_manifest(self._directory)
        if manifest is None:
            raise OSError("the log's manifest is missing")
        return manifest

    def _stoppable(self, buffer: pa.Buffer) -> Iterator[pa.Buffer]:
        for chunk in chunks_of(buffer):
            if self._stopping:
                raise _StoppedError
            yield chunk


class _StoppedError(Exception):
    """The log is being closed in the middle of a copy."""
