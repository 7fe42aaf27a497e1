"""What opening a log for writing does, before anything is appended.

Invariants: a sealed segment is never cut: it is whole, or it is reported. The active
one is cut behind its last whole frame, unless more of it was synced: then it is reported, or left
as it is for ``LogWriter.heal``. If readers could have seen what was cut, the history goes up in the
same manifest swap; if it was more than a torn tail, the file is kept under another name. Unless the
log was closed well, what is left of the active segment is written afresh, because what an earlier
process failed to sync may be only in memory. Files that no manifest names are removed.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import structlog

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, TransientError
from cdc.log.files import FILE_MODE, TEMPORARY, keep_damaged, sync_directory, write_synced
from cdc.log.frame import LOST_FIX, find_whole
from cdc.log.manifest import (
    Manifest,
    SegmentInfo,
    new_history,
    read_manifest,
    segment_name,
    swap_manifest,
)
from cdc.log.recovery.active_scan import ActiveScan, find_active
from cdc.log.recovery.damage_scan import mend_index
from cdc.log.recovery.floors import keep_floors, new_log_id, read_floors
from cdc.log.recovery.owned_manifest import fenced
from cdc.log.recovery.rebuild import rebuild
from cdc.log.recovery.segment_check import examine
from cdc.log.segment import Scan, data_path, index_path, info_of, parse_name
from cdc.log.sync import read_durable

_logger = structlog.get_logger("walbrook.log")


@dataclass(frozen=True)
class Recovered:
    """The log as it stands from now on."""

    manifest: Manifest
    active: Scan | None = None  # what the active segment holds, if anything
    lost: Cursor | None = None  # up to where the log was on disk, if it now ends before
    kept: str | None = None  # which damaged file was kept, and why


def take_lock(directory: Path, timeout_s: float) -> int:
    """Take the writer's lock; an earlier process may need a moment to die."""
    handle = os.open(directory / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(handle)
                raise TransientError(
                    f"another process writes the log in {directory}",
                    fix="stop the other service, or give this one a log.directory of its own",
                ) from None
            time.sleep(0.05)


def recover(directory: Path, term: int, place: str | None, *, to_heal: bool) -> Recovered:
    """Bring the log into the state in which it can be written.

    With ``to_heal`` damage in what was on disk is left for ``LogWriter.heal`` to decide about.
    """
    manifest, floors, made_anew = read_manifest(directory), read_floors(directory), False
    if manifest is None:
        if floors is not None and floors.term > term:
            raise fenced(directory, floors.term, term)
        manifest = rebuild(directory, place, floors)
        made_anew = manifest is not None
    if manifest is None:
        manifest = Manifest(term=term, history=new_history())
        if floors is not None:
            manifest = replace(manifest, earliest=floors.earliest, evicted=floors.evicted)
    if manifest.term > term:
        raise fenced(directory, manifest.term, term)
    if not manifest.log_id:
        manifest = replace(manifest, log_id=floors.log_id if floors else new_log_id())
    for segment in manifest.segments:
        if not segment.place:
            found = examine(directory, segment, None)
            if found.whole and not found.index_stored:
                mend_index(directory, found)
            elif not to_heal:
                found.require_whole()
    recovered = _recover_active(directory, manifest, term, made_anew, to_heal=to_heal)
    keep_floors(directory, recovered.manifest)
    swap_manifest(directory, recovered.manifest)
    sync_directory(directory)
    remove_orphans(directory, recovered.manifest)
    return recovered


def ended_early(directory: Path, durable: Cursor, end: Cursor) -> CorruptionError:
    return CorruptionError(
        f"the log in {directory} was on disk up to {durable}, and reads back only up to {end}",
        fix=LOST_FIX,
        kind="log_damaged",
    )


def remove_orphans(directory: Path, manifest: Manifest) -> None:
    """Remove segments that the manifest does not name, and what was never finished."""
    known = {segment.name for segment in manifest.segments if not segment.place}
    known.add(manifest.active_name)
    for file_name in sorted(os.listdir(directory)):
        segment = parse_name(file_name)
        orphan = segment is not None and segment_name(*segment) not in known
        if orphan or file_name.endswith(TEMPORARY):
            (directory / file_name).unlink(missing_ok=True)


def _recover_active(
    directory: Path, manifest: Manifest, term: int, made_anew: bool, *, to_heal: bool
) -> Recovered:
    found = find_active(directory, manifest)
    durable = _durable(directory)
    if durable > found.end:
        if not to_heal:
            raise ended_early(directory, durable, found.end)
        return _left_to_heal(directory, manifest, term, made_anew, found, durable)
    hidden = find_whole(found.data, found.scan.end, found.next_batch) is not None
    cut = hidden or found.indexed > len(found.scan.entries)
    history = _history(manifest, made_anew, cut=cut)
    kept = None
    if hidden:
        kept = (
            f"{found.where}; whole batches stood behind it that were not synced: the file is kept "
            f"as {keep_damaged(found.data_path).name}"
        )
        _logger.warning("log.damaged", directory=str(directory), what=kept)
    kept_well = not manifest.boot and history == manifest.history and found.is_exact
    if found.scan.entries and not kept_well:
        fresh = segment_name(manifest.next_batch, manifest.term, history)
        _write(directory, fresh, found.data.slice(0, found.scan.end), found.scan.index)
    now = replace(manifest, term=term, history=history, boot=_boot())
    if term == manifest.term or not found.scan.entries:
        return Recovered(now, found.scan if found.scan.entries else None, kept=kept)
    sealed = _sealed(found.scan, manifest, history)
    return Recovered(replace(now, segments=(*manifest.segments, sealed)), kept=kept)


def _left_to_heal(
    directory: Path,
    manifest: Manifest,
    term: int,
    made_anew: bool,
    found: ActiveScan,
    durable: Cursor,
) -> Recovered:
    """Seal the segment as its index describes it, damage and all; nothing of it is cut."""
    known = found.described(durable)
    history = _history(manifest, made_anew, cut=found.indexed > len(known.entries))
    segments = manifest.segments
    if known.entries:
        if manifest.boot or not found.is_exact:
            _write(directory, manifest.active_name, found.data, known.index)
        segments = (*segments, _sealed(known, manifest, manifest.history))
    elif found.data.size:
        # Nothing is known of what was in it: a segment of another name begins.
        keep_damaged(found.data_path)
        history = max(history, manifest.history + 1)
    now = replace(manifest, term=term, history=history, boot=_boot(), segments=segments)
    _logger.warning("log.damaged", directory=str(directory), what=found.where)
    return Recovered(now, lost=durable if durable > now.end else None)


def _sealed(found: Scan, manifest: Manifest, history: int) -> SegmentInfo:
    return info_of(found, manifest.next_batch, term=manifest.term, history=history, at=time.time())


def _write(directory: Path, name: str, data: pa.Buffer, index: bytes) -> None:
    """Afresh: syncing the old file again would say nothing of a sync that failed before."""
    write_synced(data_path(directory, name), data)
    write_synced(index_path(directory, name), index)
    sync_directory(directory)


def _history(manifest: Manifest, made_anew: bool, *, cut: bool) -> int:
    if made_anew:
        return max(manifest.history + 1, new_history())
    # After a crash of the machine it is unknown what readers had seen beyond the last sync.
    crashed = manifest.boot not in ("", _boot())
    return manifest.history + (cut or crashed)


def _durable(directory: Path) -> Cursor:
    try:
        return read_durable(directory)
    except CorruptionError:
        return ORIGIN  # it only says that more was there; it is written again


def _boot() -> str:
    """The machine's current boot; where it is unknown, one that equals no other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(uuid.uuid4())
