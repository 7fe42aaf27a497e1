"""The service under measurement: the real command, one source, its sinks, its log in a file.

Invariant: it is stopped as an operator would stop it, and a service that ends by itself
fails the benchmark at once with the last lines it wrote.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
import psutil

from benchmarks.processes import family
from benchmarks.source import PUBLICATION, BenchmarkSource
from cdc.errors import OperatorError, TransientError

OWN_ROLES = ("supervisor", "reader", "driver", "jvm", "python_workers", "other")
"""The service's own processes; Postgres and the destinations are not."""

_POLL_S = 0.02
_STOP_TIMEOUT_S = 90.0


def write_config(
    directory: Path,
    source: BenchmarkSource,
    *,
    name: str,
    slot: str,
    sinks: Mapping[str, Mapping[str, object]] | None = None,
    sink_settings: Mapping[str, Mapping[str, object]] | None = None,
    durability: str = "disk",
    publication: str = PUBLICATION,
    database: Mapping[str, object] | None = None,
) -> Path:
    """A configuration file whose source is called ``name``; ``sinks`` are destinations by name.

    ``sink_settings`` are the other keys of some of them.
    """
    directory.mkdir(parents=True)
    settings = {
        "databases": [
            {
                "name": name,
                "url": source.postgres.url,
                "slot": {"name": slot, "create_if_not_exists": True},
                "publication": {"name": publication},
                **(database or {}),
            }
        ],
        "sinks": [
            {"name": sink, "destination": destination, **(sink_settings or {}).get(sink, {})}
            for sink, destination in (sinks or {}).items()
        ],
        "log": {"directory": "log", "durability": durability},
        "spark": {"checkpoint_directory": "spark"},
        "service": {"http": {"enabled": False}},
    }
    path = directory / "walbrook.yaml"
    path.write_bytes(orjson.dumps(settings))  # JSON is YAML
    path.chmod(0o600)
    return path


class RunningService:
    """``walbrook run`` as a child; a context manager that starts and stops it."""

    def __init__(
        self,
        directory: Path,
        source: BenchmarkSource,
        *,
        name: str,
        sinks: Mapping[str, Mapping[str, object]],
        sink_settings: Mapping[str, Mapping[str, object]] | None = None,
        durability: str = "disk",
    ) -> None:
        self.name = name
        self.slot = f"walbrook_{name}"
        self._source = source
        self._written_before = source.written
        self.config = write_config(
            directory,
            source,
            name=name,
            slot=self.slot,
            sinks=sinks,
            sink_settings=sink_settings,
            durability=durability,
        )
        self._log = directory / "service.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def expected(self) -> int:
        """How many rows each of its sinks must hold once it has delivered what was written."""
        return self._source.written - self._written_before

    def reader(self) -> psutil.Process:
        """The process that reads the slot."""
        for process in family(self.pid):
            if _role(process) == "reader":
                return process
        raise TransientError("the service has no reader at the moment")

    def roles(self) -> Iterator[tuple[str, psutil.Process]]:
        """The service's processes and those of the source, each with what it does."""
        yield from self.own_roles()
        for process in family(psutil.Process(self._source.backend_pid()).ppid()):
            yield _postgres_role(process), process

    def own_roles(self) -> Iterator[tuple[str, psutil.Process]]:
        """The service's processes alone."""
        for process in family(self.pid):
            # One that has just ended no longer says what it was.
            if role := "supervisor" if process.pid == self.pid else _role(process):
                yield role, process

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float) -> float:
        """Wait for ``condition``; returns when it held, by ``perf_counter``."""
        deadline = time.perf_counter() + timeout_s
        while not condition():
            self._require_running()
            if time.perf_counter() > deadline:
                raise self._failure(f"waited {timeout_s:g} s for {what}")
            time.sleep(_POLL_S)
        return time.perf_counter()

    def warnings(self) -> int:
        """How many it has logged: of a reader that lost its connection, a feed that failed."""
        return self._count("[warning")

    def worker_failures(self) -> int:
        """How often a worker has failed."""
        return self._count("worker.failed")

    def stop(self) -> None:
        """End it in order; what its log holds is delivered before."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its children see that it is gone, and end
            process.wait()

    def __enter__(self) -> Self:
        command = [
            sys.executable,
            "-m",
            "cdc.service.cli.entry",
            "run",
            "--config",
            str(self.config),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _require_running(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise self._failure("the service ended by itself")

    def _failure(self, what: str) -> OperatorError:
        return OperatorError(
            "\n".join([f"{what}; the last lines of the service were:", *self._lines()[-20:]]),
            fix="run the benchmark again on a machine that is less busy, or with fewer rows",
        )

    def _count(self, text: str) -> int:
        return sum(text in line for line in self._lines())

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()


def _role(process: psutil.Process) -> str:
    command = _command(process)
    if not command:
        return ""
    if command.split(" ", 1)[0].endswith("java"):
        return "jvm"
    if "-m cdc.replication " in command:
        return "reader"
    if "-m spark_pipeline " in command:
        return "driver"
    return "python_workers" if re.search(r"-m \S+ pyspark\.|-m pyspark\.", command) else "other"


def _postgres_role(process: psutil.Process) -> str:
    return "walsender" if "walsender" in _command(process) else "postgres"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
