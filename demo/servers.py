"""The servers of the example, and the configuration that leads from one to the others.

Invariant: whatever was started is stopped on every way out, by the handle that started
it. The configuration file holds the server's password, so only its owner may read it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psycopg
import yaml

from demo.embedded_postgres import EmbeddedPostgres
from demo.embedded_redis import EmbeddedRedis, find_redis_server
from demo.shop import create_shop

STREAM_KEY: Final = "shop.changes"


class ExampleServers:
    """Postgres with the shop in it and, where there is one, Redis; a context manager."""

    def __init__(self, directory: Path, *, http_port: int) -> None:
        self.directory = directory.resolve()
        self.config_path = self.directory / "walbrook.yaml"
        self.postgres = EmbeddedPostgres(self.directory / "postgres")
        self.redis: EmbeddedRedis | None = None
        if find_redis_server() is not None:
            self.redis = EmbeddedRedis(self.directory / "redis")
        self._http_port = http_port
        self._running = ExitStack()

    @property
    def file_directory(self) -> Path:
        """Where the sink ``file`` writes."""
        return self.directory / "out" / "file"

    @property
    def parquet_directory(self) -> Path:
        """Where the sink ``parquet`` writes."""
        return self.directory / "out" / "parquet"

    def __enter__(self) -> Self:
        with self._running:
            self._running.enter_context(self.postgres)
            if self.redis is not None:
                self._running.enter_context(self.redis)
            with psycopg.connect(self.postgres.dsn, autocommit=True) as connection:
                create_shop(connection)
            self._write_configuration()
            self._running = self._running.pop_all()  # all went well: stop them at the end, not now
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.close()

    def _write_configuration(self) -> None:
        content = {
            "databases": [
                {
                    "name": "shop",
                    "url": self.postgres.url,
                    "slot": {"name": "walbrook_shop", "create_if_not_exists": True},
                    "publication": {"name": "walbrook_shop", "create_if_not_exists": True},
                }
            ],
            "sinks": [
                {"name": name, "initial_backfill": True, "destination": to}
                for name, to in self._destinations().items()
            ],
            "service": {"http": {"port": self._http_port}},
        }
        private = os.open(self.config_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(private, "w") as file:
            yaml.safe_dump(content, file, sort_keys=False)

    def _destinations(self) -> dict[str, dict[str, object]]:
        made: dict[str, dict[str, object]] = {
            "file": {"type": "file", "path": str(self.file_directory)},
            "parquet": {
                "type": "parquet",
                "columns": "json",
                "max_delay_ms": 0,
                "path": str(self.parquet_directory),
            },
        }
        if self.redis is not None:
            made["redis"] = {
                "type": "redis_stream",
                "url": self.redis.url,
                "stream_key": STREAM_KEY,
            }
        return made
