"""``pgbench`` as the one who writes: a script of ours again and again, at a steady average rate."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from benchmarks.source import BenchmarkSource
from cdc.errors import TransientError

CONNECTIONS = 4

_STOP_TIMEOUT_S = 30.0


class Writing:
    """A ``pgbench`` at work."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait(self, timeout_s: float) -> None:
        """Let it come to its own end."""
        _, errors = self._process.communicate(timeout=timeout_s)
        if self._process.returncode != 0:
            raise _failure(self._process.returncode, errors)

    def stop(self) -> None:
        """End it where it is; one that ended before has failed."""
        if self._process.poll() is not None:
            raise _failure(self._process.returncode, self._process.communicate()[1])
        self._process.terminate()
        self._process.communicate(timeout=_STOP_TIMEOUT_S)


@contextmanager
def writing(
    source: BenchmarkSource, script: Path, transactions_per_s: int, until: str
) -> Iterator[Writing]:
    """Start it; ``until`` is its own option that says how much there is to do."""
    to = conninfo_to_dict(source.postgres.dsn)
    command = [
        str(source.postgres.bin_directory / "pgbench"),
        *("--host", str(to["host"]), "--port", str(to["port"]), "--username", str(to["user"])),
        *("--no-vacuum", "--protocol=prepared", f"--file={script}", f"--client={CONNECTIONS}"),
        *(f"--rate={transactions_per_s}", until, str(to["dbname"])),
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PGPASSWORD": str(to["password"])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Writing(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _failure(status: int, errors: str) -> TransientError:
    return TransientError(f"pgbench ended with {status}: {errors.strip()}")
