"""A program that is measured by what it says: from the line that marks its beginning to its end.

Programs that read a slot first start up and connect, and tidy up afterwards, which is not what is
asked. What they write is taken from the pipe as it comes, so that they never wait for us.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from cdc.errors import OperatorError

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


class WatchedProgram:
    """A child process; a context manager that ends it. ``begun_at`` is of ``perf_counter``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        begins: str,
        ends: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``begins`` and ``ends`` are texts that stand in the lines it writes then."""
        self._name = command[0]
        self._begins, self._ends = begins, ends
        self._lines: deque[str] = deque(maxlen=20)
        self._begun = threading.Event()
        self.begun_at = self._ended_at = 0.0
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def wait_begun(self) -> None:
        """Return once it said that it began."""
        if not self._begun.wait(_START_TIMEOUT_S) or not self.begun_at:
            raise self._failure("did not begin")

    def wait_ended(self, timeout_s: float) -> float:
        """Let it run to its own end; the seconds from the one mark to the other."""
        self.wait_begun()
        self._listener.join(timeout_s)
        if self._listener.is_alive():
            raise self._failure(f"was not done within {timeout_s:g} s")
        if status := self.process.wait(_STOP_TIMEOUT_S):
            raise self._failure(f"ended with status {status}")
        if not self._ended_at:
            raise self._failure("ended without saying that it was done")
        return self._ended_at - self.begun_at

    def require_running(self) -> None:
        if self.process.poll() is not None:
            raise self._failure(f"ended with status {self.process.returncode}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._listener.join(_STOP_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            now = time.perf_counter()
            self._lines.append(line)
            if not self.begun_at and self._begins in line:
                self.begun_at = now
                self._begun.set()
            elif self._ends is not None and self._ends in line:
                self._ended_at = now
        self._begun.set()  # the process is gone: no caller needs to wait

    def _failure(self, what: str) -> OperatorError:
        return OperatorError(
            f"{self._name} {what}; it wrote: {''.join(self._lines).strip() or 'nothing'}",
            fix="run the benchmark again on a machine that is less busy, or with fewer rows",
        )
