"""The one process that appends.

Invariants: frames follow each other without holes in ``batch_idx`` and never go back in
cursor; readers see a batch once its entry is written. The manifest is swapped before anything
relies on it and before any file it no longer names is removed, and only while no newer term has
written it. A failure leaves the log as it was, and the call can be made again; after a failed sync
it must be reopened (``needs_reopen``).

``append``, ``retain``, ``heal`` and ``restart_at`` are for one thread.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from cdc.cursor import Cursor
from cdc.decoding.annotations import AnnotationRun
from cdc.errors import OperatorError, ProtocolError, TransientError
from cdc.log.active import ActiveSegment
from cdc.log.files import make_private
from cdc.log.frame import Marker, encode_frame
from cdc.log.manifest import Manifest, SegmentInfo
from cdc.log.recovery.damage_scan import Findings, mend_index, require_refetchable
from cdc.log.recovery.inspection import Inspection
from cdc.log.recovery.owned_manifest import OwnedManifest, UnsureError
from cdc.log.recovery.recover import ended_early, recover, remove_orphans, take_lock
from cdc.log.recovery.segment_check import CheckedSegment
from cdc.log.retention import Retention as Retention
from cdc.log.retention import RetentionResult as RetentionResult
from cdc.log.retention import decide
from cdc.log.segment import data_path, index_path
from cdc.log.sync import Durability as Durability
from cdc.log.sync import Syncer
from cdc.log.tier.tier import TierSettings as TierSettings
from cdc.log.tier_mover import TierMover


@dataclass(frozen=True)
class SegmentLimits:
    """When the active segment is sealed: whichever comes first."""

    bytes: int = 64 << 20
    rows: int = 1_000_000
    age_s: float = 3600.0


_LIMITS = SegmentLimits()
_NEEDS_OPERATOR = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
}


class LogWriter:
    """Appends sealed batches; opening recovers what an earlier process left."""

    def __init__(
        self,
        directory: Path,
        *,
        term: int = 0,
        durability: Durability = "disk",
        limits: SegmentLimits = _LIMITS,
        tier: TierSettings | None = None,
        lock_timeout_s: float = 10.0,
        to_heal: bool = False,
        on_synced: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """With ``to_heal`` the caller calls ``heal`` before anything else.

        ``on_synced`` gets how long each sync took.
        """
        if tier is not None:
            tier.require_elsewhere(directory)
        self._directory = directory
        self._limits = limits
        self._tier = tier
        place = tier.place_of(directory) if tier else None
        with self._writing(), self._permitted():
            make_private(directory)
            self._lock = take_lock(directory, lock_timeout_s)
        self._active: ActiveSegment | None = None
        try:
            with self._writing():
                found = recover(directory, term, place, to_heal=to_heal)
                self._own = OwnedManifest(directory, found.manifest)
                self._lost, self._kept = found.lost, found.kept
                self._damaged: dict[str, CheckedSegment] = {}
                self._active = ActiveSegment(directory, found.manifest, found.active)
                self.end = self._active.high
                self.next_batch = found.manifest.next_batch + self._active.batches
                self._syncer = Syncer(
                    directory, durability, self.end, found.lost, on_synced=on_synced
                )
        except BaseException:
            if self._active is not None:
                self._active.close()
            os.close(self._lock)
            raise
        self._syncer.attach(*self._active.files)
        self._mover = TierMover(directory, place, found.manifest.log_id)

    @property
    def durable_end(self) -> Cursor:
        """Up to here everything is on disk, and can be found there."""
        return self._syncer.durable_end

    @property
    def needs_reopen(self) -> bool:
        """A sync failed: every append is refused until the log is reopened."""
        return self._syncer.failed

    @property
    def manifest(self) -> Manifest:
        return self._own.current

    @property
    def active(self) -> SegmentInfo:
        """What the active segment holds so far; without batches until its first is appended."""
        return self.manifest.begun if self._active is None else self._active.info()

    @property
    def size_bytes(self) -> int:
        """Bytes in all segments, wherever they lie, the active one included."""
        return self._own.bytes + self._active_bytes

    @property
    def damaged(self) -> tuple[CheckedSegment, ...]:
        """The segments that do not read back and were not cut, as long as they are there."""
        if self._damaged:
            names = {segment.name for segment in self._readable()}
            self._damaged = {name: one for name, one in self._damaged.items() if name in names}
        return tuple(self._damaged.values())

    @property
    def kept(self) -> str | None:
        """Which damaged file was kept when the log was opened, and why."""
        return self._kept

    @property
    def tier_problem(self) -> str | None:
        """Why segments do not move to the tier at the moment."""
        return self._mover.problem

    def append(
        self,
        raw: pa.RecordBatch,
        schemas: Mapping[int, bytes],
        *,
        first: Cursor,
        high: Cursor,
        annotations: Sequence[AnnotationRun] = (),
    ) -> Marker:
        """Write one batch and publish it to readers."""
        self._syncer.check()
        if self._lost is not None:
            raise ended_early(self._directory, self._lost, self.end)
        if not self.end <= first <= high:
            raise ProtocolError(
                f"a batch from {first} to {high} cannot follow the log's end {self.end}",
                fix="report this: the reader must skip what the log already holds",
            )
        marker, header, body = encode_frame(
            self.next_batch,
            raw,
            schemas,
            first=first,
            high=high,
            annotations=annotations,
            logged_us=time.time_ns() // 1000,
        )
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
            self._mover.check()
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
            self._own.keep_spare()
        return result

    def restart_at(self, cursor: Cursor) -> None:
        """Forget everything: the log is empty, begins and ends at ``cursor``, in a new history."""
        self._syncer.check()
        with self._writing():
            self._require_own_manifest()
            self._cut_to(
                replace(
                    self.manifest,
                    # Numbers that no reader can have seen need no new history.
                    history=self.manifest.history + bool(self.next_batch),
                    earliest=cursor,
                    start_batch=self.next_batch,
                    segments=(),
                )
            )

    def inspect(self, unsettled_from: Cursor, refetchable_from: Cursor) -> Inspection:
        """Begin to read back, in a thread, every frame that may hold an unsettled change."""
        self._syncer.flush()
        with self._writing():
            self._require_own_manifest()
            active = self._active
            path = index_path(self._directory, self.manifest.active_name)
            if active is not None and active.batches and not active.index_is_whole(path):
                # It is open under its old inode: once it is sealed, it can be rebuilt.
                self._seal()
            return Inspection(self._directory, self._readable(), unsettled_from, refetchable_from)

    def heal(
        self, found: Findings, unsettled_from: Cursor, refetchable_from: Cursor
    ) -> Cursor | None:
        """Mend indexes, and cut the log where the source can send again what is damaged.

        Damage that the source cannot send stays where it is: it concerns the consumers that stand
        before it. A log that ends before what was on disk is a CorruptionError, unless the source
        has the rest. Returns from where the source has to send, or None if nothing was cut.
        """
        with self._writing():
            self._require_own_manifest()
            for one in found.to_mend:
                # A segment that was removed or moved since would get an index that is never read.
                if one.segment in self.manifest.segments:
                    mend_index(self._directory, one)
            cut = found.refetchable(unsettled_from, refetchable_from)
            left = [*found.settled, *(one for one in found.damaged if one is not cut)]
            self._damaged = {one.segment.name: one for one in left}
            kept = None if cut is None else self._before(cut)
            if kept is not None:
                return self._cut_damage(kept, unsettled_from)
            if self._lost is not None:
                again_from = max(self.end, unsettled_from)
                # The log of a source has a directory of the source's name.
                source = self._directory.name
                require_refetchable(source, self.end, again_from, refetchable_from)
                return self._cut_damage(self._readable(), unsettled_from)
            return None

    @property
    def ended_early(self) -> bool:
        """More was on disk than is left: nothing can be appended before ``heal``."""
        return self._lost is not None

    def _readable(self) -> tuple[SegmentInfo, ...]:
        active = self._active
        if active is None or not active.batches:
            return self.manifest.segments
        return (*self.manifest.segments, active.info(time.time()))

    def _before(self, damage: CheckedSegment) -> tuple[SegmentInfo, ...] | None:
        """The segments up to the damage, wherever they lie by now; None if it is gone."""
        segments = self._readable()
        for at, segment in enumerate(segments):
            if segment.name == damage.segment.name:
                kept = damage.kept
                end = [] if kept is None else [replace(kept, place=segment.place)]
                return (*segments[:at], *end)
        return None

    def close(self) -> None:
        """Sync and let go; what was appended stays readable."""
        if self._lock < 0:
            return
        try:
            with self._writing():
                if not self._syncer.failed:
                    self._syncer.flush()
                    if self._own.is_own:
                        self._swap(replace(self.manifest, boot=""))
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
        self._active = ActiveSegment(self._directory, self.manifest)
        self._syncer.attach(*self._active.files)
        return self._active

    def _seal(self) -> None:
        """Put the active segment into the manifest; the next one is begun by the next append."""
        active = self._active
        if active is None or not active.batches:
            return
        self._syncer.flush()
        sealed = active.info(time.time())
        self._swap(replace(self.manifest, segments=(*self.manifest.segments, sealed)))
        self._let_go()

    def _let_go(self) -> None:
        self._syncer.attach()
        if self._active is not None:
            self._active.close()
            self._active = None

    def _cut_damage(self, kept: tuple[SegmentInfo, ...], unsettled_from: Cursor) -> Cursor:
        end = kept[-1].high if kept else self.manifest.earliest
        again_from = max(end, unsettled_from)
        if again_from > end:
            # The settled changes between would be a hole, so the settled past goes as well.
            self.restart_at(again_from)
            return again_from
        self._cut_to(
            replace(
                self.manifest,
                history=self.manifest.history + 1,
                start_batch=self.manifest.first_batch,
                segments=kept,
            )
        )
        return again_from

    def _cut_to(self, manifest: Manifest) -> None:
        """Swap to a shorter log: files of the new history, which no reader has seen."""
        gone = self._cold_beyond(manifest)
        self._syncer.lower(manifest.end)
        self._swap(manifest)
        self._let_go()
        self._lost = None
        self.next_batch, self.end = manifest.next_batch, manifest.end
        self._syncer.restart(self.end)
        remove_orphans(self._directory, manifest)
        self._mover.remove(gone)

    def _cold_beyond(self, manifest: Manifest) -> list[SegmentInfo]:
        kept = {segment.name for segment in manifest.segments}
        return [one for one in self.manifest.segments if one.place and one.name not in kept]

    def _decide(self, settled: Cursor, retention: Retention) -> RetentionResult:
        return decide(self.manifest.segments, self._active_bytes, settled, time.time(), retention)

    def _drop(self, result: RetentionResult) -> None:
        count = result.removed + result.evicted
        if not count:
            return
        gone, kept = self.manifest.segments[:count], self.manifest.segments[count:]
        floor = gone[-1].high
        self._swap(
            replace(
                self.manifest,
                earliest=floor,
                evicted=floor if result.evicted else self.manifest.evicted,
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
        if asked not in self.manifest.segments:
            self._mover.done()
            self._mover.remove([copy])
            return
        segments = tuple(copy if one == asked else one for one in self.manifest.segments)
        self._swap(replace(self.manifest, segments=segments))
        self._mover.done()
        self._unlink([asked])

    def _move_next(self) -> None:
        """Ask for a copy of the oldest segment here, while those here are too many."""
        if self._tier is None or not self._mover.idle:
            return
        hot = [segment for segment in self.manifest.segments if not segment.place]
        movable = self._mover.movable(hot)
        if movable is not None and sum(one.bytes for one in hot) > self._tier.hot_bytes:
            self._mover.copy(movable)

    def _unlink(self, segments: Iterable[SegmentInfo]) -> None:
        for segment in segments:
            for path in (index_path, data_path):
                # The next open removes what cannot be removed now.
                with suppress(OSError):
                    path(self._directory, segment.name).unlink(missing_ok=True)

    def _swap(self, manifest: Manifest) -> None:
        with self._sure():
            self._own.swap(manifest)

    def _require_own_manifest(self) -> None:
        """Refuse to go on once a newer term has written the manifest."""
        with self._sure():
            self._own.require()

    @contextmanager
    def _sure(self) -> Iterator[None]:
        try:
            yield
        except UnsureError as error:
            self._syncer.fail(error)
            self._syncer.check()

    @contextmanager
    def _permitted(self) -> Iterator[None]:
        """Waiting does not mend a directory that may not be made or written."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NEEDS_OPERATOR:
                raise
            raise OperatorError(
                f"the log directory {self._directory} cannot be used: {error.strerror}",
                fix="let the account of the service make and write it, or set log.directory to "
                "another place",
                kind="log_directory",
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """An error of the disk passes by itself, or lasts until there is room again."""
        try:
            yield
        except OSError as error:
            raise TransientError(
                f"the log in {self._directory} cannot be written: {error.strerror or error}",
                fix="free space on that disk; reading goes on by itself",
                kind="log_unwritable",
            ) from error
