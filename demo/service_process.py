"""The service as an operator starts it: a process of its own, its log in a file.

Invariants: the process is ended on every way out, by its own handle; its children end
with it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from cdc.errors import OperatorError

_STOP_TIMEOUT_S: Final = 75.0  # beyond what the service itself allows its parts
_LOG_LINES: Final = 8


class ServiceProcess:
    """``walbrook run`` with one configuration; a context manager."""

    def __init__(self, config_path: Path, log_path: Path) -> None:
        self._config_path = config_path
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cdc.service.cli.entry",
                    "run",
                    "-c",
                    str(self._config_path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; we stop the service in its turn
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def require_running(self) -> None:
        """Raise if the service ended by itself."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            last = self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise OperatorError(
                "\n".join([f"the service ended with status {status}; it said last:", *last]),
                fix=f"read {self.log_path}",
            )

    def stop(self) -> int:
        """SIGTERM, and a bounded wait for it to drain; its exit status."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
