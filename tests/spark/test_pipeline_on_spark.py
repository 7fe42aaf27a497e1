"""Micro-batches on real executors: order, workers that die, messages that kill them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from cdc.config.secrets import SecretText
from cdc.connection import Connection
from cdc.log.view import LogView
from cdc.queue.ledger.open import LedgerAddress
from spark_pipeline.feed.plan import job_group
from spark_pipeline.feed.reorder import Reorder
from spark_pipeline.slices.exchange import SliceMarker
from spark_pipeline.source.range_reader import LogPartition
from spark_pipeline.source.slicing import cut
from spark_pipeline.source.stream import LogStreamReader
from tests import pgoutput
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import SOURCE, LogPipeline, arrived, cursors_of
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
OTHER = pgoutput.relation(2, "public", "other", [("id", 23, True), ("name", 25)])
TRANSACTIONS, ROWS, KEYS = 30, 40, 17
FEW = 6  # transactions, where every halving of what they hold costs a worker


@pytest.fixture
def on_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogPipeline, "driver_rows", 0)


def filled(pipeline: LogPipeline, transactions: int = TRANSACTIONS) -> LogPipeline:
    """Updates of a few rows in turns; the n-th change of a row has the name n."""
    number = 0
    for at in range(transactions):
        changes = []
        for _ in range(ROWS):
            changes.append(pgoutput.insert(1, [str(number % KEYS), str(number)]))
            number += 1
        first = [ITEM] if not at else []
        pipeline.write(*first, *transaction(0x1000 + 8 * at, *changes))
    return pipeline


def shuffled(spark: SparkSession, pipeline: LogPipeline) -> DataFrame:
    """The log decoded in many partitions, whose markers come back in no order."""
    reader = LogStreamReader.in_process(pipeline.directory / "log", pipeline.exchange.directory)
    end = pipeline.log.next_batch
    index = LogView(pipeline.directory / "log").entries(0, end)
    rows, sizes = index["rows"].tolist(), index["bytes"].tolist()
    partitions = [
        LogPartition(0, end, pipeline.log.manifest.history, slices)
        for slices in cut(0, rows, 11, sizes)
    ]
    assert len(partitions) > 5
    random.Random(7).shuffle(partitions)
    batches = [batch for partition in partitions for batch in reader.read(partition)]
    return spark.createDataFrame(pa.Table.from_batches(batches))


def names_by_key(messages: list[dict[str, object]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for message in messages:
        record = message["record"]
        assert isinstance(record, dict)
        names = found.setdefault(record["id"], [])
        if int(record["name"]) not in names:  # first arrivals count
            names.append(int(record["name"]))
    return found


def expected_of(transactions: int) -> dict[int, list[int]]:
    return {key: list(range(key, transactions * ROWS, KEYS)) for key in range(KEYS)}


EXPECTED = expected_of(TRANSACTIONS)


def as_they_came(_: Reorder, markers: list[SliceMarker]) -> list[SliceMarker]:
    return markers


@pytest.mark.parametrize("restored", [True, False])
def test_order_is_kept_with_many_partitions_and_only_because_it_is_restored(
    spark: SparkSession,
    state: Connection,
    tmp_path: Path,
    on_executors: None,
    monkeypatch: pytest.MonkeyPatch,
    restored: bool,
) -> None:
    pipeline = filled(LogPipeline(state, tmp_path, files={}))
    if not restored:
        monkeypatch.setattr(Reorder, "micro_batch", as_they_came)
    pipeline.take_frame(shuffled(spark, pipeline))
    messages = arrived(tmp_path / "files")
    cursors = cursors_of(messages)
    assert (names_by_key(messages) == EXPECTED) is restored
    assert (cursors == sorted(cursors)) is restored
    pipeline.close()


def hook(endpoint: Endpoint) -> dict[str, object]:
    return {
        "destination": {"type": "webhook", "url": endpoint.url, "max_retries": 0},
        "batch_size": 10,
    }


def test_a_group_keeps_its_order_where_several_requests_go_out_at_once(
    spark: SparkSession,
    state: Connection,
    endpoint: Endpoint,
    tmp_path: Path,
    on_executors: None,
) -> None:
    pipeline = filled(LogPipeline(state, tmp_path, hook=hook(endpoint) | {"partition_count": 4}))
    pipeline.take_frame(shuffled(spark, pipeline))
    messages = [message for request in endpoint.accepted for message in request.messages]
    assert len(messages) == TRANSACTIONS * ROWS
    assert names_by_key(messages) == EXPECTED
    mixed = [int(m["record"]["name"]) for m in messages]  # type: ignore[index]
    assert mixed != sorted(mixed), "one request after another"
    pipeline.close()


def _workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some come and go
            if "python_daemon pyspark.worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def kills(wanted: Callable[[int], bool]) -> Callable[[list[dict[str, object]]], bool]:
    """For an endpoint: the sender of some messages does not live to see the answer."""

    def receive(messages: list[dict[str, object]]) -> bool:
        if any(wanted(int(m["record"]["name"])) for m in messages):  # type: ignore[index]
            workers = _workers()
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    if worker.parent() in workers:  # the daemon itself stays
                        worker.kill()
        return False

    return receive


def test_a_worker_that_dies_in_mid_delivery_costs_a_repeat_of_its_last_two_requests_at_most(
    spark: SparkSession,
    state: Connection,
    database: Database,
    endpoint: Endpoint,
    tmp_path: Path,
    on_executors: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LogPipeline, "ledger", LedgerAddress("postgres", SecretText(database.dsn)))
    pipeline = filled(LogPipeline(state, tmp_path, hook=hook(endpoint)))
    died: list[int] = []

    def once(name: int) -> bool:
        return name == 333 and not died.append(name) and len(died) == 1  # type: ignore[func-returns-value]

    endpoint.refuses = kills(once)
    pipeline.take_frame(shuffled(spark, pipeline))
    messages = [message for request in endpoint.accepted for message in request.messages]
    assert len(died) > 1
    assert names_by_key(messages) == EXPECTED
    assert pipeline.rows("SELECT count(*) FROM walbrook.dead_letters") == [(0,)]
    arrivals = Counter(int(m["record"]["name"]) for m in messages)  # type: ignore[index]
    repeated = [name for name, times in arrivals.items() if times > 1]
    assert repeated in (list(range(330, 340)), list(range(320, 340))), "one may be unnoted"
    absorbed = 340 - len(repeated)
    assert pipeline.rows("SELECT delivered, absorbed FROM walbrook.consumers") == [
        (TRANSACTIONS * ROWS - absorbed, absorbed)
    ]
    assert pipeline.rows("SELECT count(*) FROM walbrook.ledger") == [(0,)]
    pipeline.close()


def test_a_message_that_kills_its_worker_is_found_and_the_others_arrive(
    spark: SparkSession, state: Connection, endpoint: Endpoint, tmp_path: Path, on_executors: None
) -> None:
    sink = hook(endpoint)
    pipeline = filled(LogPipeline(state, tmp_path, hook=sink | {"batch_size": 1000}), FEW)
    endpoint.refuses = kills(lambda name: name == 33)
    pipeline.take_frame(shuffled(spark, pipeline))
    ((kind, table, error, dead),) = pipeline.rows(
        "SELECT kind, table_name, error, count(*) OVER () FROM walbrook.dead_letters"
    )
    assert (kind, table, dead) == ("delivery", "item", 1)
    assert "worker" in error.lower()
    assert pipeline.rows("SELECT dead FROM walbrook.consumers") == [(1,)]
    messages = [message for request in endpoint.accepted for message in request.messages]
    expected = expected_of(FEW)
    expected[33 % KEYS].remove(33)
    found = names_by_key(messages)
    found[33 % KEYS] = [name for name in found[33 % KEYS] if name != 33]
    assert {key: sorted(names) for key, names in found.items()} == expected
    pipeline.close()


def test_no_job_is_run_for_a_consumer_of_other_tables(
    spark: SparkSession, state: Connection, tmp_path: Path, on_executors: None
) -> None:
    others = {"source": {"include_tables": ["public.other"]}}
    pipeline = filled(LogPipeline(state, tmp_path, files={}, others=others), FEW)
    pipeline.take_frame(shuffled(spark, pipeline))
    tracker = spark.sparkContext.statusTracker()
    jobs = {
        name: len(tracker.getJobIdsForGroup(job_group(pipeline.context.run, SOURCE, name)))
        for name in ("files", "others")
    }
    assert jobs == {"files": 1, "others": 0}
    cursors = pipeline.rows(
        "SELECT DISTINCT cursor FROM walbrook.cursors WHERE consumer IS NOT NULL"
    )
    assert len(cursors) == 1, "the consumer without changes stands elsewhere"
    pipeline.close()


def test_a_batch_that_is_cut_between_tables_is_filtered_by_its_own_rows(
    spark: SparkSession,
    state: Connection,
    tmp_path: Path,
    on_executors: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LogPipeline, "spark", spark)
    even = {"source": {"include_tables": ["public.other"]}, "filter": "record.id % 2 = 0"}
    pipeline = LogPipeline(state, tmp_path, others=even)
    items = [pgoutput.insert(1, [str(number), "n"]) for number in range(300)]
    others = [pgoutput.insert(2, [str(number), "n"]) for number in range(100)]
    pipeline.write(ITEM, OTHER, *transaction(0x1000, *items, *others))
    pipeline.take_frame(shuffled(spark, pipeline))
    found = [message["record"]["id"] for message in arrived(tmp_path / "others")]
    assert found == list(range(0, 100, 2))
    assert pipeline.rows("SELECT count(*) FROM walbrook.dead_letters") == [(0,)]
    pipeline.close()
