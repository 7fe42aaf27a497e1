"""Sinks in different shapes and forms: one feed, and each has its own messages."""

from __future__ import annotations

from typing import Any

import orjson
import redis

from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.walbrook_service import Service

SCHEMA = """
CREATE TABLE reading (id bigint PRIMARY KEY, at timestamptz, value numeric(20, 4));
ALTER TABLE reading REPLICA IDENTITY FULL;
"""
AT, AT_US = "2026-01-02 01:04:05.6+00", 1767315845600000
BIG = 30_000  # more than the driver decodes by itself


class Shapes:
    """Files in four shapes and forms, and a stream."""

    def __init__(self, database: Database, client: redis.Redis, redis_url: str) -> None:
        database.execute(SCHEMA)
        self._database, self._client = database, client
        self._stream = f"shapes-{database.name}"
        entries = {"type": "redis_stream", "url": redis_url, "stream_key": self._stream}
        self.sinks: list[dict[str, object]] = [
            {"name": "plain"},
            {"name": "micro", "timestamp_format": "unix_microsecond"},
            {"name": "envelope", "shape": "debezium", "number_format": "string"},
            {"name": "bare", "shape": "record", "timestamp_format": "postgres"},
        ]
        for sink in self.sinks:
            sink["destination"] = {"type": "file", "path": str(sink["name"])}
        self.sinks.append({"name": "shaped_stream", "shape": "debezium", "destination": entries})
        for sink in self.sinks:
            sink["source"] = {"include_tables": ["public.reading"]}

    def check(self, service: Service) -> None:
        names = [str(sink["name"]) for sink in self.sinks]
        self._database.execute(f"INSERT INTO reading VALUES (9007199254740993, '{AT}', 1.5)")
        self._database.execute("UPDATE reading SET value = 2.5")
        service.until_settled(only=names)
        self._database.execute(
            f"INSERT INTO reading SELECT i, '{AT}', i FROM generate_series(1, {BIG}) i"
        )
        self._database.execute("DELETE FROM reading WHERE id = 1")
        service.until_settled(only=names)
        self._check_messages({name: arrived(service.directory / name) for name in names[:4]})

    def _check_messages(self, held: dict[str, list[dict[str, Any]]]) -> None:
        assert {name: len(messages) for name, messages in held.items()} == dict.fromkeys(
            held, BIG + 3
        )

        big = 9007199254740993
        at = "2026-01-02T01:04:05.6Z"
        assert held["plain"][1]["record"] == {"id": big, "at": at, "value": 2.5}
        assert held["plain"][1]["changes"] == {"value": 1.5}
        assert held["micro"][1]["record"]["at"] == AT_US
        assert isinstance(held["micro"][1]["metadata"]["commit_timestamp"], int)
        assert held["bare"][1] == {"id": big, "at": AT, "value": 2.5}

        insert, update, *_, delete = held["envelope"]
        old = {"id": str(big), "at": at, "value": "1.5000"}
        assert (insert["op"], insert["before"], insert["after"]) == ("c", None, old)
        assert (update["op"], update["before"]) == ("u", old)
        assert update["after"] == {**old, "value": "2.5000"}
        assert (delete["op"], delete["after"], delete["before"]["id"]) == ("d", None, "1")
        assert (update["source"]["name"], update["source"]["table"]) == ("shop", "reading")

        cursors = [
            (each["source"]["lsn"], each["source"]["commit_idx"]) for each in held["envelope"]
        ]
        found: Any = self._client.xrange(self._stream)
        assert [tuple(map(int, entry_id.split(b"-"))) for entry_id, _ in found] == cursors
        value = orjson.loads(found[1][1][b"value"])
        assert (value["op"], value["before"]["id"], value["after"]["value"]) == ("u", big, 2.5)
