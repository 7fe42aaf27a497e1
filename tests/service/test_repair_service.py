"""Repair through the whole service: writers go on while the slot is dropped, and after it.

With one source the service ends when the slot is gone, and says what to do.
"""

from __future__ import annotations

import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
import redis

from tests.backfill_rig import applied, stale
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.waiting import until
from tests.walbrook_service import Service, _url, started

_ROWS = 5_000
_ACTS = (
    "INSERT INTO item VALUES (%(id)s, nextval('versions'), 'new', 'short')",
    "UPDATE item SET version = nextval('versions') WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), pad = 'other' WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), id = %(to)s WHERE id = %(id)s",
    "DELETE FROM item WHERE id = %(id)s",
)
_WRITERS = 4


@contextmanager
def _writing(database: Database) -> Iterator[None]:
    over = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with database.connect() as connection:
            while not over.wait(0.01):
                key = chance.randrange(1, _ROWS // _WRITERS) * _WRITERS + seed  # rows of its own
                try:
                    with connection.transaction(force_rollback=chance.random() < 0.1):
                        act = chance.choice(_ACTS)
                        connection.execute(act.encode(), {"id": key, "to": key + _WRITERS})
                except psycopg.errors.UniqueViolation:
                    continue

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(_WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _drop_slot(service: Service) -> None:
    """As somebody does who takes it for unused: its reader is ended, then it is dropped."""

    def dropped() -> bool:
        try:
            service.database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                f"WHERE slot_name = '{service.slot}' AND active;"
            )
            service.database.execute(f"SELECT pg_drop_replication_slot('{service.slot}')")
        except psycopg.errors.ObjectInUse:
            return False
        return True

    until("the slot to be dropped", dropped)


def _of_redis(client: redis.Redis) -> list[dict[str, Any]]:
    entries: Any = client.xrange("items")
    return [
        {key.decode(): orjson.loads(value) if key != b"action" else value.decode()
         for key, value in fields.items()}
        for _, fields in entries
    ]  # fmt: skip


def _check(database: Database, mirror: Database, messages: list[dict[str, Any]]) -> None:
    query = "SELECT id, version, pad, body FROM item ORDER BY id"
    rows = database.execute(query)
    there, held = ({row[0]: row for row in each} for each in (rows, mirror.execute(query)))
    differ = [key for key in sorted({*there, *held}) if there.get(key) != held.get(key)]
    assert not differ, [
        (there.get(key, ())[:2], held.get(key, ())[:2], _about(key, messages)) for key in differ
    ]
    assert stale(messages) == []
    found = applied(messages)
    wanted = {
        f'item ["{key}"]': {"id": key, "version": version, "pad": pad, "body": body}
        for key, version, pad, body in rows
    }
    assert found == wanted


def _about(key: int, messages: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """What was said of a row: action, version, and place."""
    return [
        (each["action"], each["record"]["version"], each["metadata"]["commit_lsn"])
        for each in messages
        if each["record"].get("id") == key  # a gap has none
    ]


def _asked(url: str, body: bytes | None = None) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, data=body)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.sinks
def test_destinations_equal_the_source_after_a_slot_was_dropped_under_load(
    database: Database,
    postgres_server: PostgresServer,
    tmp_path: Path,
    redis_client: redis.Redis,
    redis_url: str,
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, pad text, body text);"
        "ALTER TABLE item ALTER body SET STORAGE EXTERNAL; CREATE SEQUENCE versions START 2;"
        "INSERT INTO item SELECT i, 1, repeat('p', 250),"
        " CASE WHEN i % 20 = 0 THEN repeat('b' || i, 700) END"
        f" FROM generate_series(1, {_ROWS}) AS i; ANALYZE item"
    )
    with fresh_database(postgres_server.dsn) as mirror:
        destinations: dict[str, dict[str, object]] = {
            "mirror": {"type": "postgres", "url": _url(mirror.dsn)},
            "redis": {"type": "redis_stream", "url": redis_url, "stream_key": "items"},
        }
        sinks: list[dict[str, object]] = [
            {"name": name, "database": "shop", "initial_backfill": True, "destination": where}
            for name, where in destinations.items()
        ]
        service = Service(database, tmp_path / "service", sinks)
        with started(service):
            service.until(
                "the backfills",
                "SELECT count(*) = 2 AND bool_and(state = 'done') FROM walbrook.backfills",
            )
            with _writing(database):
                service.until_settled()
                service.until(
                    "a horizon below every cursor",
                    "SELECT min(h.lsn) <= min(c.cursor_lsn) FROM walbrook.horizons h, "
                    "walbrook.consumers c",
                )
                _drop_slot(service)
                until("the service to end", lambda: service.has_ended, 90)
                assert "walbrook repair shop" in service.log.read_text()
                shown = service.run("status")
                assert "walbrook repair shop" in shown.stdout.replace("\n", " ")
                begun = service.run("repair", "shop")
                assert begun.returncode == 0, begun.stderr
                assert "(slot_missing) has begun" in begun.stdout
                service.start()
                service.until_serving()
                done = service.run("repair", "shop", "--status", "--wait")
                assert (done.returncode, "is done" in done.stdout) == (0, True), done.stdout
            service.until_settled()
            _check(database, mirror, _of_redis(redis_client))
            api = f"http://127.0.0.1:{service.http_port()}"
            (told,) = _asked(f"{api}/api/sources/shop/repairs")["data"]
            assert (told["state"], told["tables_whole"]) == ("done", 0)
            assert told["deleted"] > 0
            assert {table["deletes"] for table in told["of_tables"]} == {"compared"}
            with pytest.raises(urllib.error.HTTPError) as well:
                _asked(f"{api}/api/sources/shop/repairs", b"{}")
            assert (well.value.code, b"another service reads slot" in well.value.read()) == (
                409, True,
            )  # fmt: skip
            gaps = database.execute("SELECT consumer, reason, repair FROM walbrook.gaps ORDER BY 1")
            assert gaps == [("mirror", "repaired", told["id"]), ("redis", "repaired", told["id"])]
