"""Backfill through the whole service, which is killed on the way while writers change the rows.

The destinations end equal to the source; no row goes back in time; none is missing; and those that
keep a position get no message twice.
"""

from __future__ import annotations

import json
import random
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pyarrow.dataset as ds
import pytest
import redis

from tests.backfill_rig import applied, stale
from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.waiting import until
from tests.walbrook_service import Service, started

_ROWS = 30_000
_ACTS = (
    "INSERT INTO item VALUES (%(id)s, nextval('versions'), 'new', 'short')",
    "UPDATE item SET version = nextval('versions') WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), pad = 'other' WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), id = %(to)s WHERE id = %(id)s",
    "DELETE FROM item WHERE id = %(id)s",
)


def _fill(database: Database, rows: int) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, pad text, body text);"
        "ALTER TABLE item ALTER body SET STORAGE EXTERNAL; CREATE SEQUENCE versions START 2;"
        "INSERT INTO item SELECT i, 1, repeat('p', 250),"
        " CASE WHEN i % 20 = 0 THEN repeat('b' || i, 700) END"
        f" FROM generate_series(1, {rows}) AS i; ANALYZE item"
    )


@contextmanager
def _writing(database: Database, rows: int, writers: int) -> Iterator[None]:
    over = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with database.connect() as connection:
            while not over.wait(0.02):
                key = chance.randrange(1, rows // writers) * writers + seed  # rows of its own
                try:
                    with connection.transaction(force_rollback=chance.random() < 0.1):
                        act = chance.choice(_ACTS)
                        connection.execute(act.encode(), {"id": key, "to": key + writers})
                except psycopg.errors.UniqueViolation:
                    continue

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _sinks(directory: Path, redis_url: str) -> list[dict[str, object]]:
    destinations: dict[str, dict[str, object]] = {
        "files": {"type": "file", "path": str(directory / "files")},
        "parquet": {
            "type": "parquet",
            "columns": "json",
            "max_delay_ms": 0,
            "path": str(directory / "parquet"),
        },
        "redis": {"type": "redis_stream", "url": redis_url, "stream_key": "items"},
    }
    return [
        {"name": name, "database": "shop", "initial_backfill": True, "destination": where}
        for name, where in destinations.items()
    ]


def _of_redis(client: redis.Redis) -> list[dict[str, Any]]:
    entries: Any = client.xrange("items")
    return [
        {key.decode(): orjson.loads(value) if key != b"action" else value.decode()
         for key, value in fields.items()}
        for _, fields in entries
    ]  # fmt: skip


def _of_parquet(directory: Path) -> list[dict[str, Any]]:
    table = ds.dataset(directory, format="parquet", partitioning="hive").to_table()
    rows = table.sort_by([("commit_lsn", "ascending"), ("commit_idx", "ascending")]).to_pylist()
    return [
        {
            "action": row["action"],
            "record": json.loads(row["record"]),
            "changes": json.loads(row["changes"] or "{}"),
            "metadata": {
                "table_name": row["table_name"],
                "record_pks": json.loads(row["record_pks"]),
                "unchanged": json.loads(row["unchanged"] or "[]"),
                "commit_lsn": row["commit_lsn"],
                "commit_idx": row["commit_idx"],
            },
        }
        for row in rows
    ]


def _check(database: Database, messages: list[dict[str, Any]]) -> None:
    cursors = [(m["metadata"]["commit_lsn"], m["metadata"]["commit_idx"]) for m in messages]
    assert cursors == sorted(set(cursors)), "a message came twice, or out of order"
    assert stale(messages) == []
    with database.connect() as connection:
        rows = connection.execute("SELECT id, version, pad, body FROM item").fetchall()
    found = applied(messages)
    assert len(found) == len(rows)
    for key, version, pad, body in rows:
        wanted = {"id": key, "version": version, "pad": pad, "body": body}
        assert found[f'item ["{key}"]'] == wanted


def _run(
    database: Database, directory: Path, client: redis.Redis, url: str, rows: int, kills: int
) -> None:
    _fill(database, rows)
    service = Service(database, directory / "service", _sinks(directory, url))
    with started(service):
        with _writing(database, rows, 4):
            for kill in range(kills):
                service.until(
                    f"some rows of start {kill + 1}",
                    f"SELECT sum(rows) > {rows * 3 * kill // (kills + 1)} "
                    "FROM walbrook.backfill_progress",
                    timeout_s=300,
                )
                service.kill()
                service.start()
            service.until_serving()
            service.until(
                "the backfills",
                "SELECT count(*) = 3 AND bool_and(state = 'done') FROM walbrook.backfills",
                timeout_s=600,
            )
        service.until_settled(timeout_s=300)
        assert service.stop() == 0
    _check(database, arrived(directory / "files"))
    _check(database, _of_redis(client))
    _check(database, _of_parquet(directory / "parquet"))


@pytest.mark.sinks
@pytest.mark.timeout(900)
def test_destinations_equal_the_source_after_kills_during_a_backfill(
    database: Database, tmp_path: Path, redis_client: redis.Redis, redis_url: str
) -> None:
    _run(database, tmp_path, redis_client, redis_url, _ROWS, 2)


def test_a_backfill_is_started_watched_and_changed_from_outside(
    database: Database, tmp_path: Path
) -> None:
    """By the command line and over HTTP; metrics say how far it is, health what has failed."""
    _fill(database, 1_000)
    sink: dict[str, object] = {
        "name": "files",
        "database": "shop",
        "filter": "action <> 'read' OR record.id > 900",
        "shape": "debezium",
        "destination": {"type": "file", "path": str(tmp_path / "files")},
    }
    shaped: dict[str, object] = {
        "name": "shaped",
        "database": "shop",
        "transform": "struct(record.id AS number, action AS act)",
        "destination": {"type": "file", "path": str(tmp_path / "shaped")},
    }
    service = Service(database, tmp_path / "service", [sink, shaped])
    with started(service):
        refused = service.run("backfill", "start", "files", "public.itme")
        assert refused.returncode != 0
        assert "did you mean public.item?" in refused.stderr
        assert database.execute("SELECT count(*) FROM walbrook.backfills") == [(0,)]
        failed = service.run("backfill", "start", "files", "item", "--where", "idd > 1", "--wait")
        assert failed.returncode == 1
        assert "is failed" in failed.stdout
        assert "a where that fits the table" in failed.stderr
        service.until(
            "the event",
            "SELECT count(*) = 1 FROM walbrook.health_events WHERE kind = 'backfill_failed'",
        )
        until("the log", lambda: "backfill.failed" in service.log.read_text())
        ((number,),) = database.execute("SELECT id FROM walbrook.backfills")
        service.run("backfill", "cancel", str(number))
        done = service.run("backfill", "start", "files", "public.item", "--wait")
        assert (done.returncode, "is done" in done.stdout) == (0, True), done.stderr
        api = f"http://127.0.0.1:{service.http_port()}"
        body = json.dumps({"table": "item", "rows_per_second": 10}).encode()
        (begun,) = [_asked(f"{api}/api/consumers/files/backfills", body)]
        paused = _asked(f"{api}/api/backfills/{begun['id']}/pause", b"")
        assert paused["state"] == "paused"
        assert "paused" in service.run("backfill", "status").stdout
        resumed = _asked(f"{api}/api/backfills/{begun['id']}/resume", b"")
        assert resumed["state"] == "waiting"
        cancelled = service.run("backfill", "cancel", str(begun["id"]))
        assert "is cancelled" in cancelled.stdout
        (latest, *_) = _asked(f"{api}/api/consumers/files/backfills")["data"]
        assert (latest["id"], latest["state"]) == (begun["id"], "cancelled")
        done = service.run("backfill", "start", "shaped", "item", "--where", "id < 4", "--wait")
        assert done.returncode == 0, done.stderr
        with urllib.request.urlopen(f"{api}/metrics") as answer:
            metrics = answer.read().decode()
        assert 'walbrook_backfill_rows{consumer="files",state="done"} 1000.0' in metrics
    first = [each for each in arrived(tmp_path / "files") if each["op"] == "r"][:100]
    assert [each["after"]["id"] for each in first] == list(range(901, 1001))
    assert {each["source"]["snapshot"] for each in first} == {"incremental"}
    assert arrived(tmp_path / "shaped") == [{"number": i, "act": "read"} for i in (1, 2, 3)]


def _asked(url: str, body: bytes | None = None) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, data=body)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
