"""A table that changes in every way while the service runs, and dies, and runs again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import redis

from tests.fix_postgres import Database
from tests.lane_on_log import arrived, cursors_of
from tests.service import running

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
    5, 6, 7, 8, ("added", [{"name": "d", "type": "numeric(10,4)"}]),
    ("renamed_table", {"from": {"schema": "public", "name": "item"},
                       "to": {"schema": "public", "name": "thing"}}),
    9, ("replica_identity", {"from": "default", "to": "full"}),
    10, ("added", [{"name": "e", "type": "timestamp with time zone"}]),
    11,
]  # fmt: skip
COLUMNS = {1: "id a", 2: "id a b", 3: "id b", 4: "id c", 5: "id c", 6: "id c", 7: "id c d"}


@pytest.mark.timeout(600)
def test_each_row_has_its_version_and_each_change_is_told_once_through_kills(
    database: Database, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, a text)")
    database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    stream = f"versions-{database.name}"
    asks = {"actions": ["insert", "schema_change"]}
    sinks: list[dict[str, object]] = [
        {"name": "files", "destination": {"type": "file", "path": "out"}, **asks},
        {
            "name": "envelopes",
            "shape": "debezium",
            "destination": {"type": "file", "path": "envelopes"},
            **asks,
        },
        {
            "name": "stream",
            "destination": {"type": "redis_stream", "url": redis_url, "stream_key": stream},
            **asks,
        },
    ]
    with running(database, tmp_path / "service", sinks) as service:
        _execute(database, APART)
        service.until("the first version", "SELECT count(*) > 0 FROM walbrook.schema_versions")
        service.kill()
        service.start()
        _execute(database, WITHIN)
        service.until(
            "a version within the transaction",
            "SELECT count(*) > 0 FROM walbrook.schema_versions WHERE version = 7",
        )
        service.kill("spark_pipeline")
        _execute(database, AFTER)
        service.until_settled()
        assert service.stop() == 0, service.log_tail()

    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", redis_client.xrange(stream))
    in_redis = [
        {
            "action": fields[b"action"].decode(),
            **{name: orjson.loads(fields[name.encode()]) for name in ("record", "metadata")},
        }
        for _, fields in entries
    ]
    for messages in (arrived(tmp_path / "service" / "out"), in_redis):
        _check(messages)
    ops = [message["op"] for message in arrived(tmp_path / "service" / "envelopes")]
    assert (ops.count("c"), ops.count("schema_change")) == (12, 8)
    versions = database.execute(
        "SELECT version, table_name, change IS NULL, announced_lsn < since_lsn "
        "FROM walbrook.schema_versions WHERE table_name <> 'other' ORDER BY version"
    )
    assert versions == [
        (1, "item", True, None),
        (2, "item", False, True),
        (3, "item", False, True),
        (4, "item", False, True),
        (5, "item", False, True),
        (6, "item", False, False),
        (7, "thing", False, False),
        (8, "thing", False, True),
        (9, "thing", False, True),
    ]


def _execute(database: Database, statements: str) -> None:
    """One statement after another, so that each outside BEGIN is a transaction of its own."""
    with database.connect() as connection:
        for statement in statements.split(";"):
            connection.execute(statement.encode())


def _check(messages: list[dict[str, Any]]) -> None:
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
