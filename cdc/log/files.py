"""Putting files on disk so that they stay there, on a disk that may be full.

Invariants: a file takes its name only whole and synced. A directory that was made is found again
after a power cut, because its parent was synced as well. Row values are in these files, so only the
service's own account may open, read or lock them: directories are 0700, files 0600. A small spare
file is given up when there is no block left to say what was removed.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from cdc.errors import OperatorError

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
TEMPORARY, DAMAGED = ".tmp", ".damaged"
_SPARE = "spare"
_SPARE_BYTES_MIN = 64 << 10


def private(path: str | Path, flags: int) -> int:
    """An ``opener`` for ``open``: a new file is for the service's own account alone."""
    return os.open(path, flags, FILE_MODE)


def write_synced(path: Path, data: bytes | pa.Buffer) -> None:
    """Put a whole file on disk beside ``path``, then let it take its place."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb", opener=private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        # What is there of it takes room that a writer may be waiting for.
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
        one.mkdir(exist_ok=True, mode=DIRECTORY_MODE)
        sync_directory(one.parent)


def make_private(directory: Path) -> None:
    """Make a directory, or take away what other accounts may do with one and the files in it."""
    make_directory(directory)
    try:
        _narrow(directory, directory.stat().st_mode, DIRECTORY_MODE)
        with os.scandir(directory) as found:
            for entry in found:
                with suppress(FileNotFoundError):  # it was temporary
                    if entry.is_file(follow_symlinks=False):
                        _narrow(Path(entry.path), entry.stat().st_mode, FILE_MODE)
    except PermissionError as error:
        raise OperatorError(
            f"{error.filename} can be used by other accounts and belongs to one of them",
            fix=f"give it to the account of the service: chown -R {os.geteuid()} {directory}",
            kind="not_private",
        ) from error


def _narrow(path: Path, found: int, mode: int) -> None:
    if stat.S_IMODE(found) & 0o077:
        path.chmod(mode)


def keep_damaged(path: Path) -> Path:
    """Another name for a damaged file, for a person to look at; only the last one is kept."""
    kept = path.with_name(path.name + DAMAGED)
    for earlier in path.parent.glob(f"*{DAMAGED}"):
        earlier.unlink(missing_ok=True)
    try:
        os.link(path, kept)
    except OSError:
        # A filesystem without hard links.
        write_synced(kept, path.read_bytes())
    return kept


def keep_spare(directory: Path, needed: int) -> None:
    """See that twice the ``needed`` bytes are reserved, if there is room for them."""
    path, size = directory / _SPARE, max(2 * needed, _SPARE_BYTES_MIN)
    try:
        if path.stat().st_size >= size:
            return
    except FileNotFoundError:
        pass
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
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
