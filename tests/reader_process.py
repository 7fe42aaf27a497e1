"""The reader as the process it is in production, for tests that kill it or look at its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
import psutil
from psycopg.conninfo import conninfo_to_dict

from cdc.failpoints import VARIABLE
from tests.slot_source import SlotSource
from tests.waiting import until

PLAIN = "from cdc.replication.__main__ import main; import sys; sys.exit(main())"


class ReaderProcess:
    """Runs until it is stopped, killed, or reaches its failpoint; a context manager."""

    def __init__(
        self,
        shop: SlotSource,
        *,
        failpoint: str = "",
        program: str = PLAIN,
        log: Mapping[str, object] | None = None,
        database: Mapping[str, object] | None = None,
    ) -> None:
        self._config = shop.settings.log_directory.parent / "walbrook.yaml"
        self._config.write_bytes(orjson.dumps(_config(shop, log or {}, database or {})))
        self._command = [
            *(sys.executable, "-c", program),
            *(str(self._config), "shop", f"--term={shop.term}"),
        ]
        self._environment = {**os.environ, VARIABLE: failpoint}
        self._output = self._config.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def peak_bytes(self) -> int:
        """The most memory it has held so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def until_dead(self) -> int:
        """Its exit status; negative for a signal."""
        assert self._process is not None
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the reader still runs:\n{self.output()}") from None

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def until_streaming(self) -> None:
        until("the reader to stream", lambda: "reader.streaming" in self.output())

    def __enter__(self) -> Self:
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()  # as when the supervisor is gone
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _config(
    shop: SlotSource, log: Mapping[str, object], database: Mapping[str, object]
) -> dict[str, object]:
    at = conninfo_to_dict(shop.database.dsn)
    url = f"postgres://{at['user']}:{at['password']}@{at['host']}:{at['port']}/{at['dbname']}"
    source = {
        "name": "shop",
        "url": url,
        "slot": {"name": shop.settings.slot},
        "publication": {"name": shop.settings.publication},
        **database,
    }
    # The reader's log of source shop lies in <directory>/shop.
    directory = str(shop.settings.log_directory.parent)
    return {"databases": [source], "log": {"directory": directory, **log}}
