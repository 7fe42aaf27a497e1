"""Consumers of Debezium's topics read ours unchanged: Kafka Connect's own classes do so here.

Real rows go through a real slot, the service's own decoding and the sink to a broker; then Kafka
Connect's JSON converter, with and without schemas, and Debezium's unwrapping transform read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fix_kafka import Kafka
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.kafka_broker import KafkaBroker
from tests.kafka_connect import KafkaConnect
from tests.proxy import Proxy
from tests.walbrook_service import running

pytestmark = pytest.mark.sinks

TABLE = """
CREATE TYPE mood AS ENUM ('good', 'bad');
CREATE TYPE size AS (width int, label text);
CREATE TABLE thing (
    id int PRIMARY KEY, small smallint, large bigint, part real, whole double precision,
    price numeric(12,4), name text, flag boolean, made timestamptz, at timestamp, day date,
    doc jsonb, mark uuid, raw bytea, mood mood, tags text[], grid int[][], size size);
CREATE TABLE pair (a int, b text, n int, PRIMARY KEY (b, a));
ALTER TABLE thing REPLICA IDENTITY FULL;
"""
INSERT = """
INSERT INTO thing VALUES (1, -2, 9007199254740993, 1.5, 2.25, 22.2200, 'żółć "q"', true,
    '2026-01-02 01:04:05.6+00', '2026-01-02 03:04:05', '2026-01-02', '{"a": [1, null]}',
    '9b2f8c1e-0000-4000-8000-000000000001', '\\xdead', 'good', '{x,NULL}', '{{1,2},{3,4}}',
    ROW(3, 'w'))
"""
CHANGES = (
    INSERT,
    "INSERT INTO thing (id) VALUES (2)",
    "UPDATE thing SET name = 'new' WHERE id = 1",
    "UPDATE thing SET id = 3 WHERE id = 2",
    "DELETE FROM thing WHERE id = 1",
    "INSERT INTO pair VALUES (1, 'x', 5)",
)
ROW = {
    "id": 1, "small": -2, "large": 9007199254740993, "part": 1.5, "whole": 2.25,
    "price": 22.22, "name": 'żółć "q"', "flag": True, "made": "2026-01-02T01:04:05.6Z",
    "at": "2026-01-02T03:04:05", "day": "2026-01-02", "doc": '{"a": [1, null]}',
    "mark": "9b2f8c1e-0000-4000-8000-000000000001", "raw": "\\xdead", "mood": "good",
    "tags": ["x", None], "grid": [[1, 2], [3, 4]], "size": {"width": 3, "label": "w"},
}  # fmt: skip

Record = tuple[bytes | None, bytes | None]
Topics = dict[tuple[str, str], list[Record]]


def _sink(kafka: Kafka, name: str, schemas: bool) -> dict[str, object]:
    return {
        "name": name,
        "shape": "debezium",
        "destination": {
            "type": "kafka",
            "bootstrap_servers": [kafka.servers],
            "topic": f"{kafka.prefix}.{name}.{{table}}",
            "schemas": schemas,
            "tombstones": True,
            "create_topics": {"partitions": 1},
        },
    }


@pytest.fixture(scope="module")
def topics(
    postgres_server: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
    kafka_server: tuple[KafkaBroker, Proxy],
) -> Topics:
    broker, proxy = kafka_server
    kafka = Kafka(broker, proxy, "connect")
    with fresh_database(postgres_server.dsn) as database:
        return _delivered(database, kafka, tmp_path_factory.mktemp("connect"))


def _delivered(database: Database, kafka: Kafka, directory: Path) -> Topics:
    """What the topics of each sink hold once all changes were delivered."""
    database.execute(TABLE)
    sinks = [_sink(kafka, "plain", False), _sink(kafka, "described", True)]
    with running(database, directory / "service", sinks) as service:
        for change in CHANGES:
            database.execute(change)
        service.until_settled()
        assert service.stop() == 0, service.log_tail()
    return {
        (name, table): [
            (one.key(), one.value()) for one in kafka.read(f"{kafka.prefix}.{name}.{table}")
        ]
        for name in ("plain", "described")
        for table in ("thing", "pair")
    }


def test_a_converter_with_schemas_reads_keys_and_values_with_their_types(topics: Topics) -> None:
    with KafkaConnect(schemas=True) as connect:
        records = topics["described", "thing"]
        keys = [connect.key("t", key) for key, _ in records]
        assert {read.schema for read in keys} == {"shop.public.thing.Key"}
        assert [read.value for read in keys] == [{"id": n} for n in (1, 2, 1, 2, 2, 3, 1, 1)]
        values = [connect.value("t", value) for _, value in records]
        assert {read.schema for read in values} == {"shop.public.thing.Envelope", None}
        first = values[0].value
        assert (first["op"], first["before"], first["after"]) == ("c", None, ROW)
        assert first["source"]["table"] == "thing"
        assert first["source"]["connector"] == "postgresql"
        assert values[2].value["before"] == ROW
        assert values[2].value["after"] == {**ROW, "name": "new"}
        assert [read.value and read.value["op"] for read in values] == [
            "c", "c", "u", "d", None, "c", "d", None,
        ]  # fmt: skip
        ((key, value),) = topics["described", "pair"]
        assert connect.key("t", key).value == {"b": "x", "a": 1}
        assert connect.value("t", value).value["after"] == {"a": 1, "b": "x", "n": 5}


def test_a_converter_without_schemas_reads_the_same_as_maps(topics: Topics) -> None:
    with KafkaConnect(schemas=False) as connect:
        records = topics["plain", "thing"]
        keys = [connect.key("t", key) for key, _ in records]
        assert [read.value for read in keys] == [{"id": n} for n in (1, 2, 1, 2, 2, 3, 1, 1)]
        first = connect.value("t", records[0][1]).value
        assert first["op"] == "c"
        assert {**first["after"], "doc": ROW["doc"]} == ROW
        assert first["after"]["doc"] == {"a": [1, None]}, "embedded, as in the other sinks"


@pytest.mark.parametrize("deletes", ["tombstone", "delete-to-tombstone"])
def test_a_sink_behind_debeziums_transform_has_the_rows_of_the_table(
    topics: Topics, deletes: str
) -> None:
    """An upserting sink: a value is stored under its key, a record without one removes it.

    The transform passes records without a schema on as they are, ours as Debezium's.
    """
    rows: dict[int, Any] = {}
    with KafkaConnect(schemas=True, deletes=deletes) as connect:
        for record in topics["described", "thing"]:
            key, value = connect.unwrapped("t", *record)
            if key is None:
                continue
            if value is None:
                rows.pop(key["id"], None)
            else:
                rows[key["id"]] = value
    assert list(rows) == [3], "row 1 was deleted, and row 2 has become row 3"
    assert rows[3]["id"] == 3
    assert rows[3]["name"] is None


def test_a_sink_that_reads_envelopes_as_maps_has_the_rows_of_the_table(topics: Topics) -> None:
    rows: dict[int, Any] = {}
    with KafkaConnect(schemas=False) as connect:
        for key, value in topics["plain", "thing"]:
            number = connect.key("t", key).value["id"]
            envelope = connect.value("t", value).value
            if envelope is None:
                assert number not in rows, "a tombstone follows the delete"
            elif envelope["op"] == "d":
                del rows[number]
            else:
                rows[number] = envelope["after"]
    assert list(rows) == [3]
    assert rows[3]["id"] == 3
