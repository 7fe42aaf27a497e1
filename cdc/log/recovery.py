"""What opening a log for writing does, before anything is appended.

What must always hold: a sealed segment is never cut: it is whole, or it is reported. The active
one is cut behind its last whole frame; if readers could have seen what was cut, the history goes
up in the same manifest swap. Unless the log was closed well, what is left of the active segment is
written afresh, because what an earlier process failed to sync may be only in memory. Files that no
manifest names are removed.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, OperatorError, TransientError
from cdc.log.manifest import (
    Manifest,
    SegmentInfo,
    new_history,
    read_manifest,
    segment_name,
    swap_manifest,
    sync_directory,
    write_synced,
)
from cdc.log.rebuild import rebuild
from cdc.log.segment import (
    ENTRY_BYTES,
    TEMPORARY,
    Scan,
    data_path,
    index_length,
    index_path,
    info_of,
    map_file,
    parse_name,
    scan,
)
from cdc.log.sync import read_durable


def take_lock(directory: Path, timeout_s: float) -> int:
    """Take the writer's lock; an earlier process may need a moment to die."""
    handle = os.open(directory / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
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


def recover(
    directory: Path, term: int, place: str | None, *, to_heal: bool
) -> tuple[Manifest, Scan | None]:
    """The log as it stands from now on, and what its active segment holds, if anything.

    With ``to_heal`` a damaged sealed segment is left for ``LogWriter.heal`` to find.
    """
    manifest, made_anew = read_manifest(directory), False
    if manifest is None:
        manifest = rebuild(directory, place)
        made_anew = manifest is not None
    if manifest is None:
        manifest = Manifest(term=term, history=new_history())
    if manifest.term > term:
        raise fenced(directory, manifest.term, term)
    for segment in manifest.segments:
        if not segment.place:
            with suppress(CorruptionError) if to_heal else nullcontext():
                check_sealed(directory, segment)
    manifest, active = _recover_active(directory, manifest, term, made_anew)
    swap_manifest(directory, manifest)
    sync_directory(directory)
    remove_orphans(directory, manifest)
    return manifest, active


def fenced(directory: Path, other: int, own: int) -> OperatorError:
    return OperatorError(
        f"the log in {directory} is written by term {other}; this is term {own}",
        fix="stop this service: a newer one has taken over",
        kind="fenced",
    )


def check_sealed(directory: Path, segment: SegmentInfo) -> bool:
    """Compare a sealed segment's files with what is known of it; make its index anew if it must.

    Says whether it had to.
    """
    path = data_path(directory, segment.name)
    size = path.stat().st_size if path.exists() else 0
    if size >= segment.bytes and _index_matches(directory, segment):
        return False
    found = scan(map_file(path), segment.first_batch, batches=segment.batches) if size else None
    if found is None or xxhash.xxh3_64_intdigest(found.index) != segment.index_xxh3:
        whole = 0 if found is None else found.end
        raise CorruptionError(
            f"the sealed segment {path} is damaged at byte {whole} of {segment.bytes}",
            fix="restore it from a copy, or remove the source's log directory to read "
            "again from the slot, which still holds everything above the restart cursor",
            kind="log_damaged",
        )
    write_synced(index_path(directory, segment.name), found.index)
    return True


def remove_orphans(directory: Path, manifest: Manifest) -> None:
    """Remove segments that the manifest does not name, and what was never finished."""
    known = {segment.name for segment in manifest.segments if not segment.place}
    known.add(manifest.active_name)
    for file_name in sorted(os.listdir(directory)):
        segment = parse_name(file_name)
        orphan = segment is not None and segment_name(*segment) not in known
        if orphan or file_name.endswith(TEMPORARY):
            (directory / file_name).unlink(missing_ok=True)


def _index_matches(directory: Path, segment: SegmentInfo) -> bool:
    try:
        with index_path(directory, segment.name).open("rb") as file:
            data = file.read(segment.batches * ENTRY_BYTES)
    except FileNotFoundError:
        return False
    return xxhash.xxh3_64_intdigest(data) == segment.index_xxh3


def _recover_active(
    directory: Path, manifest: Manifest, term: int, made_anew: bool
) -> tuple[Manifest, Scan | None]:
    name, first_batch = manifest.active_name, manifest.next_batch
    data, index = data_path(directory, name), index_path(directory, name)
    found = scan(map_file(data), first_batch) if data.exists() else Scan([], 0, 0, (0, 0))
    end = found.high if found.entries else manifest.end
    boot = _boot()
    cut = index_length(index) > len(found.entries) or _durable(directory) > end
    # After a crash of the machine nobody knows what readers had seen beyond the last sync.
    crashed = manifest.boot not in ("", boot)
    history = manifest.history
    if made_anew:
        history = max(history + 1, new_history())
    elif cut or crashed:
        history += 1
    kept_well = not manifest.boot and history == manifest.history and _is(data, index, found)
    if found.entries and not kept_well:
        fresh = segment_name(first_batch, manifest.term, history)
        write_synced(data_path(directory, fresh), map_file(data).slice(0, found.end))
        write_synced(index_path(directory, fresh), found.index)
        sync_directory(directory)
    now = replace(manifest, term=term, history=history, boot=boot)
    if term == manifest.term or not found.entries:
        return now, found if found.entries else None
    sealed = info_of(found, first_batch, term=manifest.term, history=history, at=time.time())
    return replace(now, segments=(*manifest.segments, sealed)), None


def _is(data: Path, index: Path, found: Scan) -> bool:
    """Whether the files hold what was found, and nothing else."""
    return (
        data.exists()
        and index.exists()
        and data.stat().st_size == found.end
        and index.read_bytes() == found.index
    )


def _durable(directory: Path) -> Cursor:
    try:
        return read_durable(directory)
    except CorruptionError:
        return ORIGIN  # it only says that more was there; it is written again


def _boot() -> str:
    """The machine's current boot; where it cannot be told, one that equals no other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(uuid.uuid4())
