"""A table that changes in every way: each row has its version, each schema change comes once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import orjson
import redis

from tests.fix_postgres import Database
from tests.log_pipeline import arrived, cursors_of

APART = """
INSERT INTO item VALUES (1, 'x');
ALTER TABLE item ADD b int;
INSERT INTO item VALUES (2, 'x', 2);
ALTER TABLE item DROP a;
INSERT INTO item VALUES (3, 3);
ALTER TABLE item RENAME b TO c;
INSERT INTO item VALUES (4, 4);
ALTER TABLE item ALTER c TYPE bigint;
INSERT INTO item VALUES (5, 5);
"""
WITHIN = """
BEGIN;
INSERT INTO item VALUES (6, 6);
ALTER TABLE item ADD d numeric(10,4);
INSERT INTO item VALUES (7, 7, 7);
ALTER TABLE item RENAME TO thing;
INSERT INTO thing VALUES (8, 8, 8);
COMMIT
"""
AFTER = """
INSERT INTO thing VALUES (9, 9, 9);
ALTER TABLE thing REPLICA IDENTITY FULL;
INSERT INTO thing VALUES (10, 10, 10);
BEGIN;
INSERT INTO other VALUES (1);
ALTER TABLE thing ADD e timestamptz;
INSERT INTO thing VALUES (11, 11, 11);
COMMIT
"""
# Between the rows, by their ids: what each version changed.
EXPECTED: list[object] = [
    1, ("added", [{"name": "b", "type": "integer"}]),
    2, ("dropped", [{"name": "a", "type": "text"}]),
    3, ("renamed", [{"from": "b", "to": "c"}]),
    4, ("retyped", [{"name": "c", "from": "integer", "to": "bigint"}]),
    5, 6, ("added", [{"name": "d", "type": "numeric(10,4)"}]),
    7, ("renamed_table", {"from": {"schema": "public", "name": "item"},
                          "to": {"schema": "public", "name": "thing"}}),
    8, 9, ("replica_identity", {"from": "default", "to": "full"}),
    10, ("added", [{"name": "e", "type": "timestamp with time zone"}]),
    11,
]  # fmt: skip
COLUMNS = {1: "id a", 2: "id a b", 3: "id b", 4: "id c", 5: "id c", 6: "id c", 7: "id c d"}


class Versions:
    """Tables ``item``, which becomes ``thing``, and ``other``; sinks of two shapes and kinds."""

    def __init__(
        self, database: Database, client: redis.Redis, redis_url: str, directory: Path
    ) -> None:
        database.execute("CREATE TABLE item (id int PRIMARY KEY, a text)")
        database.execute("CREATE TABLE other (id int PRIMARY KEY)")
        self._database, self._client, self._url = database, client, redis_url
        self._files, self._envelopes = directory / "versions", directory / "envelopes"
        self._stream = f"versions-{database.name}"

    def sinks(self, besides: list[str]) -> list[dict[str, object]]:
        """Of all tables but the named ones: an included table could not be renamed."""
        asks = {
            "actions": ["insert", "schema_change"],
            "source": {"exclude_tables": [f"public.{table}" for table in besides]},
        }
        stream = {"type": "redis_stream", "url": self._url, "stream_key": self._stream}
        return [
            {
                "name": "versions",
                "destination": {"type": "file", "path": str(self._files)},
                **asks,
            },
            {
                "name": "envelopes",
                "shape": "debezium",
                "destination": {"type": "file", "path": str(self._envelopes)},
                **asks,
            },
            {"name": "versions_stream", "destination": stream, **asks},
        ]

    def execute(self, statements: str) -> None:
        """One statement after another, so that each outside BEGIN is a transaction of its own."""
        with self._database.connect() as connection:
            for statement in statements.split(";"):
                connection.execute(statement.encode())

    def check(self) -> None:
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self._client.xrange(self._stream))
        in_redis = [
            {
                "action": fields[b"action"].decode(),
                **{name: orjson.loads(fields[name.encode()]) for name in ("record", "metadata")},
            }
            for _, fields in entries
        ]
        for messages in (arrived(self._files), in_redis):
            _check_messages(messages)
        ops = [message["op"] for message in arrived(self._envelopes)]
        assert (ops.count("c"), ops.count("schema_change")) == (12, 8)
        versions = self._database.execute(
            "SELECT version, table_name, change IS NULL, "
            "(announced_lsn, announced_idx) < (since_lsn, since_idx) "
            "FROM walbrook.schema_versions WHERE table_name IN ('item', 'thing') ORDER BY version"
        )
        assert versions == [
            (1, "item", True, None),
            (2, "item", False, True),
            (3, "item", False, True),
            (4, "item", False, True),
            (5, "item", False, True),
            (6, "item", False, True),
            (7, "thing", False, True),
            (8, "thing", False, True),
            (9, "thing", False, True),
        ]


def _check_messages(messages: list[dict[str, Any]]) -> None:
    cursors = cursors_of(messages)
    assert all(one < other for one, other in pairwise(cursors)), cursors
    seen: list[object] = []
    for message in messages:
        record = message["record"]
        if message["metadata"]["table_name"] == "other":
            continue
        if message["action"] == "insert":
            seen.append(record["id"])
            expected = COLUMNS.get(record["id"], "id c d" if record["id"] < 11 else "id c d e")
            assert " ".join(record) == expected
            continue
        common = ("version", "table", "columns")
        told = [(key, value) for key, value in record.items() if value and key not in common]
        assert len(told) == 1, record
        seen += told
    assert seen == EXPECTED
    numbers = [m["record"]["version"] for m in messages if m["action"] == "schema_change"]
    assert numbers == list(range(2, 10))
