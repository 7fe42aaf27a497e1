"""Being asked to stop: by a signal, or by the death of the process that started us.

Both become readable on one descriptor, so that whoever waits for a socket can wait for this too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from types import FrameType


class StopSignal:
    """Set once; never reset."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self.requested = False
        self.orphaned = False
        """Whether it was the death of the process that started us: nobody asked for a stop."""

    @property
    def descriptor(self) -> int:
        """Readable once a stop was requested."""
        return self._read_end

    def request(self) -> None:
        if not self.requested:
            self.requested = True
            os.write(self._write_end, b"x")

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a stop is requested; says whether it was."""
        if not self.requested:
            select.select([self._read_end], [], [], max(0.0, timeout_s))
        return self.requested

    def on_signals(self) -> None:
        """SIGTERM and SIGINT ask for a stop."""

        def handle(_signal: int, _frame: FrameType | None) -> None:
            self.request()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)

    def on_parent_death(self) -> None:
        """The parent holds the other end of our standard input; its end is ours."""

        def watch() -> None:
            while os.read(sys.stdin.fileno(), 4096):
                pass
            self.orphaned = not self.requested
            self.request()

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()
