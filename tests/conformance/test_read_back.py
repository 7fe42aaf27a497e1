"""What sinks say that their destinations hold: the rows of the source, by key and content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import redis
from psycopg import sql

from cdc.backfill.copy_rows import columns_of, raw_rows
from cdc.backfill.reading import copy_texts
from cdc.backfill.table import PublishedTable, describe_table
from cdc.config import KafkaDestination
from cdc.config.table import TableName
from cdc.errors import OperatorError
from cdc.verify.held import Form, Key, held_of_columns, held_of_raw, key_of, key_text
from cdc.verify.key_ranges import HeldSide, compare
from cdc.verify.records import held_by_key, same_record
from sinks import open_sink
from sinks.base import ReadsBack, Sink
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from sinks.lakehouse.iceberg import Catalogs, MergesOnRead, iceberg_tables
from sinks.lakehouse.sink import Mode
from sinks.parquet import ParquetSink
from sinks.postgres import PostgresSink
from sinks.redis_stream import RedisStreamSink
from sinks.webhook import WebhookSink
from tests.fix_kafka import Kafka
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.fix_s3 import S3
from tests.lakes import LAKES, Lake
from tests.parquet_lake import ParquetLake
from tests.slot_batches import SlotBatches

KINDS = (
    "postgres",
    "redis_stream",
    "parquet",
    "parquet typed",
    pytest.param("parquet in a store", marks=pytest.mark.sinks),
    pytest.param("kafka", marks=pytest.mark.sinks),
    pytest.param("kafka exactly once", marks=pytest.mark.sinks),
    "delta append",
    "delta copy_on_write",
    pytest.param("iceberg append", marks=pytest.mark.sinks),
    "iceberg merge_on_read",
    pytest.param("iceberg copy_on_write", marks=pytest.mark.sinks),
)


@pytest.fixture
def sink(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_server: PostgresServer
) -> Iterator[Sink]:
    with fresh_database(postgres_server.dsn) as there:
        made: Sink
        if request.param == "postgres":
            made = PostgresSink(there.dsn, source="shop", consumer="orders")
        elif request.param == "parquet":
            made = ParquetSink(
                tmp_path / "parquet", consumer="orders", partition_by=("table", "date", "action")
            )
        elif request.param == "parquet typed":
            made = ParquetLake.on_disk(tmp_path / "typed").sink()
        elif request.param == "parquet in a store":
            made = ParquetLake.in_store(request.getfixturevalue("s3"), tmp_path).sink()
        elif request.param in LAKES:
            made = Lake.of(tmp_path / "lake", request.param).sink()
        elif request.param.startswith("kafka"):
            made = _kafka(request.getfixturevalue("kafka"), "exactly once" in request.param)
        else:
            url = request.getfixturevalue("redis_url")
            request.getfixturevalue("redis_client")
            made = RedisStreamSink(
                consumer="orders", stream_key="items", batch_size=1000, timeout_s=5, url=url
            )
        yield made
        made.close()


def _kafka(kafka: Kafka, exactly_once: bool) -> Sink:
    destination = KafkaDestination.model_validate(
        {
            "type": "kafka", "bootstrap_servers": (kafka.servers,),
            "topic": f"{kafka.prefix}.{{table}}", "exactly_once": exactly_once,
            "cursor_topic": f"{kafka.prefix}.cursor" if exactly_once else None,
            "create_topics": {"partitions": 3, "replication_factor": 1}, "tombstones": True,
        }
    )  # fmt: skip
    return open_sink(destination, consumer="orders", batch_size=1000, source="shop")


def _table(database: Database, name: str = "item") -> PublishedTable:
    with database.connect() as connection:
        return describe_table(connection, "everything", TableName("public", name))


def _of_source(database: Database, table: PublishedTable, form: Form) -> pa.RecordBatch:
    """What the source holds, in one batch."""
    names = sql.SQL(", ").join(map(sql.Identifier, table.columns))
    query = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT").format(
        names, sql.Identifier(table.name.schema, table.name.table)
    )
    with database.connect() as connection:
        text = b"".join(copy_texts(connection, query))
    columns = columns_of(text, len(table.columns))
    if form is Form.CELLS:
        return held_of_columns(table, columns)
    raw = raw_rows(columns, oid=table.relation.oid, schema_id=table.schema_id, read_us=0)
    return held_of_raw(raw, {table.schema_id: table.message}, form)


def _differing(database: Database, sink: Sink, directory: Path) -> list[Key]:
    assert isinstance(sink, ReadsBack)
    table = _table(database)
    sides = [HeldSide(directory / name, 2) for name in ("source", "destination")]
    sides[0].add(_of_source(database, table, sink.held_form))
    for held in sink.read_back(table):
        sides[1].add(held)
    for side in sides:
        side.close()
    return [key_of(key) for n in range(2) for key in compare(*(s.range(n) for s in sides)).keys]


@pytest.mark.parametrize("sink", KINDS, indirect=True)
def test_a_destination_holds_what_the_source_has_after_every_kind_of_change(
    source: SlotBatches, database: Database, sink: Sink, tmp_path: Path
) -> None:
    source.run(
        "CREATE TABLE item (a int, b text, note text, price numeric, at timestamptz, doc jsonb,"
        " PRIMARY KEY (b, a))",
        "INSERT INTO item SELECT i, 'k\"' || i, E'tab\\t\\\\' || i, i * 1.10,"
        " '2024-02-29 12:00+02', '{\"a\": [1, null]}' FROM generate_series(1, 500) i",
        "UPDATE item SET note = NULL WHERE a % 7 = 0",
        "UPDATE item SET a = -a WHERE a % 11 = 0",
        "DELETE FROM item WHERE a % 5 = 0",
        "INSERT INTO item VALUES (5, 'k\"5', 'back', 1, NULL, NULL)",
    )
    assert sink.deliver(source.taken()).error is None
    assert _differing(database, sink, tmp_path) == []


@pytest.mark.parametrize("sink", KINDS, indirect=True)
def test_a_destination_that_lacks_changes_differs_in_exactly_those_rows(
    source: SlotBatches, database: Database, sink: Sink, tmp_path: Path
) -> None:
    source.run(
        "CREATE TABLE item (id int PRIMARY KEY, note text)",
        "INSERT INTO item SELECT i, 'n' FROM generate_series(1, 100) i",
    )
    assert sink.deliver(source.taken()).error is None
    source.run(
        "DELETE FROM item WHERE id = 1", "UPDATE item SET note = 'm' WHERE id = 2",
        "INSERT INTO item VALUES (101)",
    )  # fmt: skip
    assert sorted(_differing(database, sink, tmp_path)) == [("1",), ("101",), ("2",)]


@pytest.mark.parametrize("sink", KINDS, indirect=True)
def test_rows_are_read_back_by_key(source: SlotBatches, database: Database, sink: Sink) -> None:
    source.run(
        "CREATE TABLE item (id int PRIMARY KEY, note text)",
        "CREATE TABLE other (id int PRIMARY KEY, note text)",
        "INSERT INTO item SELECT i, 'n' FROM generate_series(1, 3000) i",
        "INSERT INTO other VALUES (2, 'o')",
    )
    assert sink.deliver(source.taken()).error is None
    assert isinstance(sink, ReadsBack)
    asked = [(str(key),) for key in range(2, 6_000, 2)]
    found = pa.Table.from_batches(sink.read_back(_table(database), asked))
    assert {key_of(key) for key in found.column("key").to_pylist()} == set(asked[:1500])


@pytest.mark.parametrize("sink", KINDS, indirect=True)
def test_a_table_that_was_never_delivered_holds_nothing(
    source: SlotBatches, database: Database, sink: Sink
) -> None:
    source.run("CREATE TABLE item (id int PRIMARY KEY)")
    assert isinstance(sink, ReadsBack)
    assert sum(held.num_rows for held in sink.read_back(_table(database))) == 0


_TYPES = (
    "id bool, at timestamptz, day date, small numeric(12,8), raw bytea, word text,"
    " PRIMARY KEY (id, at, day, small, raw, word)"
)


@pytest.mark.parametrize("sink", LAKES, indirect=True)
def test_keys_and_values_of_every_type_are_restored_from_typed_columns(
    source: SlotBatches, database: Database, sink: Sink, tmp_path: Path
) -> None:
    source.run(
        f"CREATE TABLE item ({_TYPES}, f float8, r real, n numeric, ts timestamp, t time, s int2,"
        " i interval, docs jsonb[], grid int[][], names text[], doc json, money numeric(12,2))",
        "INSERT INTO item SELECT i % 2 = 0, '2024-02-29 12:00:00.50+00'::timestamptz"
        " + i * interval '1.25 s', '2024-02-29'::date - i, i * 0.00000001, decode('ff00', 'hex'),"
        " E'\"\\\\\t\x1f é' || i, i / 3.0, 'NaN', i * 1.10, '2024-01-01 00:00', '24:00', i,"
        " '1 mon 2 days', ARRAY['{\"a\": 1}'::jsonb, NULL], ARRAY[[1, NULL], [3, i]],"
        " ARRAY['a,\"b', NULL], '{\"z\":  1}', -0.50 FROM generate_series(1, 300) i",
    )
    assert sink.deliver(source.taken()).error is None
    assert _differing(database, sink, tmp_path) == []
    with database.connect() as connection:
        connection.execute("UPDATE item SET grid = '{{7}}' WHERE s = 7")
        connection.execute("UPDATE item SET f = '-0' WHERE s = 9")
    (tmp_path / "again").mkdir()
    differing = _differing(database, sink, tmp_path / "again")
    assert len(differing) == 2
    assert isinstance(sink, ReadsBack)
    found = pa.Table.from_batches(sink.read_back(_table(database), differing))
    assert {key_of(key) for key in found.column("key").to_pylist()} == set(differing)


@pytest.mark.parametrize("sink", [each for each in LAKES if "append" in each], indirect=True)
def test_a_history_is_folded_with_values_that_were_not_sent_and_after_a_truncate(
    source: SlotBatches, database: Database, sink: Sink, tmp_path: Path
) -> None:
    source.run(
        "CREATE TABLE item (id int PRIMARY KEY, note text, big text)",
        "ALTER TABLE item ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO item VALUES (1, 'before', 'b')",
        "TRUNCATE item",
        "INSERT INTO item SELECT i, 'n', repeat('b' || i, 4000) FROM generate_series(2, 9) i",
        "UPDATE item SET note = 'later' WHERE id = 3",
        "UPDATE item SET id = 40 WHERE id = 4",
        "DELETE FROM item WHERE id = 5",
    )
    assert sink.deliver(source.taken()).error is None
    assert isinstance(sink, ReadsBack)
    held = held_by_key(sink.read_back(_table(database)))
    assert sorted(held) == [("2",), ("3",), ("40",), ("6",), ("7",), ("8",), ("9",)]
    content = _of_source(database, _table(database), sink.held_form)
    texts = dict(zip(*(content.column(at).to_pylist() for at in (0, 1)), strict=True))
    wrong = [key for key, row in held.items() if not same_record(texts[key_text(key)], row)]
    assert wrong == []
    assert held[("3",)].lacking == frozenset()


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_tables_in_an_object_store_are_read_back(
    kind: str, mode: Mode, source: SlotBatches, database: Database, s3: S3, tmp_path: Path
) -> None:
    root, owner = f"s3://{s3.bucket}/lake", "shop/orders"
    options = {"AWS_ENDPOINT_URL": f"http://{s3.endpoint}", "AWS_REGION": "eu-central-1"}
    if kind == "delta":
        tables = delta_tables(root, owner, options | {"AWS_ALLOW_HTTP": "true"})
    else:
        uri = f"sqlite:///{tmp_path}/catalog.db"
        catalogs = Catalogs("lake", {"type": "sql", "uri": uri}, root, options)
        tables = iceberg_tables(catalogs.open, root, owner)
    source.run(
        "CREATE TABLE item (id int PRIMARY KEY, note text)",
        "INSERT INTO item SELECT i, 'n' FROM generate_series(1, 100) i",
        "UPDATE item SET id = -id WHERE id % 7 = 0",
        "DELETE FROM item WHERE id % 5 = 0",
    )
    merges = MergesOnRead() if kind == "iceberg" else None
    sink = LakehouseSink(tables, LakeNames(), mode=mode, merges=merges)
    assert sink.deliver(source.taken()).error is None
    database.execute("UPDATE item SET note = 'm' WHERE id = 1")
    assert _differing(database, sink, tmp_path) == [("1",)]
    found = held_by_key(sink.read_back(_table(database), [("1",), ("-7",), ("7",)]))
    assert sorted(found) == [("-7",), ("1",)]


def test_a_stream_that_forgets_entries_cannot_be_read_back(
    database: Database, redis_client: redis.Redis, redis_url: str
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    sink = RedisStreamSink(
        consumer="orders", stream_key="items", batch_size=10, timeout_s=5, url=redis_url,
        max_length=100,
    )  # fmt: skip
    with pytest.raises(OperatorError, match="does not keep every message"):
        list(sink.read_back(_table(database)))


def test_a_history_cannot_be_read_back(database: Database) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    sink = PostgresSink(database.dsn, source="shop", consumer="orders", mode="append")
    with pytest.raises(OperatorError, match="mode: mirror"):
        list(sink.read_back(_table(database)))


def test_a_webhook_cannot_be_read_back() -> None:
    sink = WebhookSink("http://127.0.0.1:9", consumer="orders", batch_size=1)
    assert not isinstance(sink, ReadsBack)
