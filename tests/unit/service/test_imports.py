"""Files of other products, in their documented forms, become configurations that load."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cdc.config import Config, loads
from cdc.errors import OperatorError
from cdc.service.cli.entry import app
from cdc.service.imports.debezium import import_debezium
from cdc.service.imports.imported import Imported
from cdc.service.imports.properties import parse_properties
from cdc.service.imports.sequin import import_sequin

SEQUIN = """
account: {name: acme}
users: [{email: ada@example.com, password: not-for-walbrook}]
api_tokens:
  - {name: short, token: tiny}
  - {name: long, token: 0123456789abcdef0123}
databases:
  - name: shop
    hostname: "${DB_HOST:-localhost}"
    database: app
    username: app
    password: "${DB_PASSWORD}"
    pool_size: 10
    ssl: true
    slot: {name: sequin_slot, create_if_not_exists: true}
    publication:
      name: sequin_pub
      create_if_not_exists: true
      init_sql: CREATE PUBLICATION sequin_pub FOR TABLES IN SCHEMA public
    await_database: {timeout_ms: 30000}
http_endpoints:
  - name: search
    url: https://search.example.com/
    headers: [{key: X-Team, value: shop}]
    encrypted_headers: [{key: Authorization, value: "Bearer ${SEARCH_TOKEN}"}]
  - {name: tunnel, local: "true", path: /hook}
functions:
  - {name: bare, type: path, path: record}
  - {name: only-id, type: path, path: record.id}
  - name: shout
    type: transform
    code: "def transform(action, record, changes, metadata) do\\n  record\\nend"
  - name: big
    type: filter
    code: "def filter(action, record, changes, metadata) do\\n  true\\nend"
  - {name: who, type: enrichment, code: SELECT 1}
sinks:
  - name: orders
    database: shop
    source: {include_tables: [public.orders]}
    tables: [{name: public.orders, group_column_names: [account_id]}]
    actions: [insert, update]
    transform: shout
    filter: big
    routing: none
    batch_size: 50
    max_retry_count: 7
    timestamp_format: unix_microsecond
    initial_backfill: [{table: public.orders, type: partial, sort_column: id, start_position: "7"}]
    destination: {type: webhook, http_endpoint: search, http_endpoint_path: /changes, batch: false}
  - name: events
    database: shop
    transform: bare
    message_grouping: false
    load_shedding_policy: discard_on_full
    destination:
      type: kafka
      hosts: "a:9092, b:9092"
      topic: events
      tls: true
      username: u
      password: p
      sasl_mechanism: scram_sha_256
      compression: lz4
  - name: stream
    database: shop
    transform: only-id
    status: disabled
    destination: {type: redis_stream, host: redis, port: 6379, stream_key: s}
  - {name: jobs, database: shop, destination: {type: sequin_stream}}
  - {name: queue, database: shop, destination: {type: sqs, queue_url: "https://sqs/x"}}
change_retentions:
  - name: history
    source_database: shop
    source_table_schema: public
    source_table_name: users
    destination_database: shop
    destination_table_schema: audit
    destination_table_name: user_events
    filters:
      - {column_name: status, operator: "=", comparison_value: it's}
      - {column_name: age, operator: in, comparison_value: [1, 2]}
      - {column_name: gone, operator: is not null}
      - {column_name: meta, field_path: a.b, operator: "=", comparison_value: x}
"""


def loaded(found: Imported) -> Config:
    environ = {"DB_PASSWORD": "x", "SEARCH_TOKEN": "y"}
    return loads(found.text("it"), Path("/"), environ)


def remarks(found: Imported) -> dict[str, str]:
    return {remark.where: remark.what for remark in found.remarks}


def test_a_sequin_file_becomes_a_configuration_that_loads() -> None:
    config = loaded(import_sequin(SEQUIN))
    (database,) = config.databases
    assert (database.slot.name, database.publication.name) == ("sequin_slot", "sequin_pub")
    assert database.publication.init_sql is not None
    assert [sink.name for sink in config.sinks] == ["orders", "events", "stream", "jobs", "history"]
    orders, events, stream, jobs, history = config.sinks
    assert orders.source.include_tables == ("public.orders",)
    assert orders.tables[0].group_column_names == ("account_id",)
    assert (orders.max_deliveries, orders.timestamp_format) == (7, "unix_microsecond")
    assert orders.destination.model_dump(include={"url", "batch"}) == {
        "url": "https://search.example.com/changes",
        "batch": False,
    }
    assert [sink.status for sink in (orders, events, history)] == ["disabled", "active", "disabled"]
    assert events.shape == "record"
    assert not events.message_grouping
    kafka = events.destination.model_dump()
    assert list(kafka["bootstrap_servers"]) == ["a:9092", "b:9092"]
    assert kafka["sasl"]["mechanism"] == "SCRAM-SHA-256"
    assert (stream.status, stream.transform) == ("disabled", "record.id")
    assert jobs.destination.type == "pull"
    assert history.destination.model_dump()["mode"] == "events"
    assert history.filter == (
        "record.`status` = 'it\\'s' AND record.`age` IN (1, 2) AND record.`gone` IS NOT NULL"
    )
    assert [token.name for token in config.service.http.tokens] == ["long"]


def test_references_to_variables_and_secrets_stay_as_they_are() -> None:
    text = import_sequin(SEQUIN).text("sequin.yaml")
    written = yaml.safe_load(text)
    assert written["databases"][0]["hostname"] == "${DB_HOST:-localhost}"
    assert written["databases"][0]["password"] == "${DB_PASSWORD}"
    headers = written["sinks"][0]["destination"]["headers"]
    assert headers == {"X-Team": "shop", "Authorization": "Bearer ${SEARCH_TOKEN}"}
    assert "not-for-walbrook" not in text


def test_what_sequin_has_alone_is_named_with_what_to_do() -> None:
    found = import_sequin(SEQUIN)
    said = remarks(found)
    assert said["functions.shout"] == "is written in MiniElixir (type transform)"
    assert said["functions.big"] == "is written in MiniElixir (type filter)"
    assert said["functions.who"] == "is written in SQL (type enrichment)"
    assert said["sinks.orders.filter"] == "uses the function big"
    assert said["sinks.queue"] == ("there is no destination of type sqs, and the sink is left out")
    assert "discard_on_full" in said["sinks.events.load_shedding_policy"]
    assert "shorter than 16" in said["api_tokens.short"]
    assert said["change_retentions.history.filters[3]"].startswith("is a condition on meta")
    assert {"account", "users", "databases.shop.pool_size", "databases.shop.ssl"} <= said.keys()
    assert all(remark.do for remark in found.remarks)


def test_an_older_sequin_file_is_read_too() -> None:
    config = loaded(
        import_sequin("""
databases: [{name: a, hostname: h, database: d, slot_name: s, publication_name: p}]
transforms: [{name: row, transform: {type: path, path: record}}]
sinks:
  - name: users
    database: a
    table: public.users
    group_column_names: [org]
    transform: row
    filters: [{column_name: status, operator: "!=", comparison_value: off}]
    destination: {type: redis, host: h, port: 6379, stream_key: k}
""")
    )
    (sink,) = config.sinks
    assert sink.source.include_tables == ("public.users",)
    assert sink.tables[0].group_column_names == ("org",)
    assert sink.shape == "record"
    assert sink.filter == "record.`status` <> false"


DEBEZIUM = r"""
# Debezium Server
debezium.sink.type=kafka
debezium.sink.kafka.producer.bootstrap.servers=broker-1:9092,broker-2:9092
debezium.source.connector.class=io.debezium.connector.postgresql.PostgresConnector
debezium.source.offset.storage.file.filename=data/offsets.dat
debezium.source.database.hostname = db.example.com
debezium.source.database.port: 5433
debezium.source.database.user=debezium
debezium.source.database.password=s3cr\=et
debezium.source.database.dbname=inventory
debezium.source.topic.prefix=shop
debezium.source.plugin.name=pgoutput
debezium.source.slot.name=dbz
debezium.source.publication.name=dbz_pub
debezium.source.publication.autocreate.mode=filtered
debezium.source.table.include.list=public\\.orders,\
    public.users,audit.*
debezium.source.column.exclude.list=public.users.password
debezium.source.snapshot.mode=no_data
debezium.source.decimal.handling.mode=string
debezium.source.heartbeat.interval.ms=5000
debezium.source.skipped.operations=none
debezium.source.message.key.columns=public.users:org,name
debezium.source.signal.data.collection=public.signals
debezium.transforms=route
debezium.transforms.route.type=io.debezium.transforms.ByLogicalTableRouter
"""


def test_properties_of_debezium_server_become_a_configuration_that_loads() -> None:
    found = import_debezium(DEBEZIUM)
    config = loaded(found)
    (database,), (sink,) = config.databases, config.sinks
    assert (database.name, database.port, database.heartbeat_s) == ("shop", 5433, 5)
    assert (database.slot.name, database.slot.create_if_not_exists) == ("dbz", True)
    assert database.publication.tables == ("public.orders", "public.users")
    assert "password=s3cr=et" in database.dsn()
    assert sink.source.include_tables == ("public.orders", "public.users")
    assert list(sink.actions) == ["insert", "update", "delete", "truncate"]
    assert (sink.shape, sink.number_format, sink.initial_backfill) == ("debezium", "string", False)
    assert sink.tables[0].group_column_names == ("org", "name")
    kafka = sink.destination.model_dump()
    assert kafka["topic"] == "shop.{schema}.{table}"
    assert kafka["tombstones"] is True
    assert sink.status == "disabled", "a column that was left out would go out"
    said = remarks(found)
    assert said["table.include.list"] == "audit.* is a regular expression"
    assert said["transforms.route"] == "is a transform in Java (ByLogicalTableRouter)"
    assert {"column.exclude.list", "signal.data.collection", "slot.name"} <= said.keys()
    assert not any(key.startswith("offset.") for key in said)


def test_a_connector_of_kafka_connect_is_read_as_properties_and_as_json() -> None:
    connector = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "db",
        "database.dbname": "app",
        "database.server.name": "app",
        "plugin.name": "wal2json",
        "transforms": "unwrap",
        "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
    }
    lines = "\n".join(f"{key}={value}" for key, value in {"name": "users", **connector}.items())
    as_json = json.dumps({"name": "users", "config": connector})
    for found in (import_debezium(lines), import_debezium(as_json)):
        config = loaded(found)
        assert config.sinks[0].name == "users"
        assert (config.sinks[0].shape, config.sinks[0].status) == ("record", "active")
        assert config.sinks[0].initial_backfill is True
        assert config.databases[0].slot.name == "debezium_pgoutput"
        assert "wal2json" in remarks(found)["plugin.name"]
        assert "Connect worker" in remarks(found)["bootstrap.servers"]


@pytest.mark.parametrize(
    ("kind", "lines", "expected"),
    [
        ("redis", "redis.address=cache:6380\ndebezium.sink.redis.password=p", "redis_stream"),
        ("http", "http.url=https://x.example.com/in", "webhook"),
        ("pulsar", "pulsar.client.serviceUrl=pulsar://x", "kafka"),
    ],
)
def test_other_sinks_of_debezium_server_are_taken_over_or_named(
    kind: str, lines: str, expected: str
) -> None:
    found = import_debezium(
        f"debezium.sink.type={kind}\ndebezium.sink.{lines}\n"
        "debezium.source.database.hostname=h\ndebezium.source.database.dbname=d\n"
        "debezium.source.plugin.name=pgoutput\n"
    )
    assert loaded(found).sinks[0].destination.type == expected
    assert ("debezium.sink.type" in remarks(found)) is (expected == "kafka")


def test_properties_are_read_as_java_reads_them() -> None:
    text = "a=1\n b : 2\nc 3\n! no\n# no\nd=x\\\n   y\ne=\\u00e4\\t\\\\\nf\\=g=h\nempty=\n"
    assert parse_properties(text) == {
        "a": "1", "b": "2", "c": "3", "d": "xy", "e": "ä\t\\", "f=g": "h", "empty": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("sequin.yaml", "a: [", "is not YAML"),
        ("sequin.yaml", "a: 1", "has no databases"),
        ("d.properties", "connector.class=io.debezium.connector.mysql.MySqlConnector", "MySql"),
        ("d.properties", "a=b", "no database.hostname"),
        ("d.json", "{", "is not JSON"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    given = ["import", str(tmp_path / name), "-o", str(tmp_path / "walbrook.yaml")]
    result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, OperatorError)
    assert says in str(result.exception)
    assert not (tmp_path / "walbrook.yaml").exists()


def test_the_command_writes_a_file_that_its_owner_alone_reads_and_overwrites_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "sequin.yaml").write_text(SEQUIN)
    target = tmp_path / "walbrook.yaml"
    given = ["import", str(tmp_path / "sequin.yaml"), "-o", str(target)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "functions.shout: is written in MiniElixir" in result.output
    assert "the written file" not in result.output
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert isinstance(CliRunner().invoke(app, given).exception, OperatorError)
