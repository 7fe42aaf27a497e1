"""The one process that appends.

What must always hold: frames follow each other without holes in ``batch_idx`` and never go back in
cursor; readers see a batch once its entry is written. The manifest is swapped before anything
relies on it and before any file it no longer names is removed, and only while no newer term has
written it. A failure leaves the log as it was, and the call can be made again; after a failed sync
it must be opened anew (``needs_reopen``).

``append``, ``retain``, ``heal`` and ``restart_at`` are for one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from cdc.cursor import Cursor
from cdc.errors import CorruptionError, ProtocolError, TransientError
from cdc.log.active import ActiveSegment
from cdc.log.frame import Marker, encode_frame
from cdc.log.heal import find_damage
from cdc.log.manifest import (
    Manifest,
    SegmentInfo,
    read_manifest,
    stamp_of,
    swap_manifest,
    sync_directory,
)
from cdc.log.mover import Mover
from cdc.log.recovery import check_sealed, fenced, recover, remove_orphans, take_lock
from cdc.log.retention import Retention as Retention
from cdc.log.retention import RetentionResult as RetentionResult
from cdc.log.retention import decide
from cdc.log.segment import data_path, index_path
from cdc.log.sync import Durability as Durability
from cdc.log.sync import Syncer
from cdc.log.tier import Tier as Tier


@dataclass(frozen=True)
class SegmentLimits:
    """When the active segment is sealed: whichever comes first."""

    bytes: int = 64 << 20
    rows: int = 1_000_000
    age_s: float = 3600.0


_LIMITS = SegmentLimits()


class LogWriter:
    """Appends sealed batches; opening recovers what an earlier process left."""

    def __init__(
        self,
        directory: Path,
        *,
        term: int = 0,
        durability: Durability = "disk",
        limits: SegmentLimits = _LIMITS,
        tier: Tier | None = None,
        lock_timeout_s: float = 10.0,
        to_heal: bool = False,
    ) -> None:
        """With ``to_heal`` the caller calls ``heal`` before anything else."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._limits = limits
        self._tier = tier
        place = tier.place_of(directory) if tier else None
        self._lock = take_lock(directory, lock_timeout_s)
        self._active: ActiveSegment | None = None
        try:
            with self._writing():
                self._manifest, found = recover(directory, term, place, to_heal=to_heal)
                self._stamp = stamp_of(directory)
                self._active = ActiveSegment(directory, self._manifest, found)
                self.end = self._active.high
                self.next_batch = self._manifest.next_batch + self._active.batches
                self._syncer = Syncer(directory, durability, self.end)
        except BaseException:
            if self._active is not None:
                self._active.close()
            os.close(self._lock)
            raise
        self._syncer.attach(*self._active.files)
        self._mover = Mover(directory, place, self._manifest.segments)

    @property
    def durable_end(self) -> Cursor:
        """Up to here everything is on disk, and can be found there."""
        return self._syncer.durable_end

    @property
    def needs_reopen(self) -> bool:
        """A sync failed: every append is refused until the log is opened anew."""
        return self._syncer.failed

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def active(self) -> SegmentInfo:
        """What the active segment holds so far; without batches until its first is appended."""
        if self._active is not None:
            return self._active.info()
        manifest = self._manifest
        return SegmentInfo(
            first_batch=manifest.next_batch,
            batches=0,
            rows=0,
            bytes=0,
            first=manifest.end,
            high=manifest.end,
            commit_from_us=0,
            commit_to_us=0,
            sealed_at=0.0,
            term=manifest.term,
            history=manifest.history,
            index_xxh3=0,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes in all segments, wherever they lie, the active one included."""
        return sum(segment.bytes for segment in self._manifest.segments) + self._active_bytes

    @property
    def tier_problem(self) -> str | None:
        """Why segments do not move to the tier at the moment."""
        return self._mover.problem

    def append(
        self, raw: pa.RecordBatch, schemas: Mapping[int, bytes], *, first: Cursor, high: Cursor
    ) -> Marker:
        """Write one batch and publish it to readers."""
        self._syncer.check()
        if not self.end <= first <= high:
            raise ProtocolError(
                f"a batch from {first} to {high} cannot follow the log's end {self.end}",
                fix="report this: the reader must skip what the log already holds",
            )
        marker, header, body = encode_frame(self.next_batch, raw, schemas, first=first, high=high)
        with self._writing():
            self._require_own_manifest()
            if self._active is not None and self._due(self._active):
                self._seal()
            active = self._active or self._begin()
            active.write(marker, header, body, raw["commit_ts"])
        self.next_batch += 1
        self.end = high
        self._syncer.written(high, marker.frame_bytes)
        return marker

    def retain(self, settled: Cursor, retention: Retention) -> RetentionResult:
        """Let go of what need not be kept, and of what cannot be; move segments to the tier."""
        self._syncer.check()
        with self._writing():
            self._require_own_manifest()
            if self._active is not None and self._active.age_s() >= self._limits.age_s:
                self._seal()
            self._switch_moved()
            result = self._decide(settled, retention)
            may_go = self.end <= settled or retention.on_full == "evict"
            if result.full and may_go and self._active_bytes:
                # What fills the log is in the active segment, which never goes as such.
                self._seal()
                result = self._decide(settled, retention)
            self._drop(result)
            self._move_next()
        return result

    def restart_at(self, cursor: Cursor) -> None:
        """Forget everything: the log is empty, begins and ends at ``cursor``, in a new history."""
        self._syncer.check()
        with self._writing():
            self._require_own_manifest()
            self._cut_to(
                replace(
                    self._manifest,
                    history=self._manifest.history + 1,
                    earliest=cursor,
                    start_batch=self.next_batch,
                    segments=(),
                )
            )

    def heal(self, unsettled_from: Cursor, refetchable_from: Cursor) -> Cursor | None:
        """Check every frame that may hold an unsettled change; cut where one is damaged.

        What is cut must be had again from the source, or else it is a CorruptionError. Returns
        from where, or None if nothing was damaged.
        """
        self._syncer.flush()
        segments = self._manifest.segments
        if self._active is not None and self._active.batches:
            segments = (*segments, self._active.info(time.time()))
        with self._writing():
            damage = find_damage(self._directory, segments, unsettled_from)
            if damage is None:
                self._mend_indexes(segments)
                return None
            end = damage.kept[-1].high if damage.kept else self._manifest.earliest
            again_from = max(end, unsettled_from)
            if again_from < refetchable_from:
                raise CorruptionError(
                    f"{damage.where} is damaged: changes from {again_from} on are lost here, and "
                    f"the source has them only from {refetchable_from} on",
                    fix="restore the segment from a copy, or resynchronize the consumers",
                    kind="log_damaged",
                )
            if again_from > end:
                # The settled changes between would be a hole, so the settled past goes as well.
                self.restart_at(again_from)
                return again_from
            self._require_own_manifest()
            self._cut_to(
                replace(
                    self._manifest,
                    history=self._manifest.history + 1,
                    start_batch=self._manifest.first_batch,
                    segments=damage.kept,
                )
            )
        return again_from

    def close(self) -> None:
        """Sync and let go; what was appended stays readable."""
        if self._lock < 0:
            return
        try:
            with self._writing():
                if not self._syncer.failed:
                    self._syncer.flush()
                    if stamp_of(self._directory) == self._stamp:
                        self._swap(replace(self._manifest, boot=""))
        finally:
            self._mover.close()
            self._syncer.close()
            if self._active is not None:
                self._active.close()
                self._active = None
            os.close(self._lock)
            self._lock = -1

    @property
    def _active_bytes(self) -> int:
        return 0 if self._active is None else self._active.bytes

    def _due(self, active: ActiveSegment) -> bool:
        limits = self._limits
        return active.batches > 0 and (
            active.bytes >= limits.bytes
            or active.rows >= limits.rows
            or active.age_s() >= limits.age_s
        )

    def _begin(self) -> ActiveSegment:
        """Open the files of the segment that the manifest says comes next."""
        self._active = ActiveSegment(self._directory, self._manifest)
        self._syncer.attach(*self._active.files)
        return self._active

    def _seal(self) -> None:
        """Put the active segment into the manifest; the next one is begun by the next append."""
        active = self._active
        if active is None or not active.batches:
            return
        self._syncer.flush()
        sealed = active.info(time.time())
        self._swap(replace(self._manifest, segments=(*self._manifest.segments, sealed)))
        self._let_go()

    def _let_go(self) -> None:
        self._syncer.attach()
        if self._active is not None:
            self._active.close()
            self._active = None

    def _cut_to(self, manifest: Manifest) -> None:
        """Swap to a shorter log: files of the new history, which no reader has seen."""
        gone = self._cold_beyond(manifest)
        self._swap(manifest)
        self._let_go()
        self.next_batch, self.end = manifest.next_batch, manifest.end
        self._syncer.restart(self.end)
        remove_orphans(self._directory, manifest)
        self._mover.remove(gone)

    def _cold_beyond(self, manifest: Manifest) -> list[SegmentInfo]:
        kept = {segment.name for segment in manifest.segments}
        return [one for one in self._manifest.segments if one.place and one.name not in kept]

    def _mend_indexes(self, segments: Sequence[SegmentInfo]) -> None:
        """Make indexes anew that differ from their frames, which are whole."""
        for segment in segments:
            mended = not segment.place and check_sealed(self._directory, segment)
            if mended and segment.next_batch > self._manifest.next_batch:
                # The active index is open under its old inode: the new one ends here.
                self._seal()

    def _decide(self, settled: Cursor, retention: Retention) -> RetentionResult:
        return decide(self._manifest.segments, self._active_bytes, settled, time.time(), retention)

    def _drop(self, result: RetentionResult) -> None:
        count = result.removed + result.evicted
        if not count:
            return
        gone, kept = self._manifest.segments[:count], self._manifest.segments[count:]
        floor = gone[-1].high
        self._swap(
            replace(
                self._manifest,
                earliest=floor,
                evicted=floor if result.evicted else self._manifest.evicted,
                start_batch=gone[-1].next_batch,
                segments=kept,
            )
        )
        self._unlink(segment for segment in gone if not segment.place)
        self._mover.remove(segment for segment in gone if segment.place)

    def _switch_moved(self) -> None:
        """Let the manifest point to a finished copy; then the files here can go."""
        moved = self._mover.collect()
        if moved is None:
            return
        asked, copy = moved
        if asked not in self._manifest.segments:
            self._mover.remove([copy])
            return
        segments = tuple(copy if one == asked else one for one in self._manifest.segments)
        try:
            self._swap(replace(self._manifest, segments=segments))
        except OSError:
            self._mover.copy(asked)
            raise
        self._unlink([asked])

    def _move_next(self) -> None:
        """Ask for a copy of the oldest segment here, while those here are too many."""
        if self._tier is None or not self._mover.idle:
            return
        hot = [segment for segment in self._manifest.segments if not segment.place]
        if hot and sum(segment.bytes for segment in hot) > self._tier.hot_bytes:
            self._mover.copy(hot[0])

    def _unlink(self, segments: Iterable[SegmentInfo]) -> None:
        for segment in segments:
            for path in (index_path, data_path):
                # The next open removes what cannot be removed now.
                with suppress(OSError):
                    path(self._directory, segment.name).unlink(missing_ok=True)

    def _swap(self, manifest: Manifest) -> None:
        self._require_own_manifest()
        self._put(manifest)

    def _require_own_manifest(self) -> None:
        """Refuse to go on once a newer term has written the manifest."""
        if stamp_of(self._directory) == self._stamp:
            return
        try:
            found = read_manifest(self._directory)
        except CorruptionError:
            found = None
        if found is not None and found.term >= self._manifest.term:
            raise fenced(self._directory, found.term, self._manifest.term)
        # Removed, or written by an older term that woke between its check and its swap.
        self._put(self._manifest)

    def _put(self, manifest: Manifest) -> None:
        swap_manifest(self._directory, manifest)
        self._manifest = manifest
        try:
            self._stamp = stamp_of(self._directory)
            sync_directory(self._directory)
        except OSError as error:
            # It has taken its place, but nobody can say whether it keeps it.
            self._syncer.fail(error)
            self._syncer.check()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """An error of the disk passes by itself, or waits for somebody to make room."""
        try:
            yield
        except OSError as error:
            raise TransientError(
                f"the log in {self._directory} cannot be written: {error.strerror or error}",
                fix="free space on that disk; reading goes on by itself",
            ) from error
