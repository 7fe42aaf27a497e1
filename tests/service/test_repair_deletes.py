"""Rows that were deleted while there was no slot: found at the destination by their keys.

The destination is a mirror in another Postgres database, or a Redis stream or Parquet files of
which the last message per key counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from tests.backfill_rig import Rig, applied
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.repairing import drop_slot, note_horizon, repaired, until_repaired
from tests.service.test_backfill_service import _of_parquet
from tests.walbrook_service import _url

pytestmark = [pytest.mark.migrated, pytest.mark.usefixtures("no_open_sinks")]

ROWS = 300
SETUP = """
CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, body text);
ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
CREATE TABLE pair (a text, b uuid, version int NOT NULL, PRIMARY KEY (b, a));
CREATE TABLE event (at date, id int, version int NOT NULL, PRIMARY KEY (id, at))
  PARTITION BY RANGE (at);
CREATE TABLE event_1 PARTITION OF event FOR VALUES FROM ('2026-01-01') TO ('2026-07-01');
CREATE TABLE event_2 PARTITION OF event FOR VALUES FROM ('2026-07-01') TO ('2027-01-01');
CREATE TABLE emptied (id int PRIMARY KEY, version int NOT NULL);
"""
FILL = f"""
INSERT INTO item SELECT i, 1, repeat('b' || i, 1000) FROM generate_series(1, {ROWS}) AS i;
INSERT INTO pair SELECT 'k "' || i || E'\\\\ \\t é', md5(i::text)::uuid, 1
  FROM generate_series(1, {ROWS}) AS i;
INSERT INTO event SELECT '2026-01-01'::date + i, i, 1 FROM generate_series(1, {ROWS}) AS i;
INSERT INTO emptied SELECT i, 1 FROM generate_series(1, {ROWS}) AS i;
"""
TABLES = ("item", "pair", "event_1", "event_2", "emptied")


class Destination:
    """Either kind, as rows of each table."""

    def __init__(
        self, kind: str, mirror: Database, client: redis.Redis, url: str, directory: Path
    ) -> None:
        self._kind, self._mirror, self._client = kind, mirror, client
        self._directory = directory / "parquet"
        settings: dict[str, dict[str, object]] = {
            "postgres": {"url": _url(mirror.dsn)},
            "redis_stream": {"url": url, "stream_key": "rows"},
            "parquet": {"columns": "json", "max_delay_ms": 0, "path": str(self._directory)},
        }
        self.settings: dict[str, object] = {"type": kind, **settings[kind]}

    def rows(self, table: str) -> list[Any]:
        if self._kind == "postgres":
            return self._mirror.execute(f"SELECT to_jsonb(t) FROM {table} t ORDER BY t::text")
        found = applied(self.messages())
        records = [row for name, row in found.items() if name.split(" ", 1)[0] == table]
        return sorted(records, key=lambda row: orjson.dumps(row, option=orjson.OPT_SORT_KEYS))

    def messages(self) -> list[dict[str, Any]]:
        if self._kind == "parquet":
            return _of_parquet(self._directory)
        entries: Any = self._client.xrange("rows")
        return [
            {key.decode(): orjson.loads(value) if key != b"action" else value.decode()
             for key, value in fields.items()}
            for _, fields in entries
        ]  # fmt: skip

    def expected(self, source: Database, table: str) -> list[Any]:
        rows = source.execute(f"SELECT to_jsonb(t) FROM {table} t ORDER BY t::text")
        if self._kind == "postgres":
            return rows
        return sorted(
            (row for (row,) in rows), key=lambda row: orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
        )


@pytest.fixture(
    params=[
        "postgres",
        pytest.param("redis_stream", marks=pytest.mark.sinks),
        pytest.param("parquet", marks=pytest.mark.sinks),
    ]
)
def destination(
    request: pytest.FixtureRequest,
    postgres_server: PostgresServer,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> Iterator[Destination]:
    with fresh_database(postgres_server.dsn) as mirror:
        yield Destination(request.param, mirror, redis_client, redis_url, tmp_path)


@pytest.fixture
def rig(database: Database, tmp_path: Path, destination: Destination) -> Rig:
    database.execute(SETUP)
    return Rig(database, tmp_path, sink={"destination": destination.settings})


def lose_slot(rig: Rig) -> None:
    with rig.running():
        rig.database.execute(FILL)
        rig.until_delivered()
    note_horizon(rig)
    drop_slot(rig)


def write_without_slot(rig: Rig, seed: int) -> None:
    """Inserts, updates of keys too, deletes and rollbacks."""
    chance = random.Random(seed)
    with rig.database.connect() as connection:
        for number in range(60):
            at = chance.randrange(1, ROWS)
            for statement in (
                f"INSERT INTO item VALUES ({ROWS + number + 1}, 2, 'new')",
                f"UPDATE item SET version = version + 1 WHERE id = {at}",
                f"UPDATE item SET id = {10 * ROWS + number} WHERE id = {at + 1}",
                f"DELETE FROM item WHERE id = {at + 2}",
                f"DELETE FROM pair WHERE b = md5('{at}')::uuid",
                f"UPDATE pair SET a = 'other {number}' WHERE b = md5('{at + 1}')::uuid",
                f"UPDATE event SET at = '2026-12-01', version = 2 WHERE id = {at}",
                f"DELETE FROM event WHERE id = {at + 1}",
            ):
                with connection.transaction(force_rollback=chance.random() < 0.2):
                    connection.execute(statement.encode())
    rig.database.execute(
        "TRUNCATE emptied; INSERT INTO emptied VALUES (5, 2), (1000, 2);"
        # A row that is there again under its key.
        "DELETE FROM item WHERE id = 290; INSERT INTO item VALUES (290, 9, 'again')"
    )


def check_equal(rig: Rig, destination: Destination) -> None:
    for table in TABLES:
        assert destination.rows(table) == destination.expected(rig.database, table), table


def test_the_destination_equals_the_source_after_a_repair(
    rig: Rig, destination: Destination
) -> None:
    lose_slot(rig)
    write_without_slot(rig, 1)
    repaired(rig)
    with rig.running():
        rig.database.execute("DELETE FROM item WHERE id < 20; UPDATE pair SET version = 7")
        done = until_repaired(rig)
        rig.database.execute("INSERT INTO item VALUES (0, 5, 'later'); DELETE FROM event")
        rig.until_delivered()
    check_equal(rig, destination)
    assert (done["found"], done["tables_whole"]) == ("slot_missing", 0)
    assert done["deleted"] > ROWS - 2  # those of the table that was emptied, and more
    told = rig.rows(
        "SELECT table_name, rows_read, deletes, kept_reason FROM walbrook.repaired_tables "
        "ORDER BY table_name"
    )
    assert told == [(table, "xmin", "compared", None) for table in sorted(TABLES)]


def test_a_delete_of_a_row_that_came_back_meanwhile_is_dropped(
    rig: Rig, destination: Destination
) -> None:
    lose_slot(rig)
    rig.database.execute("DELETE FROM item WHERE id <= 50")
    repaired(rig)
    with rig.source.reading():
        # The changes are in the log before anything is compared.
        rig.database.execute("INSERT INTO item SELECT i, 3, 'back' FROM generate_series(1, 20) i")
        with rig.serving():
            done = until_repaired(rig)
    check_equal(rig, destination)
    assert done["deleted"] == 30
