"""Being asked to stop, and why: by a signal, by a failure, or by the end of the supervisor.

Each becomes readable on one descriptor, so that a wait for a socket can end with a stop too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType


class StopReason(Enum):
    """Why a process stops. Only an operator's stop means that it is not started again."""

    OPERATOR = auto()
    FAILURE = auto()
    """A part of this process failed for good."""
    ORPHANED = auto()
    """The supervisor is gone, or gives up."""


class StopSignal:
    """Set once; never reset. The first reason counts."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._followers: list[StopSignal] = []
        self._reason: StopReason | None = None

    def __del__(self) -> None:
        # Not earlier: a stop of the whole may be about to write to a follower that has ended.
        os.close(self._read_end)
        os.close(self._write_end)

    @property
    def requested(self) -> bool:
        return self._reason is not None

    @property
    def by_operator(self) -> bool:
        """Whether a person, or what acts for one, asked for the stop."""
        return self._reason is StopReason.OPERATOR

    @property
    def descriptor(self) -> int:
        """Readable once a stop was requested."""
        return self._read_end

    def request(self, reason: StopReason = StopReason.FAILURE) -> None:
        if self._reason is None:
            self._reason = reason
            os.write(self._write_end, b"x")
            for each in list(self._followers):
                each.request(reason)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a stop is requested. Returns True if it was."""
        if not self.requested:
            select.select([self._read_end], [], [], max(0.0, timeout_s))
        return self.requested

    def on_signals(self) -> None:
        """SIGTERM and SIGINT are an operator's stop."""

        def handle(_signal: int, _frame: FrameType | None) -> None:
            self.request(StopReason.OPERATOR)

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)

    @contextmanager
    def follower(self) -> Iterator[StopSignal]:
        """A signal of its own for a part of the process; a stop of the whole is one of the part."""
        own = StopSignal()
        self._followers.append(own)
        try:
            if self._reason is not None:
                own.request(self._reason)
            yield own
        finally:
            self._followers.remove(own)

    def on_parent_death(
        self, on_line: Callable[[str], None] | None = None, pipe: int | None = None
    ) -> None:
        """Stop when the parent, which holds the other end of our standard input, closes it.

        ``on_line`` is called with each line that the parent sends.
        """
        reading = sys.stdin.fileno() if pipe is None else pipe

        def watch() -> None:
            begun = b""
            while received := os.read(reading, 4096):
                *lines, begun = (begun + received).split(b"\n")
                if on_line is not None:
                    for line in lines:
                        on_line(line.decode())
            self.request(StopReason.ORPHANED)

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()
