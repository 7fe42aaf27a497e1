"""Sleeping until a directory changes, without polling.

On Linux the kernel says so (inotify, through the C library: one call to open, one to watch, and a
file descriptor to wait on). Elsewhere the wait is a short sleep, and the caller looks again.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time
from pathlib import Path

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_FALLBACK_SLEEP_S = 0.005


class DirectoryWatch:
    """Waits for writes below one directory; several writes may wake it once."""

    def __init__(self, directory: Path) -> None:
        self._handle = _watch(directory) if sys.platform == "linux" else -1
        self._poll = select.poll()
        if self._handle >= 0:
            self._poll.register(self._handle, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Return at the next write, or after ``timeout_s``."""
        if self._handle < 0:
            time.sleep(min(timeout_s, _FALLBACK_SLEEP_S))
        elif self._poll.poll(max(0.0, timeout_s * 1000)):
            os.read(self._handle, 1 << 16)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _watch(directory: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    handle: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if handle < 0:
        return -1
    mask = ctypes.c_uint32(_IN_MODIFY | _IN_MOVED_TO | _IN_CREATE)
    if libc.inotify_add_watch(handle, os.fsencode(directory), mask) < 0:
        os.close(handle)
        return -1
    return handle
