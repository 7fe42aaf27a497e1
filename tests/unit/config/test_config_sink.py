"""Sinks and their destinations."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from cdc.config import (
    FileDestination,
    ParquetDestination,
    RedisStreamDestination,
    SinkConfig,
    Tls,
    WebhookDestination,
    show,
)
from tests.unit.config.config_texts import BASE, FILE, OTHER, databases, read, refusal, sink


def one(body: str) -> SinkConfig:
    return read(sink(body)).sinks[0]


def test_a_file_may_have_no_sinks() -> None:
    assert read(databases()).sinks == []


def test_a_sink_defaults_all_but_name_and_destination() -> None:
    a = one(FILE)
    assert (a.name, a.database, a.status) == ("a", "shop", "active")
    assert a.actions == ("insert", "update", "delete")
    assert (a.filter, a.transform, a.routing) == ("none", "none", "none")
    assert (a.source.include_tables, a.source.exclude_schemas) == (None, None)
    assert a.batch_size is None


def test_sinks_are_found_by_their_database() -> None:
    second = databases().removeprefix("databases:\n").replace("name: shop", "name: crm", 1)
    sinks = f"- {{name: a, database: crm, {FILE}}}\n- {{name: b, database: shop, {OTHER}}}\n"
    config = read(f"{databases()}{second}sinks:\n{sinks}")
    assert [s.name for s in config.sinks_of("crm")] == ["a"]
    assert [s.name for s in config.sinks_of("shop")] == ["b"]


def test_a_sink_must_name_its_database_when_there_are_two() -> None:
    second = databases().removeprefix("databases:\n").replace("name: shop", "name: crm", 1)
    found = refusal(databases() + second + f"sinks:\n- {{name: a, {FILE}}}\n")
    assert "sinks[0].database: is required; name one of shop, crm" in found


@pytest.mark.parametrize("name", ["name: -a-", "name: ${NOT_THERE}", "name: ''", "port: 1"])
def test_a_database_without_a_usable_name_is_one_problem(name: str) -> None:
    found = refusal(sink(FILE).replace("name: shop", name, 1))
    assert "databases[0].name: " in found
    assert "sinks" not in found


def test_a_sink_of_an_unknown_database_is_refused_with_the_nearest() -> None:
    found = refusal(sink(f"database: shpo\n{FILE}"))
    assert "sinks[0].database: there is no database 'shpo'; did you mean shop?" in found


def test_sink_names_are_unique() -> None:
    found = refusal(sink(FILE) + f"- {{name: a, {FILE}}}\n")
    assert "sinks[1].name: 'a' is already the name of sinks[0]" in found


def test_tables_without_schema_are_of_public() -> None:
    source = one(f"source: {{include_tables: [orders, crm.people]}}\n{FILE}").source
    assert source.include_tables == ("public.orders", "crm.people")


@pytest.mark.parametrize(
    ("written", "schema", "table"),
    [
        ("orders", "public", "orders"),
        ("shop.orders", "shop", "orders"),
        ('"Odd Schema"."Tä ble.x"', "Odd Schema", "Tä ble.x"),
        ('shop."a.b"', "shop", "a.b"),
        ('"a.b"."c""d"', "a.b", 'c"d'),
        ('"plain"', "public", "plain"),
    ],
)
def test_a_table_is_its_plain_text_and_its_two_parts(written: str, schema: str, table: str) -> None:
    config = read(sink(f"source: {{include_tables: ['{written}']}}\n{FILE}"))
    assert config.sinks[0].source.include_tables is not None
    for name in (
        config.sinks[0].source.include_tables[0],
        pickle.loads(pickle.dumps(config)).sinks[0].source.include_tables[0],
        read(show(config)).sinks[0].source.include_tables[0],  # type: ignore[index]
    ):
        assert (name, name.schema, name.table) == (f"{schema}.{table}", schema, table)
    assert config.model_dump(mode="json")["sinks"][0]["source"]["include_tables"] == [
        f"{schema}.{table}"
    ]


@pytest.mark.parametrize("table", [".a", "a.", "a.b.c", "'\"open'", "'a\"b'", "''", "[a]"])
def test_a_text_that_is_no_table_is_refused(table: str) -> None:
    found = refusal(sink(f"source: {{include_tables: [{table}]}}\n{FILE}"))
    assert "sinks[0].source.include_tables[0]: should be a table" in found


@pytest.mark.parametrize("kind", ["schemas", "tables"])
def test_include_and_exclude_of_one_kind_are_refused_together(kind: str) -> None:
    found = refusal(sink(f"source: {{include_{kind}: [a], exclude_{kind}: [b]}}\n{FILE}"))
    assert f"sinks[0].source: include_{kind} and exclude_{kind} cannot both be given" in found


def test_include_of_schemas_and_exclude_of_tables_go_together() -> None:
    source = one(f"source: {{include_schemas: [s], exclude_tables: [s.t]}}\n{FILE}").source
    assert (source.include_schemas, source.exclude_tables) == (("s",), ("s.t",))


def test_an_empty_list_of_tables_is_refused() -> None:
    assert "at least one entry" in refusal(sink(f"source: {{include_tables: []}}\n{FILE}"))


def test_actions_may_be_all_five_but_not_none_and_not_others() -> None:
    everything = "insert, update, delete, truncate, message"
    assert len(one(f"actions: [{everything}]\n{FILE}").actions) == 5
    assert "sinks[0].actions: should hold at least one" in refusal(sink(f"actions: []\n{FILE}"))
    assert "sinks[0].actions[0]: should be 'insert'" in refusal(sink(f"actions: [read]\n{FILE}"))


REDIS = "destination: {type: redis_stream, host: h}"
PARQUET = "destination: {type: parquet, columns: json, path: o}"


@pytest.mark.parametrize("key", ["filter", "transform", "routing"])
@pytest.mark.parametrize(
    "text",
    [
        "none",
        "record.amount > 100 AND action <> 'delete'",
        "concat(record.a, ';')",
        "record.`odd;name` IS NULL -- a; comment",
        "'constant'",
        "python:rules:keep",
        "python:shop.rules.v2:keep_large",
    ],
)
def test_an_expression_a_function_or_none_is_taken(key: str, text: str) -> None:
    quoted = text.replace("'", "''")
    assert getattr(one(f"{key}: '{quoted}'\n{REDIS}"), key) == text


@pytest.mark.parametrize("key", ["filter", "transform", "routing"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{mode: dynamic}", "should be none, an expression or python:package.module:function"),
        ("'   '", "is empty; write none"),
        ("'-- nothing'", "holds only a comment"),
        ("record.a > 1; drop table t", "holds more than one expression"),
        ("'python:rules'", "names no function; write python:package.module:function"),
        ("'python:../rules:keep'", "names no function"),
        ("'" + "a" * 10_001 + "'", "is longer than 10000 characters"),
    ],
)
def test_a_text_without_the_form_of_an_expression_is_refused(
    key: str, text: str, says: str
) -> None:
    assert f"sinks[0].{key}: {says}" in refusal(sink(f"{key}: {text}\n{REDIS}"))


@pytest.mark.parametrize(
    ("key", "destination", "says"),
    [
        ("transform", PARQUET, "parquet writes columns, not messages"),
        ("routing", PARQUET, "parquet has one place for all messages"),
        ("routing", FILE, "file has one place for all messages"),
    ],
)
def test_an_expression_that_its_destination_cannot_follow_is_refused(
    key: str, destination: str, says: str
) -> None:
    assert f"sinks[0].{key}: {says}" in refusal(sink(f"{key}: record.a\n{destination}"))


def test_a_sink_tells_which_expressions_it_has() -> None:
    assert one(FILE).expressions == {}
    assert one(f"filter: record.a\nrouting: none\n{REDIS}").expressions == {"filter": "record.a"}


def test_messages_have_the_default_shape_and_forms_unless_others_are_named() -> None:
    plain = one(FILE)
    assert (plain.shape, plain.timestamp_format) == ("sequin", "iso8601")
    assert plain.number_format == "number"
    other = one(
        f"shape: debezium\ntimestamp_format: unix_microsecond\nnumber_format: string\n{FILE}"
    )
    assert (other.shape, other.timestamp_format) == ("debezium", "unix_microsecond")
    assert other.number_format == "string"


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("shape", "'sequin', 'debezium' or 'record'"),
        ("timestamp_format", "'iso8601', 'unix_microsecond' or 'postgres'"),
        ("number_format", "'number' or 'string'"),
    ],
)
def test_an_unknown_shape_or_form_is_refused_with_those_there_are(key: str, choices: str) -> None:
    assert f"sinks[0].{key}: should be {choices}" in refusal(sink(f"{key}: avro\n{FILE}"))


@pytest.mark.parametrize("shape", ["debezium", "record"])
def test_parquet_writes_columns_and_takes_no_shape_but_forms(shape: str) -> None:
    lake = "timestamp_format: postgres\ndestination: {type: parquet, columns: json, path: lake}"
    assert one(f"shape: sequin\n{lake}").timestamp_format == "postgres"
    found = refusal(sink(f"shape: {shape}\n{lake}"))
    assert "sinks[0].shape: parquet writes columns, not messages" in found


@pytest.mark.parametrize("size", ["0", "10001", "-1", "many"])
def test_a_batch_size_is_1_to_10000(size: str) -> None:
    assert "sinks[0].batch_size: should be" in refusal(sink(f"batch_size: {size}\n{FILE}"))


@pytest.mark.parametrize(
    ("destination", "size"),
    [
        ("{type: file, path: o}", 10_000),
        ("{type: parquet, columns: json, path: o}", 10_000),
        ("{type: kafka, bootstrap_servers: ['h:9092']}", 10_000),
        ("{type: redis_stream, host: h}", 1000),
        ("{type: webhook, url: 'http://h'}", 100),
        ("{type: webhook, url: 'http://h', batch: false}", 1),
    ],
)
def test_the_batch_size_defaults_by_destination(destination: str, size: int) -> None:
    assert one(f"destination: {destination}").effective_batch_size == size
    assert one(f"batch_size: 1\ndestination: {destination}").effective_batch_size == 1


def test_batches_are_impossible_for_a_webhook_of_single_messages() -> None:
    found = refusal(sink("batch_size: 2\ndestination: {type: webhook, url: http://h, batch: no}"))
    assert "sinks[0].destination.batch: should be true or false" in found
    found = refusal(
        sink("batch_size: 2\ndestination: {type: webhook, url: http://h, batch: false}")
    )
    assert "sinks[0]: batch_size above 1 is impossible with batch: false" in found


def test_a_disabled_sink_is_kept_as_disabled() -> None:
    assert one(f"status: disabled\n{FILE}").status == "disabled"


@pytest.mark.parametrize("destination", ["{type: nowhere}", "{path: out}", "{type: }"])
def test_an_unknown_or_missing_destination_type_is_refused(destination: str) -> None:
    found = refusal(sink(f"destination: {destination}"))
    kinds = "delta, file, iceberg, kafka, parquet, postgres, "
    expected = f"sinks[0].destination.type: should be one of {kinds}"
    assert expected in found


def test_a_file_destination_rotates_at_64_mib_by_default() -> None:
    destination = one(FILE).destination
    assert isinstance(destination, FileDestination)
    assert (destination.path, destination.rotate_bytes) == (BASE / "out", 64 * 2**20)


def test_an_absolute_path_stays() -> None:
    destination = one("destination: {type: file, path: /data/out}").destination
    assert isinstance(destination, FileDestination)
    assert destination.path == Path("/data/out")


def test_an_empty_path_is_refused() -> None:
    assert "path: should be a path" in refusal(sink("destination: {type: file, path: ''}"))


def test_a_parquet_destination_partitions_by_table_and_date() -> None:
    destination = one("destination: {type: parquet, columns: json, path: lake}").destination
    assert isinstance(destination, ParquetDestination)
    assert destination.partition_by == ("table", "date")
    assert destination.compression == "zstd"


def test_partitions_are_known_ones_each_once() -> None:
    text = "destination: {{type: parquet, columns: json, path: lake, partition_by: [{}]}}"
    assert "partition_by[0]: should be 'table', 'date'" in refusal(sink(text.format("hour")))
    assert "names a level twice" in refusal(sink(text.format("date, date")))
    destination = one(text.format("")).destination
    assert isinstance(destination, ParquetDestination)
    assert destination.partition_by == ()


def redis(keys: str) -> RedisStreamDestination:
    destination = one(f"destination: {{type: redis_stream, {keys}}}").destination
    assert isinstance(destination, RedisStreamDestination)
    return destination


def refused_redis(keys: str) -> str:
    return refusal(sink(f"destination: {{type: redis_stream, {keys}}}"))


def test_a_redis_destination_defaults_all_but_its_host() -> None:
    stream = redis("host: cache")
    assert (stream.host, stream.port, stream.database) == ("cache", 6379, 0)
    assert (stream.tls, stream.stream_key, stream.timeout_ms) == (False, None, 5000)


def test_tls_is_a_flag_or_settings() -> None:
    assert redis("host: h, tls: true").tls is True
    assert redis("host: h, tls: {ca_file: ca.pem}").tls == Tls(ca_file=BASE / "ca.pem")
    assert "destination.tls: should be true or false" in refused_redis("host: h, tls: maybe")
    assert "destination.tls.verify: should be" in refused_redis("host: h, tls: {verify: maybe}")
    assert "ca_file has no use" in refused_redis("host: h, tls: {verify: false, ca_file: a}")


def test_a_redis_url_takes_the_place_of_the_parts() -> None:
    stream = redis("url: 'rediss://u:pw@cache:6380/1', tls: {verify: false}")
    assert stream.url is not None
    assert stream.url.get_secret_value() == "rediss://u:pw@cache:6380/1"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("port: 1", "needs url or host"),
        ("url: 'redis://h', host: h", "url and host cannot both be given"),
        ("url: 'redis://h', database: 1", "url and database cannot both be given"),
        ("url: 'redis://h', tls: true", "write rediss://"),
        ("url: 'http://h'", "should be a URL such as rediss://"),
        ("url: 'redis://h:port'", "should be a URL such as rediss://"),
        ("host: h, stream_key: ''", "stream_key: should not be empty"),
        ("host: h, stream_key: " + "k" * 256, "stream_key: string should have at most 255"),
        ("host: h, timeout_ms: 0", "timeout_ms: should be greater than or equal to 1"),
    ],
)
def test_an_impossible_redis_destination_is_refused(keys: str, problem: str) -> None:
    assert problem in refused_redis(keys)


def test_a_webhook_defaults_all_but_its_url() -> None:
    hook = one("destination: {type: webhook, url: https://h/p}").destination
    assert isinstance(hook, WebhookDestination)
    assert (hook.method, hook.batch, hook.verify) == ("POST", True, True)
    assert (hook.timeout_ms, hook.max_retries, hook.headers) == (5000, 3, {})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("url: ftp://h", "should be a URL such as https://"),
        ("url: h/p", "should be a URL such as https://"),
        ("url: 'https://u:pw@h/'", "should hold no user or password"),
        ("url: https://h, method: GET", "method: should be 'POST' or 'PUT'"),
        ("url: https://h, max_retries: -1", "max_retries: should be greater"),
        ("url: https://h, headers: {'a b': c}", "not allowed in HTTP"),
        ('url: https://h, headers: {A: "b\\nC: d"}', "line break or control character in A"),
    ],
)
def test_an_impossible_webhook_is_refused(keys: str, problem: str) -> None:
    found = refusal(sink(f"destination: {{type: webhook, {keys}}}"))
    assert problem in found
    assert "pw" not in found


@pytest.mark.parametrize(
    "destination",
    [
        "{type: file, path: out}",
        "{type: redis_stream, host: r, stream_key: k}",
        "{type: kafka, bootstrap_servers: ['h:9092'], exactly_once: true, cursor_topic: c}",
    ],
)
def test_two_sinks_that_keep_their_position_may_not_share_a_place(destination: str) -> None:
    text = f"{sink(f'destination: {destination}')}- {{name: b, destination: {destination}}}\n"
    assert "line 9, sinks[1].destination: is where sinks[0] writes too" in refusal(text)


def test_webhooks_are_sent_several_requests_at_once_and_others_are_not() -> None:
    assert one("destination: {type: webhook, url: http://h}").effective_partition_count == 8
    for other in ("{type: file, path: out}", "{type: redis_stream, host: h}", "{type: pull}"):
        assert one(f"destination: {other}").effective_partition_count == 1
        assert one(f"partition_count: 1\ndestination: {other}").effective_partition_count == 1


@pytest.mark.parametrize(
    "destination",
    [
        "{type: file, path: out}",
        "{type: parquet, columns: json, path: out}",
        "{type: redis_stream, host: h}",
        "{type: kafka, bootstrap_servers: ['h:9092']}",
        "{type: pull}",
    ],
)
def test_a_sink_that_needs_one_order_takes_no_partition_count_above_1(destination: str) -> None:
    found = refusal(sink(f"partition_count: 2\ndestination: {destination}"))
    assert "sinks[0].partition_count: above 1 is impossible with" in found


@pytest.mark.parametrize(
    "url", ["s3://key:pw@bucket/f", "s3://bucket/f?access_key=pw", "s3://bucket/f?secret_key=pw"]
)
def test_the_url_of_a_claim_check_may_hold_no_credentials(url: str) -> None:
    found = refusal(
        sink(
            "destination: {type: webhook, url: https://h}\noversize: claim_check\n"
            f"max_message_bytes: 1000\nclaim_check: {{url: '{url}'}}"
        )
    )
    assert "should hold no user or password" in found
    assert "pw" not in found
