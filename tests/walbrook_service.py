"""The service under test: the real command in a process of its own, on a real source."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from tests.fix_postgres import Database
from tests.waiting import until

ROOT = Path(__file__).parents[1]
START_S = 120.0
_PORT = re.compile(r"http\.listening.*?port=(\d+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Service:
    """``walbrook run`` with a configuration for ``database``; log and data below ``directory``.

    ``settings`` are added to the sections of the configuration that they name.
    """

    def __init__(
        self,
        database: Database,
        directory: Path,
        sinks: list[dict[str, object]],
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.database = database
        self.state = database  # where the state schema is
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.slot = f"slot_{database.name}"[:63]
        self.config = directory / "walbrook.yaml"
        self.log = directory / "service.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.config.write_text(yaml.safe_dump(self._configuration(sinks), sort_keys=False))
        self.configure(settings or {})

    def configure(
        self,
        sections: Mapping[str, Mapping[str, object]],
        sinks: list[dict[str, object]] | None = None,
    ) -> None:
        """Other sinks, and more settings in some sections, for the next start."""
        config = yaml.safe_load(self.config.read_text())
        if sinks is not None:
            config["sinks"] = sinks
        for name, given in sections.items():
            config[name] = {**config.get(name, {}), **given}
        self.config.write_text(yaml.safe_dump(config, sort_keys=False))

    def _configuration(self, sinks: list[dict[str, object]]) -> dict[str, object]:
        return {
            "databases": [
                {
                    "name": "shop",
                    "url": _url(self.database.dsn),
                    "slot": {"name": self.slot, "create_if_not_exists": True},
                    "publication": {"name": "pub", "create_if_not_exists": True},
                }
            ],
            "sinks": sinks,
            "log": {"directory": "log"},
            "spark": {"checkpoint_directory": "spark", "driver_memory": "512m"},
            "service": {"http": {"port": 0}},
        }

    def sinks(self) -> list[dict[str, object]]:
        """As they are configured now."""
        found: list[dict[str, object]] = yaml.safe_load(self.config.read_text())["sinks"]
        return found

    def start(self, *options: str) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cdc.service.cli.entry",
                    "run",
                    "--config",
                    str(self.config),
                    *options,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                cwd=self.directory,
            )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another ``walbrook`` command with the same configuration."""
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "cdc.service.cli.entry",
                *arguments,
                "--config",
                str(self.config),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            check=False,
        )

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(90)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself, or was ended."""
        return self._process is not None and self._process.poll() is not None

    def tree(self) -> list[psutil.Process]:
        """The supervisor and everything it started, the supervisor first."""
        assert self._process is not None
        try:
            supervisor = psutil.Process(self._process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, only: str | None = None) -> str:
        """SIGKILL everything at once, or the processes whose command line has ``only`` in it."""
        killed = []
        for process in self.tree():
            try:
                command = " ".join(process.cmdline())
                if only is None or only in command:
                    process.kill()
                    killed.append(command.split(" -m ")[-1][:40])
            except psutil.NoSuchProcess:
                continue
        if only is None:
            assert self._process is not None
            self._process.wait(30)
        return ", ".join(killed)

    def orphan(self) -> list[psutil.Process]:
        """SIGKILL the supervisor alone; the answer is what outlives it."""
        assert self._process is not None
        supervisor, *others = self.tree()
        supervisor.kill()
        self._process.wait(30)
        return others

    def until(self, what: str, sql: str, timeout_s: float = START_S) -> None:
        """Wait until a query gives a row whose first value is true."""

        def holds() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"the service ended:\n{self.log_tail()}"
            rows = self.state.execute(sql)
            return bool(rows and rows[0][0])

        try:
            until(what, holds, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_tail()}") from None

    def until_serving(self) -> None:
        """Until the reader streams and a pipeline has settled something."""
        self.until("the state schema", "SELECT to_regclass('walbrook.consumers') IS NOT NULL")
        self.until("the reader", "SELECT state = 'streaming' FROM walbrook.sources")

    def until_settled(
        self,
        timeout_s: float = START_S,
        besides: str | None = None,
        only: Sequence[str] = (),
        source: Database | None = None,
    ) -> None:
        """Until every change committed so far is settled for every consumer ``besides`` one.

        Or for ``only`` some; ``source`` is another database than the first.
        """
        ((lsn,),) = (source or self.database).execute(
            "SELECT pg_logical_emit_message(true, 'test', 'mark', true)"
            if self._version() >= 17
            else "SELECT pg_logical_emit_message(true, 'test', 'mark')"
        )
        wanted = f"consumer = ANY ('{{{','.join(only)}}}')" if only else "true"
        if besides:
            wanted += f" AND consumer <> '{besides}'"
        self.until(
            f"everything up to {lsn} settled",
            f"SELECT bool_and(lsn >= '{lsn}'::pg_lsn) FROM walbrook.cursors WHERE {wanted}",
            timeout_s,
        )

    def http_port(self) -> int:
        """Of the latest start."""

        def found() -> list[str]:
            return _PORT.findall(_COLOUR.sub("", self.log.read_text(errors="replace")))

        return int(until("the HTTP port", found)[-1])

    def until_read(self) -> None:
        """Until all that was committed is in the change log."""
        ((lsn,),) = self.database.execute("SELECT pg_logical_emit_message(true, 'test', 'mark')")
        self.until(
            f"everything up to {lsn} read",
            f"SELECT log_lsn >= '{lsn}'::pg_lsn FROM walbrook.sources WHERE name = 'shop'",
        )

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _version(self) -> int:
        return int(self.database.execute("SHOW server_version_num")[0][0]) // 10000


@contextmanager
def running(
    database: Database,
    directory: Path,
    sinks: list[dict[str, object]],
    settings: Mapping[str, Mapping[str, object]] | None = None,
) -> Iterator[Service]:
    """A started service; whatever is left of it at the end is killed."""
    with started(Service(database, directory, sinks, settings)) as service:
        yield service


@contextmanager
def started(service: Service) -> Iterator[Service]:
    """A service that serves; whatever is left of it at the end is killed."""
    service.start()
    try:
        service.until_serving()
        yield service
    finally:
        service.kill()


def _url(dsn: str) -> str:
    """A conninfo string as the URL that the configuration takes."""
    from psycopg.conninfo import conninfo_to_dict

    p = conninfo_to_dict(dsn)
    return f"postgres://{p['user']}:{p['password']}@{p['host']}:{p['port']}/{p['dbname']}"
