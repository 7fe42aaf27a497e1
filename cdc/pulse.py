"""A sign of life: a process tells its supervisor that it works, and for how long it may be silent.

The two are the ends of a pipe. Only the loop that does the work writes to it, so a process that is
frozen, or whose loop hangs, becomes silent. Invariant: neither end ever waits for the other.
"""

from __future__ import annotations

import os
import time

_READ_BYTES = 64 << 10  # what a pipe holds, so that a beat is never read in halves


class Pulse:
    """The end of the process that works; without a descriptor beats go nowhere."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_blocking(descriptor, False)

    def beat(self, silent_s: float) -> None:
        """Work goes on; the next beat comes within ``silent_s``."""
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, b"%d\n" % max(1, round(silent_s)))
        except BlockingIOError:
            pass  # the supervisor has enough unread beats
        except BrokenPipeError:
            self._descriptor = None  # the supervisor is gone; standard input says so too


class PulseMonitor:
    """The end of the supervisor: whether a process has been silent for longer than it said."""

    def __init__(self, first_s: float) -> None:
        """``first_s`` is the bound until the first beat."""
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._due = time.monotonic() + first_s
        self._has_beaten = False

    def started(self) -> None:
        """The process has its own copy of the other end."""
        os.close(self.write_end)

    @property
    def has_beaten(self) -> bool:
        """Whether the process has given a sign of life yet."""
        self._listen()
        return self._has_beaten

    @property
    def is_overdue(self) -> bool:
        """Whether the next beat should have come; what has come meanwhile counts."""
        self._listen()
        return time.monotonic() >= self._due

    def _listen(self) -> None:
        try:
            beats = os.read(self._read_end, _READ_BYTES)
        except BlockingIOError:
            beats = b""
        last = beats.rstrip(b"\n").rpartition(b"\n")[2]
        if last:
            self._has_beaten = True
            self._due = time.monotonic() + int(last)

    def close(self) -> None:
        os.close(self._read_end)
