"""The service's own process: starts a reader a source, the Spark driver, and minds them.

Where the log is served to other machines, that is one more process; it and the driver share a
token that lives as long as this run.

A child that dies by a signal or a bug is started again, with a pause that grows to a bound; one
that says it needs an operator (by its exit status) ends the service. A stop goes along the stream:
the readers first, then the driver, which settles what the log holds.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from cdc.config import Config
from cdc.errors import NEEDS_OPERATOR
from cdc.log.flight_wire import TOKEN_VARIABLE
from cdc.replication.stop import StopSignal

_logger = structlog.get_logger("walbrook.service")

_POLL_S = 0.1
_READER_STOP_S = 10.0
_DRIVER_STOP_EXTRA_S = 20.0
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.5, 30.0


@dataclass
class Child:
    """A process of the service, and when it may be started again."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    backoff_s: float = _BACKOFF_FIRST_S
    started_at: float = 0.0
    start_after: float = 0.0
    gave_up: bool = field(default=False)

    def start(self) -> None:
        # A session of its own: Ctrl-C reaches only the supervisor, which stops its children in
        # order. The pipe tells a child when the supervisor is gone, however it went.
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | self.environment,
        )
        self.started_at = time.monotonic()
        _logger.info("service.started", process=self.name, pid=self.process.pid)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def mind(self) -> None:
        """Start again what died, unless it asked for an operator."""
        if self.process is None:
            if time.monotonic() >= self.start_after:
                self.start()
            return
        status = self.process.poll()
        if status is None:
            return
        if status == NEEDS_OPERATOR:
            self.gave_up = True
            return
        if time.monotonic() - self.started_at > _BACKOFF_MAX_S:
            self.backoff_s = _BACKOFF_FIRST_S
        _logger.warning("service.died", process=self.name, status=status, again_in_s=self.backoff_s)
        self.process = None
        self.start_after = time.monotonic() + self.backoff_s
        self.backoff_s = min(self.backoff_s * 2, _BACKOFF_MAX_S)

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop, wait, and end it if it does not."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _logger.warning("service.killed", process=self.name, waited_s=timeout_s)
            self.process.kill()
            self.process.wait()


class Supervisor:
    """Runs the processes of one configuration until told to stop."""

    def __init__(self, config: Config, path: Path, terms: dict[str, int]) -> None:
        self._drain_timeout_s = config.service.drain_timeout_s
        self._readers = [
            Child(f"reader {name}", _module("cdc.replication", path, name, f"--term={term}"))
            for name, term in terms.items()
        ]
        # In the environment, not among the arguments, which everyone on the machine can read.
        token = {TOKEN_VARIABLE: secrets.token_urlsafe(32)}
        self._servers = (
            [Child("log server", _module("cdc.service.log_server", path), token)]
            if config.serves_log
            else []
        )
        pairs = [f"--term={name}={term}" for name, term in terms.items()]
        command = _module("spark_pipeline", path, *pairs)
        self._driver = Child("driver", command, token)

    def run(self, stop: StopSignal, keep: Callable[[], None]) -> int:
        """Mind the children, and ``keep`` what is ours, until a stop; gives the exit status."""
        try:
            while not stop.wait(_POLL_S):
                keep()
                for child in self._children:
                    child.mind()
                if any(child.gave_up for child in self._children):
                    return 1
            return 0
        finally:
            _logger.info("service.draining", at_most_s=self._drain_timeout_s)
            for reader in self._readers:
                reader.stop(_READER_STOP_S)
            self._driver.stop(self._drain_timeout_s + _DRIVER_STOP_EXTRA_S)
            for server in self._servers:
                server.stop(_READER_STOP_S)
            _logger.info("service.stopped")

    def processes(self) -> dict[str, bool]:
        """Each process of the service, and whether it runs."""
        return {child.name: child.alive for child in self._children}

    @property
    def _children(self) -> list[Child]:
        return [*self._readers, *self._servers, self._driver]


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]
