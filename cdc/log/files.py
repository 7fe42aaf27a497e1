"""Putting files on disk so that they stay there, on a disk that may be full.

What must always hold: a file takes its name only whole and synced; a directory that was made is
found again after a power cut, because its parent was synced as well. A small spare file is given
up when there is no block left to say what was removed.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

TEMPORARY, DAMAGED = ".tmp", ".damaged"
_SPARE = "spare"
_SPARE_BYTES_MIN = 64 << 10


def write_synced(path: Path, data: bytes | pa.Buffer) -> None:
    """Put a whole file on disk beside ``path``, then let it take its place."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        # What is there of it takes room that somebody may be waiting for.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(directory: Path) -> None:
    """Make a directory and those above it; each one's name is synced."""
    directory = directory.absolute()
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_directory(one.parent)


def keep_aside(path: Path) -> Path:
    """Another name for a damaged file, for a person to look at; only the last one is kept."""
    aside = path.with_name(path.name + DAMAGED)
    for earlier in path.parent.glob(f"*{DAMAGED}"):
        earlier.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        # A filesystem without hard links.
        write_synced(aside, path.read_bytes())
    return aside


def keep_spare(directory: Path, needed: int) -> None:
    """See that twice the ``needed`` bytes are set aside, if there is room for them."""
    path, size = directory / _SPARE, max(2 * needed, _SPARE_BYTES_MIN)
    try:
        if path.stat().st_size >= size:
            return
    except FileNotFoundError:
        pass
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)
    except OSError:
        # It is tried again; what there is of it already is worth keeping.
        pass


def give_up_spare(directory: Path, error: OSError) -> bool:
    """Whether there was a spare, and so a full disk has a little room now."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return False
    try:
        (directory / _SPARE).unlink()
    except OSError:
        return False
    return True
