"""The service's own process: starts one reader per source and the Spark driver, and minds them.

Where the log is served to other machines, that is one more process; it and the driver share a
token that lives as long as this run.

A child that ends is started again with backoff, and so is a reader that is silent for longer than
it said. A source that needs an operator is tried again too: the others go on. The service ends by
itself in two cases: no source at all can be read without an operator, or the driver or the log
server cannot even start with this configuration. A stop follows the stream: the readers first,
then the driver, which settles what the log holds.
"""

from __future__ import annotations

import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from cdc.backoff import Backoff
from cdc.config import Config
from cdc.errors import NEEDS_OPERATOR
from cdc.log.flight.wire import TOKEN_VARIABLE
from cdc.metrics.snapshot import FILE_VARIABLE, begin_directory, file_of
from cdc.pulse import PulseMonitor
from cdc.stop import StopSignal

_logger = structlog.get_logger("walbrook.service")

_POLL_S = 0.1
_READER_STOP_S = 10.0
_DRIVER_STOP_EXTRA_S = 20.0
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.5, 30.0
_KILLED_S = 10.0  # for a process to end that was killed; one that waits for a disk takes longer
_FIRST_PULSE_S = 600.0  # a reader may have a large log to open


class ServedSource(Protocol):
    """A source that the service serves once it has a term."""

    @property
    def term(self) -> int | None: ...


@dataclass
class Child:
    """A process of the service, and when it may be started again."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    has_pulse: bool = False
    first_pulse_s: float | None = None  # a bound of its own until the first sign of life
    process: subprocess.Popen[bytes] | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S))
    started_at: float = 0.0
    start_after: float = 0.0
    starts: int = 0
    needs_operator: bool = False
    pulse: PulseMonitor | None = None

    def start(self) -> None:
        """Start the process; one that the system refuses to start is tried again."""
        self.starts += 1
        self.started_at = time.monotonic()
        self.needs_operator = False
        first_s = _FIRST_PULSE_S if self.first_pulse_s is None else self.first_pulse_s
        pulse = PulseMonitor(first_s) if self.has_pulse else None
        ends = () if pulse is None else (pulse.write_end,)
        try:
            # A session of its own: Ctrl-C reaches only the supervisor, which stops its children in
            # order. The pipe ends when the supervisor does, however it ends.
            self.process = subprocess.Popen(
                self.command + [f"--pulse={end}" for end in ends],
                stdin=subprocess.PIPE,
                bufsize=0,  # a line that cannot be sent must not be left for close() to send
                start_new_session=True,
                env=os.environ | self.environment,
                pass_fds=ends,
            )
        except OSError as error:
            _logger.error("service.not_started", process=self.name, error=error.strerror)
            if pulse is not None:
                pulse.close()
            self._start_later()
            return
        finally:
            if pulse is not None:
                pulse.started()
        self.pulse = pulse
        _logger.info("service.started", process=self.name, pid=self.process.pid)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_starting(self) -> bool:
        """Whether the process runs and has not said yet that it works."""
        pulse = self.pulse
        return self.alive and pulse is not None and not pulse.has_beaten

    def mind(self) -> None:
        """Start the process if it ended, and end it if it hangs."""
        if self.process is None:
            if time.monotonic() >= self.start_after:
                self.start()
            return
        if self.pulse is not None and self.alive and self.pulse.is_overdue:
            _logger.error("service.hung", process=self.name, pid=self.process.pid)
            # One that waits for a disk ends when the disk answers; the others are minded meanwhile.
            self.process.kill()
            self._end_pulse()
        status = self.process.poll()
        if status is None:
            return
        self.needs_operator = status == NEEDS_OPERATOR
        if time.monotonic() - self.started_at > _BACKOFF_MAX_S:
            self.backoff.reset()
        self._release()
        again_in_s = self._start_later()
        _logger.warning("service.died", process=self.name, status=status, again_in_s=again_in_s)

    def tell(self, line: str) -> None:
        """Send a line to the standard input of the process; one that has ended needs none."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.write(f"{line}\n".encode())

    def stop(self, timeout_s: float, *, by_operator: bool = True) -> None:
        """Ask it to stop, wait, and end it if it does not.

        A child whose pipe is closed stops too, and knows that no operator asked for it.
        """
        if self.process is not None and self.process.poll() is None:
            if by_operator or self.process.stdin is None:
                self.process.send_signal(signal.SIGTERM)
            else:
                self.process.stdin.close()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _logger.warning("service.killed", process=self.name, waited_s=timeout_s)
                self.process.kill()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_KILLED_S)
        self._release()

    def _release(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None
        self._end_pulse()

    def _end_pulse(self) -> None:
        if self.pulse is not None:
            self.pulse.close()
            self.pulse = None

    def _start_later(self) -> float:
        """Returns the pause in seconds until the next start."""
        pause_s = round(self.backoff.next_s(), 1)
        self.start_after = time.monotonic() + pause_s
        return pause_s


@dataclass(frozen=True)
class ServiceChange:
    """Another configuration: the sources that it has, and of which of them the reader ends.

    The driver hears of the ``revision``, and reads it where it read its first configuration.
    """

    sources: Mapping[str, ServedSource]
    ended: frozenset[str]
    revision: int


class Supervisor:
    """Runs the processes of a configuration until a stop.

    ``change``, ``is_changing``, ``processes`` and ``starting`` may be used from any thread.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        sources: Mapping[str, ServedSource],
        *,
        base: Path | None = None,
        revision: int | None = None,
    ) -> None:
        """``path`` is what the processes read; ``base`` is where relative paths in it begin."""
        self._drain_timeout_s = config.service.drain_timeout_s
        self._path = path
        self._base = [] if base is None else [f"--base={base}"]
        self._revision = revision
        self._sources = sources
        self.source_names = list(sources)
        """Those that are served now: always the same list."""
        self._readers: dict[str, Child] = {}
        self._terms: dict[str, int] = {}
        self._came_round_at = time.monotonic()
        self.metrics_directory = begin_directory(config.spark.checkpoint_directory)
        """Where its processes leave what they have measured."""
        self._changes: queue.SimpleQueue[ServiceChange] = queue.SimpleQueue()
        self._stopping: list[threading.Thread] = []  # of readers
        # In the environment, not among the arguments, which everyone on the machine can read.
        token = {TOKEN_VARIABLE: secrets.token_urlsafe(32)}
        self._servers = (
            [
                Child(
                    "log server",
                    _module("cdc.service.process.log_server", path, *self._base),
                    token,
                )
            ]
            if config.serves_log
            else []
        )
        # It beats once, when Spark is up: how long that takes is up to the machine.
        self._driver = Child(
            "driver",
            [],
            token | self._measured("driver"),
            has_pulse=True,
            first_pulse_s=math.inf,
        )
        self._command_driver()

    def change(self, change: ServiceChange) -> None:
        """Go over to another configuration soon."""
        self._changes.put(change)

    @property
    def is_changing(self) -> bool:
        """Whether a change has not been taken, or a reader that it ends still runs."""
        return not self._changes.empty() or any(each.is_alive() for each in self._stopping)

    def run(self, stop: StopSignal, keep: Callable[[], None]) -> int:
        """Mind the children, and ``keep`` what is ours, until a stop. Returns the exit status."""
        try:
            while not stop.wait(_POLL_S):
                self._came_round_at = time.monotonic()
                keep()
                self._take_changes()
                self._add_ready_sources()
                for child in self._children:
                    child.mind()
                if self._needs_operator:
                    return 1
            return 0
        finally:
            _logger.info("service.draining", at_most_s=self._drain_timeout_s)
            for reader in self._readers.values():
                reader.stop(_READER_STOP_S)
            timeout_s = self._drain_timeout_s + _DRIVER_STOP_EXTRA_S
            self._driver.stop(timeout_s, by_operator=stop.by_operator)
            for server in self._servers:
                server.stop(_READER_STOP_S)
            _logger.info("service.stopped")

    def processes(self) -> dict[str, bool]:
        """Each process of the service, and whether it runs."""
        running = {f"reader {name}": False for name in self._sources}
        return running | {child.name: child.alive for child in self._children}

    def pids(self) -> dict[str, int]:
        """The processes that run, the supervisor among them."""
        running = {
            child.name: process.pid
            for child in self._children
            if (process := child.process) is not None
        }
        return {"supervisor": os.getpid()} | running

    def starting(self) -> list[str]:
        """The processes that run and cannot do their work yet."""
        return [self._driver.name] if self._driver.is_starting else []

    def silent_s(self) -> float:
        """For how long the main loop has not come round."""
        return time.monotonic() - self._came_round_at

    def _add_ready_sources(self) -> None:
        """Start the reader of each source that has become ready, and let the driver serve it."""
        for name, source in self._sources.items():
            if name in self._terms or (term := source.term) is None:
                continue
            self._terms[name] = term
            command = _module("cdc.replication", self._path, name, f"--term={term}", *self._base)
            # A new dictionary, because the HTTP server's threads look through this one.
            child = f"reader {name}"
            reader = Child(child, command, self._measured(child), has_pulse=True)
            self._readers = self._readers | {name: reader}
            self._command_driver()
            self._driver.tell(f"{name}={term}")

    def _measured(self, process: str) -> dict[str, str]:
        """What tells a process where to leave what it has measured."""
        return {FILE_VARIABLE: str(file_of(self.metrics_directory, process))}

    def _command_driver(self) -> None:
        """A driver that is started again serves what is served now, by what was applied last."""
        arguments = [f"--term={each}={number}" for each, number in self._terms.items()]
        if self._revision is not None:
            arguments.append(f"--revision={self._revision}")
        self._driver.command = _module("spark_pipeline", self._path, *self._base, *arguments)

    def _take_changes(self) -> None:
        while not self._changes.empty():
            # The last one counts as taken only when its readers are being stopped.
            change = self._changes.get()
            for name in change.ended:
                self._terms.pop(name, None)
                reader = self._readers.get(name)
                self._readers = {k: each for k, each in self._readers.items() if k != name}
                if reader is not None:
                    self._stop_apart(reader)
            if change.sources.keys() != self._sources.keys():
                for server in self._servers:  # it begins again by itself, with other folders
                    server.stop(_READER_STOP_S)
            self._sources = change.sources
            self.source_names[:] = change.sources
            is_news = change.revision != self._revision
            self._revision = change.revision
            self._command_driver()
            if is_news:
                self._driver.tell(f"revision {change.revision}")

    def _stop_apart(self, reader: Child) -> None:
        """Stop a reader that is not minded any more, in a thread of its own."""
        self._stopping = [each for each in self._stopping if each.is_alive()]
        thread = threading.Thread(target=reader.stop, args=(_READER_STOP_S,), name=reader.name)
        self._stopping.append(thread)
        thread.start()

    @property
    def _needs_operator(self) -> bool:
        """Whether nothing can go on before a person has changed something."""
        others = [self._driver, *self._servers]
        if any(child.needs_operator and child.starts == 1 for child in others):
            return True
        readers = self._readers.values()
        all_there = bool(readers) and len(readers) == len(self._sources)
        return all_there and all(reader.needs_operator for reader in readers)

    @property
    def _children(self) -> list[Child]:
        return [*self._readers.values(), *self._servers, self._driver]


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]
