"""Three tables, every kind of change: the sinks hold exactly what the source says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psycopg
import pyarrow.dataset
import redis

from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.walbrook_service import Service

SCHEMA = """
CREATE TABLE customer (id bigint PRIMARY KEY, name text NOT NULL, balance numeric(20, 4));
CREATE TABLE "order line" (order_id int, line int, note text, extra jsonb,
                           PRIMARY KEY (order_id, line));
CREATE TABLE measurement (id int PRIMARY KEY, at timestamptz, value float8);
ALTER TABLE measurement REPLICA IDENTITY FULL;
CREATE SCHEMA ledger;
CREATE TABLE ledger.entry (seq bigserial, tbl text, op text, pk text);
CREATE FUNCTION ledger.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.entry (tbl, op, pk) VALUES (
        TG_TABLE_NAME, lower(TG_OP),
        CASE WHEN TG_TABLE_NAME = 'order line'
             THEN to_jsonb(coalesce(NEW, OLD)) ->> 'order_id' || ',' ||
                  (to_jsonb(coalesce(NEW, OLD)) ->> 'line')
             ELSE to_jsonb(coalesce(NEW, OLD)) ->> 'id' END);
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON customer
    FOR EACH ROW EXECUTE FUNCTION ledger.note();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON "order line"
    FOR EACH ROW EXECUTE FUNCTION ledger.note();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON measurement
    FOR EACH ROW EXECUTE FUNCTION ledger.note();
"""
KEYS = {"customer": ("id",), "order line": ("order_id", "line"), "measurement": ("id",)}
BIG = 50_000

Message = dict[str, Any]


class Exact:
    """All kinds of sinks for three tables, whose triggers keep a ledger."""

    def __init__(
        self, database: Database, client: redis.Redis, redis_url: str, endpoint: Endpoint
    ) -> None:
        database.execute(SCHEMA)
        self._database, self._client, self._endpoint = database, client, endpoint
        self._stream = f"exact-{database.name}"
        all_three = {"include_tables": [f"public.{table}" for table in KEYS]}
        hook = {"type": "webhook", "url": endpoint.url}
        entries = {"type": "redis_stream", "url": redis_url, "stream_key": self._stream}
        self.sinks: list[dict[str, object]] = [
            {
                "name": "exact_files",
                "source": all_three,
                "destination": {"type": "file", "path": "jsonl"},
            },
            {
                "name": "lake",
                "source": all_three,
                "destination": {
                    "type": "parquet",
                    "columns": "json",
                    "max_delay_ms": 0,
                    "path": "parquet",
                },
            },
            {"name": "exact_stream", "source": all_three, "destination": entries},
            {
                "name": "exact_hook",
                "source": all_three,
                "batch_size": 500,
                "partition_count": 1,  # all of them in one order
                "destination": hook,
            },
            {
                "name": "customer_deletes",
                "source": {"include_tables": ["customer"]},
                "actions": ["delete"],
                "destination": {"type": "file", "path": "deletes"},
            },
        ]

    def check(self, service: Service) -> None:
        with self._database.connect() as connection:
            _write(connection)
        service.until_settled(only=[str(sink["name"]) for sink in self.sinks])
        _cursors_say_so(service)
        directory = service.directory
        sources: dict[str, Callable[[], list[Message]]] = {
            "files": lambda: _jsonl(directory / "jsonl"),
            "lake": lambda: _parquet(directory / "parquet"),
            "stream": lambda: _redis(self._client, self._stream),
            "hook": lambda: [m for r in self._endpoint.accepted for m in _json(r.body)["data"]],
        }
        for sink, read in sources.items():
            messages = read()
            assert _ledger(self._database) == [_noted(m) for m in messages], sink
            assert _replayed(messages) == _tables(self._database), sink
        assert Counter(_noted(m)[:2] for m in _jsonl(directory / "deletes")) == {
            ("customer", "delete"): 10
        }


def _write(connection: psycopg.Connection[tuple[Any, ...]]) -> None:
    run = connection.execute
    run("INSERT INTO customer SELECT i, 'name ' || i, i * 1.0001 FROM generate_series(1, 100) i")
    run(
        """INSERT INTO "order line" SELECT i, i % 3, 'a "quoted" \\ note' || chr(10), """
        """jsonb_build_object('n', i, 'big', 18446744073709551616) FROM generate_series(1, 100) i"""
    )
    run(
        "INSERT INTO measurement SELECT i, now() + i * interval '1 s', 'NaN' "
        "FROM generate_series(1, 50) i"
    )
    run("UPDATE customer SET balance = 22.2200, name = 'ünï 😀' WHERE id % 7 = 0")
    run("UPDATE measurement SET value = id / 3.0 WHERE id % 2 = 0")
    run("""UPDATE "order line" SET order_id = order_id + 1000 WHERE order_id <= 5""")
    run("DELETE FROM customer WHERE id % 10 = 0")
    with connection.transaction(force_rollback=True):
        run("INSERT INTO customer VALUES (-1, 'never', 0)")
        run("DELETE FROM measurement")
    with connection.transaction():
        run(f"INSERT INTO measurement SELECT i, now(), i FROM generate_series(1000, {999 + BIG}) i")
        run("UPDATE customer SET name = 'in the middle' WHERE id = 1")
    run("DELETE FROM measurement WHERE id BETWEEN 1000 AND 1999")


def _cursors_say_so(service: Service) -> None:
    rows = service.state.execute(
        "SELECT source, consumer, lag_bytes, lag_seconds, moved_at FROM walbrook.cursors"
    )
    wanted = {(sink["database"], sink["name"]) for sink in service.sinks()}
    sources = {source for source, _ in wanted}
    assert {(row[0], row[1]) for row in rows} == wanted | {(source, None) for source in sources}
    assert all(lag >= 0 for _, _, lag, *_ in rows)
    status = service.run("status")
    assert status.returncode == 0, status.stderr
    assert "customer_deletes" in status.stdout
    assert "streaming" in status.stdout


def _ledger(database: Database) -> list[tuple[str, str, str]]:
    rows = database.execute("SELECT tbl, op, pk FROM ledger.entry ORDER BY seq")
    return [(tbl, op, pk) for tbl, op, pk in rows]


def _noted(message: Message) -> tuple[str, str, str]:
    table = message["metadata"]["table_name"]
    return table, message["action"], ",".join(str(message["record"][c]) for c in KEYS[table])


def _tables(database: Database) -> dict[tuple[str, str], Any]:
    found = {}
    for table in KEYS:
        for (row,) in database.execute(f'SELECT to_jsonb(t)::text FROM "{table}" t'):
            record = _spelled(_json(row))
            found[table, ",".join(record[c] for c in KEYS[table])] = record
    return found


def _replayed(messages: list[Message]) -> dict[tuple[str, str], Any]:
    """The tables as the messages make them."""
    found: dict[tuple[str, str], Any] = {}
    for message in messages:
        table, action, key = _noted(message)
        record = _spelled(message["record"])
        old = {c: message["changes"].get(c) for c in KEYS[table]} if message["changes"] else {}
        if any(value is not None for value in old.values()):
            before = [str(old[c]) if old[c] is not None else record[c] for c in KEYS[table]]
            found.pop((table, ",".join(before)), None)
        if action == "delete":
            del found[table, key]
        else:
            found[table, key] = record
    return found


def _spelled(row: dict[str, Any]) -> dict[str, Any]:
    """Times in one spelling: Postgres' jsonb has an offset where messages have a Z."""
    at = row.get("at")
    return row if at is None else row | {"at": at.replace("+00:00", "Z")}


def _jsonl(directory: Path) -> list[Message]:
    files = sorted(directory.glob("*.jsonl"))
    return [_json(line) for file in files for line in file.read_bytes().splitlines()]


def _parquet(directory: Path) -> list[Message]:
    table = pyarrow.dataset.dataset(directory, format="parquet", partitioning="hive").to_table()
    rows = sorted(table.to_pylist(), key=lambda r: (r["commit_lsn"], r["commit_idx"]))
    return [
        {
            "record": _json(row["record"]),
            "changes": _json(row["changes"] or "null"),
            "action": row["action"],
            "metadata": {"table_name": row["table_name"]},
        }
        for row in rows
    ]


def _redis(client: redis.Redis, stream: str) -> list[Message]:
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(stream))
    return [
        {
            "record": _json(fields[b"record"]),
            "changes": _json(fields[b"changes"]),
            "action": fields[b"action"].decode(),
            "metadata": _json(fields[b"metadata"]),
        }
        for _, fields in entries
    ]


def _json(text: str | bytes) -> Any:
    """JSON with its numbers as they are written: none may be rounded on the way."""
    return json.loads(text, parse_int=str, parse_float=str)
