"""Servers that speak what the stores of Azure and Google speak, fetched once by npm and Go.

They lie in the user's cache directory, as jars do, and keep what they are given in memory.
"""

from __future__ import annotations

import base64
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from demo.loopback import LOOPBACK, free_port
from tests.waiting import until

ACCOUNT: Final = "walbrook"
ACCOUNT_KEY: Final = base64.b64encode(b"of a store that is on loopback alone").decode()

_AZURITE: Final = "3.37.0"
_FAKE_GCS: Final = "v1.56.1"
_FETCH_TIMEOUT_S: Final = 600


class NoServerError(Exception):
    """The server is not here and cannot be fetched."""


@contextmanager
def azurite() -> Iterator[str]:
    """The address of an Azure Blob server with the account ``ACCOUNT``."""
    name = f"azurite-{_AZURITE}"
    fetch = ["npm", "install", "--no-audit", "--no-fund", "--prefix", "{}", f"azurite@{_AZURITE}"]
    program = _fetched(name, fetch) / "node_modules" / ".bin" / "azurite-blob"
    port = free_port()
    options = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    command = [str(program), *options, "--blobHost", LOOPBACK, "--blobPort", str(port)]
    with _running(command, port, {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}):
        yield f"{LOOPBACK}:{port}"


@contextmanager
def fake_gcs() -> Iterator[str]:
    """The address of a Google Cloud Storage server; it asks for no account."""
    module = f"github.com/fsouza/fake-gcs-server@{_FAKE_GCS}"
    program = _fetched(f"fake-gcs-{_FAKE_GCS}", ["go", "install", module]) / "fake-gcs-server"
    port = free_port()
    options = ["-scheme", "http", "-backend", "memory", "-host", LOOPBACK, "-port", str(port)]
    with _running([str(program), *options, "-public-host", f"{LOOPBACK}:{port}"], port, {}):
        yield f"{LOOPBACK}:{port}"


@contextmanager
def _running(command: Sequence[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

        def answers() -> bool:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            with suppress(OSError), socket.create_connection((LOOPBACK, port), 1):
                return True
            return False

        try:
            until(command[0], answers, 60)
            yield
        finally:
            process.terminate()
            process.wait(30)


def _fetched(name: str, command: Sequence[str]) -> Path:
    """The folder of this name, filled by the command if it is not there yet; {} is the folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "walbrook"
    cache.mkdir(parents=True, exist_ok=True)
    # Several test workers may want it.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / name).exists():
            _fetch(cache, name, command)
    return cache / name


def _fetch(cache: Path, name: str, command: Sequence[str]) -> None:
    if shutil.which(command[0]) is None:
        raise NoServerError(f"{name} cannot be fetched: {command[0]} is not installed")
    print(f"Fetching {name} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        folder = Path(scratch, "fetched")
        folder.mkdir()
        run = subprocess.run(
            [part.replace("{}", str(folder)) for part in command],
            cwd=scratch,
            env=os.environ | {"GOBIN": str(folder)},
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
        )
        if run.returncode != 0:
            raise NoServerError(f"{name} was not fetched:\n{run.stdout}{run.stderr}")
        folder.rename(cache / name)
