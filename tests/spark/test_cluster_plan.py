"""Large micro-batches on a real standalone cluster: the log served, executors apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import httpx
import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cdc.config import (
    FileDestination,
    ParquetDestination,
    RedisStreamDestination,
    SinkConfig,
    Spark,
    WebhookDestination,
)
from cdc.config.secrets import SecretText
from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.format import PLAIN
from cdc.errors import TransientError
from cdc.log.flight.server import LogServer, ServerTls
from cdc.log.flight.wire import CA_VARIABLE, TOKEN_VARIABLE
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from cdc.replication.wire.seal import Sealer
from spark_pipeline.delivery.deliver import Origin, Share, in_order
from spark_pipeline.delivery.isolate import as_walbrook_error
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.delivery.value_formats import wanted_by
from spark_pipeline.expressions import for_share
from spark_pipeline.expressions.for_share import judge
from spark_pipeline.feed import cluster as cluster_module
from spark_pipeline.feed.cluster import ClusterPlan
from spark_pipeline.feed.reorder import Reorder
from spark_pipeline.session.session import open_session
from spark_pipeline.slices.exchange import SliceMarker
from tests import pgoutput
from tests.certificates import Authority
from tests.fix_http import Endpoint
from tests.fix_spark import LocalSpark
from tests.log_pipeline import arrived, cursors_of
from tests.standalone import QUICK_START, ROOT, StandaloneCluster, free_port
from tests.waiting import until
from tests.wire_messages import transaction, wire

pytestmark = pytest.mark.sinks

TOKEN = "a token of this test run"
ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
PART = pgoutput.relation(2, "public", "part", [("id", 23, True), ("name", 25)])
TRANSACTIONS, ROWS, KEYS, PARTITIONS = 41, 503, 97, 8
END = Cursor(TRANSACTIONS * 100, ROWS + 1)  # one number is left free, before the second table


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    running = StandaloneCluster(tmp_path_factory.mktemp("cluster"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def spark(
    local_spark: LocalSpark,
    cluster: StandaloneCluster,
    authority: Authority,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SparkSession]:
    local_spark.stop()
    settings = Spark(
        master=cluster.url,
        driver_memory="512m",
        executor_memory="512m",
        executor_java_options=QUICK_START,
        ui=True,
        ui_port=0,
        checkpoint_directory=tmp_path_factory.mktemp("spark"),
        # The JVM of this process may have served a local session, which asks for a secret.
        conf={"spark.authenticate": "false"},
    )
    trusted = {TOKEN_VARIABLE: TOKEN, CA_VARIABLE: str(authority.certificate)}
    session = open_session(settings, trusted | {"PYTHONPATH": str(ROOT)})

    def registered() -> int:
        return int(session.sparkContext._jsc.sc().getExecutorMemoryStatus().size())

    until("both executors, beside the driver", lambda: registered() == 3, 60)
    yield session
    session.stop()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Updates of few rows in two tables, over and over, so that their order can be seen."""
    directory = tmp_path_factory.mktemp("log")
    writer, sealer = LogWriter(directory), Sealer()
    sealer.seal(wire(ITEM, PART, *transaction(1)))
    rng = random.Random(7)
    for number in range(1, TRANSACTIONS + 1):
        rows = [
            pgoutput.insert(rng.choice([1, 2]), [str(rng.randrange(KEYS)), f"{number} {i}"])
            for i in range(ROWS)
        ]
        sealed = sealer.seal(wire(*transaction(number * 100, *rows)))
        assert sealed is not None
        writer.append(sealed.raw, sealed.schemas, first=sealed.first, high=sealed.high)
    writer.close()
    return directory


@pytest.fixture(scope="module")
def served(log: Path, authority: Authority) -> Iterator[str]:
    certificate, key = authority.sign("DNS:localhost")
    tls = ServerTls(certificate.read_bytes(), key.read_bytes())
    server = LogServer({"shop": log}, token=TOKEN, tls=tls)
    yield f"grpc+tls://localhost:{server.port}/shop"
    assert server.close(10)


def everything(log: Path) -> list[Cursor]:
    """The cursors of all rows, in order."""
    view = LogView(log)
    found = [
        Cursor(row["commit_lsn"], row["commit_idx"])
        for frame in view.frames(0, view.next_batch())
        for row in frame.raw.select(["commit_lsn", "commit_idx"]).to_pylist()
    ]
    assert len(set(found)) == TRANSACTIONS * ROWS
    return sorted(found)


def deliver_all(
    spark: SparkSession,
    log: Path,
    served: str,
    checkpoint: Path,
    *consumers: SinkConfig,
    between: Callable[[], None] = lambda: None,
) -> tuple[list[SliceMarker], list[Outcome]]:
    """One micro-batch of the whole log, as the body takes it; ``between`` decode and delivery."""
    taken: list[tuple[list[SliceMarker], list[Outcome]]] = []
    failed: list[Exception] = []

    def take(frame: DataFrame, _batch: int) -> None:
        # Rows lie where executors left them; here they are thrown about as no executor would.
        plan = ClusterPlan(frame.repartition(PARTITIONS), "shared", log, 0, PLAIN)
        try:
            slices = Reorder(0).micro_batch(plan.decode())
            between()
            run = checkpoint.name
            parts = [
                judge(spark, share_of(consumer, slices, run), served, 0, checkpoint.parent)
                for consumer in consumers
            ]
            with ThreadPoolExecutor(len(parts)) as threads:
                taken.append((slices, list(threads.map(plan.deliver, parts))))
        except Exception as error:
            failed.append(error)
        finally:
            plan.close()

    query = (
        spark.readStream.format("walbrook")
        .option("path", str(log))
        .option("executorPath", served)
        .option("markers", "true")
        .option("partitions", PARTITIONS)
        .load()
        .writeStream.option("checkpointLocation", str(checkpoint))
        .foreachBatch(take)
        .start()
    )
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    if failed:
        raise failed[0]
    (whole,) = taken
    return whole


def share_of(consumer: SinkConfig, slices: list[SliceMarker], run: str) -> Share:
    origin = Origin("shop", "h", "d")
    return Share(consumer, origin, run, ORIGIN, slices[-1].high, slices, PLAIN)


def sink(name: str, destination: object, **more: object) -> SinkConfig:
    return SinkConfig.model_validate(
        {"name": name, "database": "shop", "destination": destination, **more}
    )


def test_every_consumer_gets_its_rows_in_its_order_from_executors_and_files_from_the_driver(
    spark: SparkSession,
    cluster: StandaloneCluster,
    log: Path,
    served: str,
    endpoint: Endpoint,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> None:
    in_redis = RedisStreamDestination(url=SecretText(redis_url), stream_key="cluster")
    items = {"source": {"include_tables": ["public.item"]}}
    slices, outcomes = deliver_all(
        spark,
        log,
        served,
        tmp_path / "checkpoint",
        sink("stream", in_redis),
        sink("hook", WebhookDestination(url=endpoint.url)),
        sink("files", FileDestination(path=tmp_path / "out"), **items),
    )
    assert len({(piece.batch_idx, piece.part) for piece in slices}) > TRANSACTIONS
    assert [(outcome.cursor, outcome.error) for outcome in outcomes] == [(END, None)] * 3

    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", redis_client.xrange("cluster"))
    in_stream = [orjson.loads(fields[b"metadata"]) for _, fields in entries]
    assert [Cursor(m["commit_lsn"], m["commit_idx"]) for m in in_stream] == everything(log)

    requests = [request.messages for request in endpoint.accepted]
    sent = [message for messages in requests for message in messages]
    assert sorted(cursors_of(sent)) == everything(log)
    assert cursors_of(sent) != everything(log), "several requests go out at once"
    of_group: dict[tuple[str, int], list[Cursor]] = {}
    for message, cursor in zip(sent, cursors_of(sent), strict=True):
        group = (message["metadata"]["table_name"], message["record"]["id"])  # type: ignore[index]
        of_group.setdefault(group, []).append(cursor)
    assert len(of_group) == 2 * KEYS
    assert all(cursors == sorted(cursors) for cursors in of_group.values())

    in_files = arrived(tmp_path / "out")
    assert {message["metadata"]["table_name"] for message in in_files} == {"item"}
    assert cursors_of(in_files) == sorted(
        cursor for (table, _), cursors in of_group.items() for cursor in cursors if table == "item"
    )
    assert len(cluster.executors()) == 2


def test_rows_for_the_order_of_event_time_come_decoded_from_the_executors(
    spark: SparkSession, log: Path, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_the_driver(*_: object) -> None:
        raise AssertionError("the driver decoded a range again")

    monkeypatch.setattr(cluster_module, "rows_of", in_the_driver)
    timed = {"ordering": "event_time", "event_time": {"column": "name", "type": "iso8601"}}
    consumer = sink("timed", FileDestination(path=log), **timed)
    wanted = wanted_by([sink("plain", FileDestination(path=log)), consumer])
    frame = (
        spark.read.format("walbrook")
        .option("path", str(log))
        .option("executorPath", served)
        .option("markers", "true")
        .option("partitions", PARTITIONS)
        .option("startingBatch", 0)
        .option("endingBatch", TRANSACTIONS)
        .option("wanted", wanted.to_text())
        .load()
    )
    plan = ClusterPlan(frame.repartition(PARTITIONS), "shared", log, 0, wanted)
    try:
        slices = Reorder(0).micro_batch(plan.decode())
        share = Share(
            consumer, Origin("shop", "h", "d"), "run", Cursor(200, 0), END, slices, wanted
        )
        rows = pa.Table.from_batches(in_order(share, plan.fetch(share)))
    finally:
        plan.close()
    found = zip(*(rows.column(n).to_pylist() for n in ("commit_lsn", "commit_idx")), strict=True)
    assert [Cursor(*each) for each in found] == [c for c in everything(log) if c >= (200, 0)]
    names = [orjson.loads(record)["name"] for record in rows.column("record").to_pylist()]
    assert rows.column(wanted.time_name("name")).to_pylist() == names


def test_an_executor_delivers_what_expressions_judged_and_writes_parquet_files(
    spark: SparkSession,
    log: Path,
    served: str,
    authority: Authority,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_the_driver(*_: object) -> None:
        raise AssertionError("the driver delivered a share")

    monkeypatch.setattr(cluster_module, "deliver_changes", in_the_driver)
    # So many rows are judged by a Spark job; the driver asks the log's server for their tables.
    monkeypatch.setattr(for_share, "DRIVER_ROWS_MAX", 1_000)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv(CA_VARIABLE, str(authority.certificate))
    in_redis = RedisStreamDestination(url=SecretText(redis_url), stream_key="judged")
    _, outcomes = deliver_all(
        spark,
        log,
        served,
        tmp_path / "checkpoint",
        sink("even", in_redis, filter="record.id % 2 = 0"),
        sink("table", ParquetDestination(columns="json", max_delay_ms=0, path=tmp_path / "table")),
    )
    assert [(outcome.cursor, outcome.error) for outcome in outcomes] == [(END, None)] * 2
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", redis_client.xrange("judged"))
    ids = [orjson.loads(fields[b"record"])["id"] for _, fields in entries]
    assert ids
    assert all(number % 2 == 0 for number in ids)
    in_table = cursors_in_parquet(tmp_path / "table")
    assert in_table == everything(log)
    # Another run of the same range is absorbed by the position that the executor left.
    _, (again,) = deliver_all(
        spark,
        log,
        served,
        tmp_path / "again",
        sink("table", ParquetDestination(columns="json", max_delay_ms=0, path=tmp_path / "table")),
    )
    assert (again.delivered, again.absorbed) == (0, len(in_table))
    assert cursors_in_parquet(tmp_path / "table") == in_table


def test_the_driver_writes_parquet_files_where_executors_lack_the_directory(
    spark: SparkSession, log: Path, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_mark", lambda _: tmp_path / "of another machine")
    _, (outcome,) = deliver_all(
        spark,
        log,
        served,
        tmp_path / "checkpoint",
        sink("alone", ParquetDestination(columns="json", max_delay_ms=0, path=tmp_path / "table")),
    )
    assert (outcome.cursor, outcome.error) == (END, None)
    assert cursors_in_parquet(tmp_path / "table") == everything(log)


def cursors_in_parquet(directory: Path) -> list[Cursor]:
    """The cursors of all rows in a folder of Parquet files, in order."""
    table = pq.read_table(directory, columns=["commit_lsn", "commit_idx"])
    return sorted(map(Cursor, *(column.to_pylist() for column in table.columns)))


def test_a_lost_executor_costs_a_second_read_and_a_failing_sink_is_reported_as_what_it_is(
    spark: SparkSession,
    cluster: StandaloneCluster,
    log: Path,
    served: str,
    endpoint: Endpoint,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> None:
    in_redis = RedisStreamDestination(url=SecretText(redis_url), stream_key="lost")
    endpoint.refuses = lambda messages: any(
        cast("dict[str, int]", message["record"])["id"] == KEYS // 2 for message in messages
    )

    def lose_an_executor() -> None:
        cluster.executors()[0].kill()

    _, (stream, hook) = deliver_all(
        spark,
        log,
        served,
        tmp_path,
        sink("stream", in_redis),
        sink("hook", WebhookDestination(url=endpoint.url, max_retries=0)),
        between=lose_an_executor,
    )
    assert (stream.cursor, stream.error) == (END, None)
    assert redis_client.xlen("lost") == TRANSACTIONS * ROWS
    assert (hook.cursor, hook.error) == (END, None)
    assert hook.queued is not None
    assert "422" in str(hook.queued.column("error")[0])
    sent = [message for request in endpoint.accepted for message in request.messages]
    queued = map(Cursor, *(hook.queued.column(n).to_pylist() for n in ("commit_lsn", "commit_idx")))
    assert {*cursors_of(sent), *queued} == set(everything(log)), "delivered or queued, nothing else"


def test_the_token_is_never_shown(spark: SparkSession) -> None:
    context = spark.sparkContext
    where = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/environment"
    page = httpx.get(where, timeout=30).text
    assert f"spark.executorEnv.{TOKEN_VARIABLE}" in page
    assert TOKEN not in page
    everyone = psutil.process_iter(["cmdline"])
    commands = [" ".join(process.info["cmdline"] or ()) for process in everyone]
    assert any("SparkSubmit" in command for command in commands)
    assert not [command for command in commands if TOKEN in command]


def test_an_executors_failure_to_read_is_reported_in_our_words(
    spark: SparkSession, log: Path, tmp_path: Path
) -> None:
    nowhere = f"grpc://127.0.0.1:{free_port()}/shop"
    with pytest.raises(PySparkException) as raised:
        deliver_all(spark, log, nowhere, tmp_path)
    what = as_walbrook_error(raised.value)
    assert isinstance(what, TransientError)
    assert str(what).startswith(f"the log server at {nowhere.removesuffix('/shop')} cannot be")
    assert len(str(what).splitlines()) == 1
