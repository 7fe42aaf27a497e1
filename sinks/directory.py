"""Durable steps in a directory on disk: lock it, write a file whole, make a name last.

Invariants: a name that ``publish`` made is durable, with its content, once it returns;
before that the old name or the new one is there, never a half-written file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cdc.errors import OperatorError, TransientError, WalbrookError

_POLL_S = 0.01
_FOR_AN_OPERATOR = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
)


_OF_THE_KERNEL = (Path("/proc"), Path("/sys"))  # root may write there, and nothing can be made
_HOLDER_BYTES = 16


def new_holder() -> bytes:
    """A name that no other holder of a lock has."""
    return os.urandom(_HOLDER_BYTES)


@contextmanager
def locked(path: Path, *, wait_s: float, holder: bytes) -> Iterator[bool]:
    """Hold the lock file at ``path`` alone; the kernel lets go of it when a process dies.

    Yields whether ``holder`` was the last to hold it: no other process can have changed anything
    since.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while not _taken(descriptor):
            if time.monotonic() >= deadline:
                raise TransientError(
                    f"another process has held {path} for {wait_s:g} s",
                    fix="it is retried; if it stays, stop the other process that delivers there",
                )
            time.sleep(_POLL_S)
        again = os.pread(descriptor, _HOLDER_BYTES, 0) == holder
        if not again:
            os.pwrite(descriptor, holder, 0)
        yield again
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; a disk that fills up midway raises on the next turn."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Put ``data`` into the file at ``path``, replacing what was there, and sync its content."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(path: Path, data: bytes | memoryview) -> None:
    """Replace the file at ``path`` in one step that survives a power cut."""
    draft = path.with_name(f".{path.name}.new")
    write_synced(draft, data)
    os.replace(draft, path)
    sync_directory(path.parent)


def make_directories(path: Path) -> None:
    """Create ``path`` and what is missing above it, each name durable in its parent."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def probe_directory(path: Path) -> str:
    """Whether files can be made in a directory, or the directory itself; nothing is made."""
    there = path
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        error = errno.EACCES if there.is_dir() else errno.ENOTDIR
        raise disk_error(path, OSError(error, os.strerror(error)))
    if any(there.resolve().is_relative_to(kernel) for kernel in _OF_THE_KERNEL):
        raise OperatorError(
            f"{path} cannot be made: {there} belongs to the kernel and takes no files",
            fix="give the service a directory of a disk",
        )
    return "may be written to" if there == path else f"may be created in {there}"


def refuse_strangers(path: Path, is_data: Callable[[str], bool]) -> None:
    """A destination without a position must be empty: its messages would come a second time."""
    if any(is_data(name) for name in os.listdir(path)):
        raise OperatorError(
            f"{path} holds data, but no position that says how far it goes",
            fix="restore the position file, or point the consumer at an empty directory",
        )


def disk_error(path: Path, error: OSError) -> WalbrookError:
    """What an error of the operating system means for delivery into ``path``."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FOR_AN_OPERATOR:
        return OperatorError(
            f"cannot write in {path}: {reason}",
            fix="give the service a directory that it may create files in",
        )
    fix = "free space on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return TransientError(f"writing in {path} failed: {reason}", fix=fix or "it is retried")
