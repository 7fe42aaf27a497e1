"""A large backfill into four destinations at once, killed on the way while writers change the rows.

A table with large values, a partitioned one and one without a key. The destinations end equal to
the source; no row of a table with a key goes back in time; none is missing.
"""

from __future__ import annotations

import json
import random
import threading
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
from tests.fix_kafka import Kafka
from tests.fix_postgres import Database
from tests.walbrook_service import Service, _url, started

_ROWS, _KILLS, _WRITERS = 300_000, 3, 4
_KEYED = ("item", "part")
_ACTS = (
    "INSERT INTO item VALUES (%(id)s, nextval('versions'), 'new', 'short')",
    "UPDATE item SET version = nextval('versions') WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), pad = 'other' WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), body = repeat('z', 3000) WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), id = %(to)s WHERE id = %(id)s",
    "DELETE FROM item WHERE id = %(id)s",
    "INSERT INTO part VALUES (%(id)s, nextval('versions'), 'new', 'short')",
    "UPDATE part SET version = nextval('versions') WHERE id = %(id)s",
    "UPDATE part SET version = nextval('versions'), id = %(far)s WHERE id = %(id)s",
    "DELETE FROM part WHERE id = %(id)s",
    "INSERT INTO loose VALUES (nextval('versions'), 'new')",
)


def _fill(database: Database, rows: int) -> None:
    """Half of the rows in ``item``, a third in ``part``, a sixth in ``loose``.

    The service publishes a partitioned table under its own name.
    """
    parted = rows // 3
    database.execute(
        "CREATE SEQUENCE versions START 1000000;"
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, pad text, body text);"
        "ALTER TABLE item ALTER body SET STORAGE EXTERNAL;"
        "CREATE TABLE part (id int PRIMARY KEY, version int NOT NULL, pad text, body text)"
        " PARTITION BY RANGE (id);"
        f"CREATE TABLE low PARTITION OF part FOR VALUES FROM (MINVALUE) TO ({parted // 3});"
        f"CREATE TABLE mid PARTITION OF part FOR VALUES FROM ({parted // 3}) TO ({parted // 2});"
        f"CREATE TABLE high PARTITION OF part FOR VALUES FROM ({parted // 2}) TO (MAXVALUE);"
        "CREATE TABLE loose (number int, pad text); ALTER TABLE loose REPLICA IDENTITY FULL;"
        "INSERT INTO item SELECT i, 1, repeat('p', 250),"
        " CASE WHEN i % 20 = 0 THEN repeat('b' || i, 700) END"
        f" FROM generate_series(1, {rows // 2}) AS i;"
        f"INSERT INTO part SELECT i, 1, repeat('q', 100) FROM generate_series(1, {parted}) AS i;"
        f"INSERT INTO loose SELECT i, repeat('l', 50) FROM generate_series(1, {rows // 6}) AS i;"
        "ANALYZE"
    )


@contextmanager
def _writing(database: Database, rows: int, seed: int) -> Iterator[None]:
    over = threading.Event()

    def write(number: int) -> None:
        chance = random.Random(seed + number)
        with database.connect() as connection:
            while not over.wait(0.01):
                each = chance.randrange(1, rows // 2 // _WRITERS)
                key = each * _WRITERS + number  # rows of its own
                far = (rows // 3 // _WRITERS - each) * _WRITERS + number
                given = {"id": key, "to": key + _WRITERS, "far": far}
                try:
                    with connection.transaction(force_rollback=chance.random() < 0.1):
                        connection.execute(chance.choice(_ACTS).encode(), given)
                except psycopg.errors.UniqueViolation:
                    continue

    threads = [threading.Thread(target=write, args=(number,)) for number in range(_WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class _Destinations:
    """The four, and what a reader finds there."""

    def __init__(
        self, directory: Path, client: redis.Redis, url: str, kafka: Kafka, there: Database
    ) -> None:
        self._directory, self._client, self._url = directory, client, url
        self._kafka, self.there = kafka, there
        self._topic = f"{kafka.prefix}.items"

    def sinks(self) -> list[dict[str, object]]:
        kafka: dict[str, object] = {
            "type": "kafka",
            "bootstrap_servers": [self._kafka.servers],
            "topic": self._topic,
            "exactly_once": True,
            "cursor_topic": f"{self._kafka.prefix}.cursor",
            "create_topics": {"partitions": 1},
        }
        destinations: dict[str, dict[str, object]] = {
            "kafka": kafka,
            "parquet": {
                "type": "parquet",
                "columns": "json",
                "max_delay_ms": 0,
                "path": str(self._directory / "parquet"),
            },
            "postgres": {"type": "postgres", "url": _url(self.there.dsn)},
            "redis": {"type": "redis_stream", "url": self._url, "stream_key": "items"},
        }
        return [
            {"name": name, "database": "shop", "initial_backfill": True, "destination": where}
            for name, where in destinations.items()
        ]

    def messages(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Of each destination that keeps messages, in the order in which they stand there."""
        yield "redis", self._of_redis()
        yield "kafka", [orjson.loads(m.value() or b"") for m in self._kafka.read(self._topic)]
        yield "parquet", self._of_parquet()

    def _of_redis(self) -> list[dict[str, Any]]:
        entries: Any = self._client.xrange("items")
        return [
            {key.decode(): orjson.loads(value) if key != b"action" else value.decode()
             for key, value in fields.items()}
            for _, fields in entries
        ]  # fmt: skip

    def _of_parquet(self) -> list[dict[str, Any]]:
        folder = self._directory / "parquet"
        table = ds.dataset(folder, format="parquet", partitioning="hive").to_table()
        rows = table.sort_by([("commit_lsn", "ascending"), ("commit_idx", "ascending")])
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
            for row in rows.to_pylist()
        ]


_TABLE = "SELECT id, version, pad, body FROM {}"


def _rows(database: Database, table: str) -> dict[int, tuple[Any, ...]]:
    with database.connect() as connection:
        return {row[0]: row for row in connection.execute(_TABLE.format(table).encode())}


def _check(source: Database, name: str, messages: list[dict[str, Any]]) -> None:
    cursors = [(m["metadata"]["commit_lsn"], m["metadata"]["commit_idx"]) for m in messages]
    assert cursors == sorted(set(cursors)), f"{name}: a message came twice, or out of order"
    keyed = [each for each in messages if each["metadata"]["table_name"] in _KEYED]
    assert stale(keyed) == [], name
    found = applied(keyed)
    expected = {
        f'{table} ["{key}"]': dict(zip(("id", "version", "pad", "body"), row, strict=True))
        for table in _KEYED
        for key, row in _rows(source, table).items()
    }
    assert found.keys() == expected.keys(), name
    assert [key for key in expected if found[key] != expected[key]] == [], name
    loose = {
        each["record"]["number"] for each in messages if each["metadata"]["table_name"] == "loose"
    }
    assert loose == {row[0] for row in source.execute("SELECT number FROM loose")}, name


def _check_mirror(source: Database, there: Database) -> None:
    for table in _KEYED:
        assert _rows(there, table) == _rows(source, table), table
    numbers = "SELECT DISTINCT number FROM loose ORDER BY 1"
    assert there.execute(numbers) == source.execute(numbers)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_four_destinations_equal_the_source_after_a_large_backfill_with_kills(
    database: Database, there: Database, tmp_path: Path, redis_client: redis.Redis,
    redis_url: str, kafka: Kafka,
) -> None:  # fmt: skip
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    _fill(database, _ROWS)
    ends = _Destinations(tmp_path, redis_client, redis_url, kafka, there)
    sinks = ends.sinks()
    service = Service(database, tmp_path / "service", sinks)
    with started(service):
        with _writing(database, _ROWS, seed):
            for kill in range(_KILLS):
                passed = _ROWS * len(sinks) * kill // (_KILLS + 1)
                service.until(
                    f"some rows of start {kill + 1}",
                    f"SELECT sum(rows) > {passed} FROM walbrook.backfill_progress",
                    timeout_s=300,
                )
                service.kill()
                service.start()
            service.until_serving()
            service.until(
                "the backfills",
                "SELECT count(*) > 0 AND bool_and(state = 'done') FROM walbrook.backfills",
                timeout_s=600,
            )
        service.until_settled(timeout_s=300)
        assert service.stop() == 0
    assert database.execute("SELECT count(*) FROM walbrook.dead_letters") == [(0,)]
    for name, messages in ends.messages():
        _check(database, name, messages)
    _check_mirror(database, there)
