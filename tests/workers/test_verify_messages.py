"""Destinations that hold messages, compared with their source: the last one of each key counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from cdc.config import KafkaDestination, ParquetDestination, RedisStreamDestination
from sinks.lakehouse.names import LakeTarget
from tests.backfill_rig import Rig
from tests.fix_kafka import Kafka
from tests.fix_postgres import Database
from tests.fix_s3 import S3
from tests.fix_stores import s3_store
from tests.parquet_lake import ParquetLake
from tests.workers.test_verify import _keys, _writing

pytestmark = pytest.mark.migrated

_ITEMS = (
    "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, note text, body text);"
    "ALTER TABLE item ALTER body SET STORAGE EXTERNAL;"
    "INSERT INTO item SELECT i, 1, 'note ' || i, CASE WHEN i % 9 = 0 THEN repeat('b', 3000) END"
    " FROM generate_series(1, 1500) i"
)


@pytest.fixture(
    params=[
        "redis_stream", "parquet", "parquet typed", "parquet in a store",
        pytest.param("kafka", marks=pytest.mark.sinks),
    ]
)  # fmt: skip
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    if request.param == "parquet":
        return ParquetDestination(columns="json", max_delay_ms=0, path=tmp_path / "parquet")
    if request.param == "parquet typed":
        return ParquetDestination(max_delay_ms=100, path=tmp_path / "parquet")
    if request.param == "parquet in a store":
        lake = ParquetLake(tmp_path, s3_store(request.getfixturevalue("s3")))
        return _in_store(lake)
    if request.param == "redis_stream":
        request.getfixturevalue("redis_client")
        url = request.getfixturevalue("redis_url")
        return RedisStreamDestination.model_validate({"type": "redis_stream", "url": url})
    kafka: Kafka = request.getfixturevalue("kafka")
    return KafkaDestination.model_validate(
        {
            "type": "kafka", "bootstrap_servers": (kafka.servers,),
            "topic": f"{kafka.prefix}.{{table}}",
            "create_topics": {"partitions": 3, "replication_factor": 1},
        }
    )  # fmt: skip


def _in_store(lake: ParquetLake) -> ParquetDestination:
    assert lake.store is not None
    to = {"url": lake.store.url, "storage_options": lake.store.options}
    return ParquetDestination.model_validate({"type": "parquet", "max_delay_ms": 100, **to})


def test_messages_equal_their_source_while_writers_go_on(
    database: Database, destination: object, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path, sink={"destination": destination})
    with rig.running():
        rig.backfilled("item")
        with _writing(database, 3):
            during = rig.verified()
        database.execute("ALTER TABLE item ADD more text; UPDATE item SET version = 0 WHERE id < 9")
        after = rig.verified()
    for row in (during, after):
        assert (row.missing, row.extra, row.different) == (0, 0, 0)
    assert after.changing == 0
    assert after.source_rows == after.destination_rows


def test_a_message_that_was_removed_from_a_stream_is_found_and_delivered_again(
    database: Database, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    stream = RedisStreamDestination.model_validate(
        {"type": "redis_stream", "url": redis_url, "stream_key": "items"}
    )
    rig = Rig(database, tmp_path, sink={"destination": stream})
    with rig.running():
        rig.backfilled("item")
        entries: Any = redis_client.xrange("items")
        for entry, fields in entries:
            if orjson.loads(fields[b"record"])["id"] in (5, 700):
                redis_client.xdel("items", entry)
        database.execute("SELECT pg_logical_emit_message(true, 'test', 'mark')")
        repaired = rig.verified(repair=True)
        found = _keys(rig, repaired.id)
        again = rig.verified()
    assert found == {'["5"]': "missing", '["700"]': "missing"}
    assert (repaired.missing, repaired.repaired) == (2, 2)
    assert (again.missing, again.extra, again.different) == (0, 0, 0)


def test_rows_of_a_typed_table_that_are_gone_are_found_and_delivered_again(
    database: Database, s3: S3, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    lake = ParquetLake(tmp_path / "copies", s3_store(s3))
    rig = Rig(database, tmp_path, sink={"destination": _in_store(lake)})
    with rig.running():
        rig.backfilled("item")
        database.execute(
            "UPDATE item SET version = 2 WHERE id = 700; DELETE FROM item WHERE id = 5"
        )
        rig.until_delivered()
        assert rig.verified().different == 0
        table = lake.tables(owner="shop/files")(LakeTarget("public", "item"))
        table.load()
        last = table.files()[-1]
        table.commit([], [last], None)
        repaired = rig.verified(repair=True)
        again = rig.verified()
    assert repaired.missing + repaired.extra + repaired.different == repaired.repaired == 2
    assert (again.missing, again.extra, again.different) == (0, 0, 0)
