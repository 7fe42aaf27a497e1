"""What every sink promises, asked of each on its real destination, in every shape it takes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cdc.change import MessageBatch
from cdc.decoding.shapes import SHAPES
from sinks.base import Delivery, Sink
from tests.conformance.harness import (
    DeltaHarness,
    FileHarness,
    Harness,
    IcebergHarness,
    LedgeredHarness,
    ParquetHarness,
    PostgresHarness,
    PullHarness,
    RedisHarness,
    RoutedRedisHarness,
    RoutedWebhookHarness,
    TypedParquetHarness,
    WebhookHarness,
)
from tests.conformance.messages import Sample, numbered
from tests.fix_ledger import KnownLedger

pytestmark = pytest.mark.migrated

_SHAPED = [
    pytest.param((sink, shape), marks=[] if shape == "sequin" else [pytest.mark.sinks])
    for sink in ("file", "redis_stream", "webhook")
    for shape in SHAPES
]


_ROUTED = [("redis_stream", "routed"), ("webhook", "routed")]
_EVENTS = ("postgres", "events")
_ON_DISK = [("parquet", "sequin"), ("parquet", "typed"), ("delta", "sequin"), ("iceberg", "sequin")]
_LEDGERED = [("webhook", "postgres ledger"), ("webhook", "redis ledger")]


@pytest.fixture(
    params=[
        *_SHAPED,
        *_ROUTED,
        *_LEDGERED,
        ("parquet", "sequin"),
        ("parquet", "typed"),
        ("delta", "sequin"),
        ("iceberg", "sequin"),
        ("pull", "sequin"),
        _EVENTS,
    ],
    ids="-".join,
)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    sink, shape = request.param
    if sink == "file":
        return FileHarness(tmp_path, shape)
    if sink == "pull":
        return PullHarness(request.getfixturevalue("database"), shape)
    if sink == "postgres":
        return PostgresHarness(request.getfixturevalue("database"))
    if sink == "delta":
        return DeltaHarness(tmp_path)
    if sink == "iceberg":
        return IcebergHarness(tmp_path)
    if sink == "parquet":
        return TypedParquetHarness(tmp_path) if shape == "typed" else ParquetHarness(tmp_path)
    if sink == "redis_stream":
        redis = (request.getfixturevalue("redis_url"), request.getfixturevalue("redis_client"))
        return RoutedRedisHarness(*redis) if shape == "routed" else RedisHarness(*redis, shape)
    endpoint = request.getfixturevalue("endpoint")
    if shape.endswith("ledger"):
        found: KnownLedger = request.getfixturevalue(shape.replace(" ", "_"))
        return LedgeredHarness(endpoint, found.address, found.name)
    return RoutedWebhookHarness(endpoint) if shape == "routed" else WebhookHarness(endpoint, shape)


def _deliver(sink: Sink, *batches: MessageBatch) -> None:
    for one in batches:
        delivery = sink.deliver(one)
        assert delivery.error is None
        assert delivery.settled == len(one)


def test_messages_arrive_in_order_and_exactly(harness: Harness) -> None:
    sink = harness.open()
    _deliver(sink, harness.batch(0, 1), harness.batch(1, 250), harness.batch(250, 600))
    sink.close()
    assert harness.held() == harness.expected(numbered(0, 600))


def test_a_replay_that_is_cut_differently_adds_only_what_is_missing(harness: Harness) -> None:
    sink = harness.open()
    _deliver(sink, harness.batch(0, 100), harness.batch(100, 200))
    replay = [sink.deliver(harness.batch(50, 130)), sink.deliver(harness.batch(130, 260))]
    sink.close()
    assert [one.settled for one in replay] == [80, 130]
    if harness.absorbs:
        assert [one.absorbed for one in replay] == [80, 70]
        assert harness.held() == harness.expected(numbered(0, 260))
    else:
        assert harness.held() == harness.expected([*numbered(0, 200)]) + harness.expected(
            numbered(50, 260), start=50
        )


def test_a_sink_that_is_opened_again_goes_on(harness: Harness) -> None:
    for start in (0, 40, 80):
        sink = harness.open()
        _deliver(sink, harness.batch(start, start + 40))
        sink.close()
    assert harness.held() == harness.expected(numbered(0, 120))


def test_two_open_sinks_that_replay_the_same_range_neither_lose_nor_reorder(
    harness: Harness,
) -> None:
    deliveries: list[Delivery] = []

    def replay(step: int) -> None:
        sink = harness.open()
        for start in range(0, 600, step):
            deliveries.append(sink.deliver(harness.batch(start, min(start + step, 600))))
        sink.close()

    threads = [threading.Thread(target=replay, args=(step,)) for step in (35, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.error for one in deliveries if one.error] == []
    assert sum(one.settled for one in deliveries) == 1200
    held = harness.held()
    if harness.absorbs and not harness.races:
        assert sum(one.absorbed for one in deliveries) == 600
    else:
        assert len(held) == 1200 - sum(one.absorbed for one in deliveries)
        held = list({str(one.record): one for one in held}.values())  # first arrivals, in order
    assert held == harness.expected(numbered(0, 600))


def test_two_open_sinks_that_take_turns_go_on_where_the_other_one_stopped(
    harness: Harness,
) -> None:
    # As the driver and a worker do; what the last of them sent was never settled.
    driver, worker = harness.open(), harness.open()
    _deliver(driver, harness.batch(0, 40))
    _deliver(worker, harness.batch(40, 300))
    _deliver(driver, harness.batch(300, 310))
    _deliver(worker, harness.batch(310, 450))
    delivery = driver.deliver(harness.batch(310, 600))
    driver.close()
    worker.close()
    assert (delivery.error, delivery.settled) == (None, 290)
    if harness.absorbs:
        assert delivery.absorbed == 140
        assert harness.held() == harness.expected(numbered(0, 600))
    else:
        assert harness.held() == harness.expected(numbered(0, 450)) + harness.expected(
            numbered(310, 600), start=310
        )


def test_an_unreachable_destination_settles_nothing_and_works_when_it_is_back(
    harness: Harness,
) -> None:
    sink = harness.open()
    with harness.outage():
        delivery = sink.deliver(harness.batch(0, 150))
    assert delivery.settled == 0
    assert delivery.error is not None
    assert delivery.error.fix
    _deliver(sink, harness.batch(0, 150))
    sink.close()
    assert harness.held() == harness.expected(numbered(0, 150))


def test_a_message_of_5_mb_arrives_whole_between_small_ones(harness: Harness) -> None:
    samples = numbered(0, 9)
    samples[4] = Sample({"id": 4, "blob": "0123456789" * 500_000})
    sink = harness.open()
    _deliver(sink, harness.batch_of(samples))
    sink.close()
    assert harness.held() == harness.expected(samples)


def test_every_character_arrives_exactly(harness: Harness) -> None:
    hostile = [
        'quotes " and \\ backslashes \\" \\\\n',
        "line\nbreaks\r\nand\ttabs",
        "".join(map(chr, range(1, 32))) + "\x7f\x85\u2028\u2029\ufeff",
        "żółć 日本語 العربية 👩‍👩‍👧‍👦 \U0010ffff",
        "$5\r\nhello\r\n*3\r\n-ERR\r\n+OK",
        "",
    ]
    samples = [
        Sample({text: text, "id": n}, {text: None, "old": text}, "update")
        for n, text in enumerate(hostile)
    ]
    sink = harness.open()
    _deliver(sink, harness.batch_of(samples))
    sink.close()
    assert harness.held() == harness.expected(samples)


def test_a_batch_of_ten_thousand_arrives_in_order(harness: Harness) -> None:
    sink = harness.open()
    _deliver(sink, harness.batch(0, 10_000))
    sink.close()
    assert harness.held() == harness.expected(numbered(0, 10_000))
