"""A standby service takes over when the service before it is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import orjson
import psycopg
import pytest
import redis
import yaml

from cdc.config import load
from cdc.service.process.ownership import Ownership
from cdc.stop import StopSignal
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import Service, started

TAKES_OVER_S = 15.0
_PACE_S = 0.005


class Writer:
    """Commits one row after the other, each in a transaction of its own."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.committed = 0

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._ended.wait(_PACE_S):
                connection.execute("INSERT INTO item VALUES (%s)", (self.committed + 1,))
                self.committed += 1


@contextmanager
def standing_by(service: Service) -> Iterator[str]:
    """The service as a standby, and its address."""
    service.start("--standby")
    try:
        yield f"http://127.0.0.1:{service.http_port()}"
    finally:
        service.kill()


def rows_of(entries: object) -> list[int]:
    """The rows of entries of the stream, in their order."""
    assert isinstance(entries, list)
    return [int(orjson.loads(fields[b"record"])["id"]) for _, fields in entries]


def last_delivered(client: redis.Redis) -> int:
    return max(rows_of(client.xrevrange("items", count=1)), default=0)


@pytest.mark.parametrize("log", ["shared", "refetched"])
def test_a_standby_takes_over_from_a_killed_service_and_loses_and_repeats_nothing(
    log: str, database: Database, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    sinks: list[dict[str, object]] = [
        {
            "name": "items",
            "source": {"include_tables": ["public.item"]},
            "destination": {"type": "redis_stream", "url": redis_url, "stream_key": "items"},
        }
    ]
    # A machine of its own has no log yet; the slot still has what is not settled.
    durability = {"durability": "fsync" if log == "shared" else "disk"}
    first = Service(database, tmp_path / "first", sinks, {"log": durability})
    second = Service(database, tmp_path / "second", sinks, {"log": durability})
    if log == "shared":
        second.configure({"log": {"directory": str(first.directory / "log")}})
    with started(first), standing_by(second) as standby, Writer(database.dsn) as writer:
        until("changes to flow", lambda: last_delivered(redis_client) > 100)
        assert httpx.get(f"{standby}/healthz").json() == {"status": "alive", "role": "standby"}
        assert httpx.get(f"{standby}/health").json() == {"status": "standby"}
        ready = httpx.get(f"{standby}/readyz")
        assert (ready.status_code, ready.json()["role"]) == (503, "standby")
        assert "walbrook_standby 1.0" in httpx.get(f"{standby}/metrics").text

        killed_at, known = time.monotonic(), writer.committed
        first.kill()
        until("a new delivery", lambda: last_delivered(redis_client) > known)
        took_s = time.monotonic() - killed_at
        assert took_s < TAKES_OVER_S, f"the first new delivery came after {took_s:.1f} s"
        until("the standby to be ready", lambda: httpx.get(f"{standby}/readyz").status_code == 200)
        assert httpx.get(f"{standby}/healthz").json() == {"status": "alive", "role": "active"}

        writer.end()
        until("the last change", lambda: last_delivered(redis_client) == writer.committed)
        assert rows_of(redis_client.xrange("items")) == [*range(1, writer.committed + 1)]


def test_a_standby_waits_for_a_state_database_that_restarts_and_ends_when_asked(
    database: Database, tmp_path: Path
) -> None:
    here = "application_name = 'walbrook:standby' AND datname = current_database()"
    waits = f"SELECT count(*) FROM pg_stat_activity WHERE {here}"
    held = "SELECT pg_advisory_lock(hashtextextended('walbrook.source.shop', 0))"
    with psycopg.connect(database.dsn, autocommit=True) as other:
        other.execute(held)
        service = Service(database, tmp_path, [])
        with standing_by(service):
            service.until("the standby to wait", waits)
            ended = database.execute(
                f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {here}"
            )
            assert ended == [(True,)]
            service.until("the standby to wait again", waits)
            assert service.stop() == 0
    nothing = database.execute("SELECT to_regnamespace('walbrook') IS NULL")
    assert nothing == [(True,)], "a standby changes nothing"


def test_a_standby_of_two_databases_holds_the_lock_of_neither_while_it_waits(
    database: Database, tmp_path: Path
) -> None:
    service = Service(database, tmp_path, [])
    settings = yaml.safe_load(service.config.read_text())
    depot = {**settings["databases"][0], "name": "depot", "slot": {"name": "depot"}}
    settings["databases"].append(depot)
    service.config.write_text(yaml.safe_dump(settings))
    lock = "SELECT pg_try_advisory_lock(hashtextextended('walbrook.source.{}', 0))"
    unlock = lock.replace("try_advisory_lock", "advisory_unlock")
    stop, ownership = StopSignal(), Ownership(load(service.config))
    with (
        psycopg.connect(database.dsn, autocommit=True) as other,
        ThreadPoolExecutor(1) as beside,
    ):
        assert other.execute(lock.format("depot").encode()).fetchone() == (True,)
        waits = beside.submit(ownership.stand_by, stop)
        try:
            here = "application_name = 'walbrook:standby' AND datname = current_database()"
            tries = f"SELECT count(*) FROM pg_stat_activity WHERE {here}"
            until("the standby to wait", lambda: database.execute(tries) == [(1,)])

            def taken(source: str) -> bool:
                return other.execute(lock.format(source).encode()).fetchone() == (True,)

            until("the lock of the other database", lambda: taken("shop"))
            for source in ("shop", "depot"):
                other.execute(unlock.format(source).encode())
            assert waits.result(60)
            with ownership:
                assert not taken("shop")
                assert not taken("depot")
        finally:
            stop.request()
