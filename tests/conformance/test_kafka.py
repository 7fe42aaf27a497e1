"""What the Kafka sink promises in both modes, on a real broker, read by a committed reader."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from cdc.change import MessageBatch
from cdc.config import loads
from cdc.config.destination import KafkaDestination
from cdc.config.kafka import KafkaTopics
from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.shapes import ShapeName
from cdc.errors import OperatorError, PoisonError, TransientError
from cdc.queue.groups import Grouping
from cdc.queue.retry import TOO_LARGE
from sinks import open_sink
from sinks.base import Delivery, Sink
from sinks.kafka.errors import FENCED
from tests.conformance.harness import Harness, Shaped, routed
from tests.conformance.messages import (
    CONSUMER,
    Held,
    Sample,
    batch,
    batch_of,
    cursor_of,
    expected,
    held,
    numbered,
)

# The suite that every sink passes, collected here so that one process starts the broker.
from tests.conformance.test_sinks import (  # noqa: F401
    test_a_batch_of_ten_thousand_arrives_in_order,
    test_a_message_of_5_mb_arrives_whole_between_small_ones,
    test_a_replay_that_is_cut_differently_adds_only_what_is_missing,
    test_a_sink_that_is_opened_again_goes_on,
    test_an_unreachable_destination_settles_nothing_and_works_when_it_is_back,
    test_every_character_arrives_exactly,
    test_messages_arrive_in_order_and_exactly,
    test_two_open_sinks_that_replay_the_same_range_neither_lose_nor_reorder,
    test_two_open_sinks_that_take_turns_go_on_where_the_other_one_stopped,
)
from tests.fix_kafka import Kafka
from tests.waiting import until

_RETRIES = 200
_TIMEOUT_MS = 4000


class KafkaHarness(Shaped):
    """One topic with one partition, so that its order is that of all messages."""

    def __init__(self, kafka: Kafka, *, exactly_once: bool, shape: ShapeName = "sequin") -> None:
        self.kafka = kafka
        self.absorbs = exactly_once
        self.shape = shape
        self.topic = kafka.create("changes")

    def destination(self, **settings: object) -> KafkaDestination:
        plain: dict[str, object] = {
            "bootstrap_servers": (self.kafka.through_proxy,),
            "topic": self.topic,
            "exactly_once": self.absorbs,
            "cursor_topic": f"{self.kafka.prefix}.cursor" if self.absorbs else None,
            "timeout_ms": _TIMEOUT_MS,
        }
        return KafkaDestination.model_validate({**plain, **settings})

    def open(self) -> Sink:
        return self.open_with()

    def open_with(self, consumer: str = CONSUMER, **settings: object) -> Sink:
        destination = self.destination(**settings)
        return _Worker(open_sink(destination, consumer=consumer, batch_size=10_000, source="d"))

    def held(self) -> list[Held]:
        messages = self.kafka.read(self.topic)
        return [held(orjson.loads(one.value() or b""), self.shape) for one in messages]

    @contextmanager
    def outage(self) -> Iterator[None]:
        proxy, broker = self.kafka.proxy, self.kafka.broker
        proxy.retarget("host=127.0.0.1 port=1")
        try:
            yield
        finally:
            proxy.retarget(f"host=127.0.0.1 port={broker.ports.proxied}")


class _Worker:
    """A sink whose caller delivers again when it was fenced, as a worker does."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def deliver(self, batch: MessageBatch) -> Delivery:
        settled = absorbed = 0
        top: Cursor | None = None
        for _ in range(_RETRIES):
            done = self.sink.deliver(batch.slice(settled))
            settled, absorbed = settled + done.settled, absorbed + done.absorbed
            top = top or done.top
            if done.error is None or done.error.kind != FENCED:
                return Delivery(settled, absorbed, done.error, top=top)
        raise AssertionError(f"fenced {_RETRIES} times")

    def close(self) -> None:
        self.sink.close()


_CASES = [
    ("at least once", "sequin"),
    ("exactly once", "sequin"),
    pytest.param(("at least once", "debezium"), marks=pytest.mark.sinks),
    pytest.param(("exactly once", "record"), marks=pytest.mark.sinks),
]
"""Every mode and every shape: records are made of messages in the same way in both modes."""


@pytest.fixture(params=_CASES, ids=" ".join)
def harness(request: pytest.FixtureRequest, kafka: Kafka) -> Harness:
    mode, shape = request.param
    return KafkaHarness(kafka, exactly_once=mode == "exactly once", shape=shape)


@pytest.fixture(params=[False, True], ids=["at least once", "exactly once"])
def either(request: pytest.FixtureRequest, kafka: Kafka) -> KafkaHarness:
    return KafkaHarness(kafka, exactly_once=request.param)


@pytest.fixture
def once(kafka: Kafka) -> KafkaHarness:
    return KafkaHarness(kafka, exactly_once=True)


def _deliver(sink: Sink, *batches: MessageBatch) -> None:
    for one in batches:
        delivery = sink.deliver(one)
        assert (delivery.error, delivery.settled) == (None, len(one))


def _deliver_until_taken(sink: Sink, batch: MessageBatch) -> None:
    """Deliver again while the broker is away or slow, as a worker does."""
    until("a delivery", lambda: sink.deliver(batch).error is None, 60)


def _check_held(harness: KafkaHarness, count: int) -> None:
    """All messages are there in order; only at least once some may be there again."""
    found = list(map(str, harness.held()))
    first_arrivals = list(dict.fromkeys(found))
    assert first_arrivals == list(map(str, expected(numbered(0, count))))
    assert not harness.absorbs or found == first_arrivals


def test_a_record_has_the_key_and_says_its_cursor_and_its_idempotency_key(
    either: KafkaHarness,
) -> None:
    sink = either.open()
    _deliver(sink, batch(0, 20))
    sink.close()
    messages = either.kafka.read(either.topic)
    assert [one.key() for one in messages] == [b'["%d"]' % n for n in range(20)]
    cursors = [f"{cursor_of(n).lsn}:{cursor_of(n).idx}".encode() for n in range(20)]
    headers = [dict(one.headers() or ()) for one in messages]
    assert headers == [{"walbrook-cursor": c, "idempotency-key": c} for c in cursors]


@pytest.mark.sinks
def test_a_template_and_a_route_give_topics_and_each_keeps_the_order_of_its_keys(
    either: KafkaHarness,
) -> None:
    prefix = either.kafka.prefix
    sink = either.open_with(topic=prefix + ".{schema}.{table}", create_topics={"partitions": 3})
    _deliver(sink, batch(0, 600))
    _deliver(sink, routed(batch(600, 900), f"{prefix}."))
    sink.close()
    assert [topic for topic in either.kafka.topics() if "cursor" not in topic] == [
        f"{prefix}.{name}"
        for name in ("changes", "orders", "public.orders", "public.users", "users")
    ]
    found: list[Held] = []
    for topic in either.kafka.topics():
        if topic.endswith(("users", "orders")):
            messages = either.kafka.read(topic)
            assert {one.partition() for one in messages} == {0, 1, 2}
            for _, of_one in itertools.groupby(messages, lambda one: one.partition()):
                here = [held(orjson.loads(one.value() or b"")) for one in of_one]
                assert here == sorted(here, key=lambda one: one.cursor or ORIGIN)
                found += here
    assert sorted(found, key=lambda one: one.cursor or ORIGIN) == expected(numbered(0, 900))


@pytest.mark.sinks
def test_the_partition_of_a_key_is_that_of_other_clients(kafka: Kafka) -> None:
    """murmur2 as Java's producer computes it: known pairs of key and partition."""
    topic = kafka.create("partitioned", partitions=7)
    harness = KafkaHarness(kafka, exactly_once=False)
    sink = harness.open_with(topic=topic)
    _deliver(sink, batch(0, 200))
    sink.close()
    for message in kafka.read(topic):
        assert message.partition() == (_murmur2(message.key() or b"") & 0x7FFFFFFF) % 7


def test_a_delete_is_followed_by_a_tombstone_and_a_key_that_was_left_has_one(
    either: KafkaHarness,
) -> None:
    sink = either.open_with(tombstones=True)
    moved = batch(100, 101).rows
    at = moved.schema.get_field_index("old_record_pks")
    moved = moved.set_column(at, moved.schema.field(at), pa.array(['["1"]']))
    _deliver(sink, batch(0, 6), MessageBatch(moved, batch(0, 1).shape))
    sink.close()
    found = [(one.key(), one.value() is None) for one in either.kafka.read(either.topic)]
    assert found == [
        (b'["0"]', False), (b'["1"]', False), (b'["2"]', False), (b'["2"]', True),
        (b'["3"]', False), (b'["4"]', False), (b'["5"]', False), (b'["5"]', True),
        (b'["1"]', True), (b'["100"]', False),
    ]  # fmt: skip


@pytest.mark.sinks
def test_groups_by_other_columns_are_the_keys(either: KafkaHarness) -> None:
    grouping = Grouping(columns={"public.users": ("name",)})
    sink = open_sink(
        either.destination(), consumer=CONSUMER, batch_size=100, source="d", grouping=grouping
    )
    _deliver(sink, batch_of([Sample({"id": n, "name": f"n{n % 2}"}) for n in range(4)]))
    sink.close()
    assert [one.key() for one in either.kafka.read(either.topic)] == [b'["n0"]', b'["n1"]'] * 2


@pytest.mark.sinks
def test_a_message_that_is_too_large_is_named_and_all_others_arrive_once(
    either: KafkaHarness,
) -> None:
    topic = either.kafka.create("small", max_message_bytes="20000")
    samples = numbered(0, 300)
    samples[137] = Sample({"id": 137, "blob": _noise(40_000)})
    sink = either.open_with(topic=topic, compression="none")
    whole = batch_of(samples)
    delivery = sink.deliver(whole)
    assert delivery.settled == 137
    assert isinstance(delivery.error, PoisonError)
    assert delivery.error.kind == TOO_LARGE
    assert "max.message.bytes" in delivery.error.fix
    _deliver(sink, whole.slice(138))
    sink.close()
    found = [held(orjson.loads(one.value() or b"")) for one in either.kafka.read(topic)]
    wanted = expected(samples)
    wanted.pop(137)
    if either.absorbs:
        assert found == wanted
    else:
        assert list(dict.fromkeys(map(str, found))) == list(map(str, wanted))


@pytest.mark.sinks
def test_a_broker_that_is_restarted_is_found_again(either: KafkaHarness) -> None:
    sink = either.open()
    _deliver(sink, batch(0, 50))
    either.kafka.broker.stop(immediate=True)
    delivery = sink.deliver(batch(50, 80))
    assert delivery.settled == 0
    assert isinstance(delivery.error, TransientError)
    either.kafka.broker.start()
    _deliver_until_taken(sink, batch(50, 80))
    sink.close()
    _check_held(either, 80)


@pytest.mark.sinks
def test_a_broker_that_does_not_answer_is_given_up_in_time(either: KafkaHarness) -> None:
    sink = either.open_with(timeout_ms=1500)
    _deliver_until_taken(sink, batch(0, 10))
    either.kafka.proxy.freeze()
    try:
        delivery = sink.deliver(batch(10, 20))
    finally:
        either.kafka.proxy.thaw()
    assert delivery.settled == 0
    assert isinstance(delivery.error, TransientError)
    _deliver_until_taken(sink, batch(10, 30))
    sink.close()
    _check_held(either, 30)


@pytest.mark.sinks
def test_a_topic_that_does_not_exist_needs_an_operator(either: KafkaHarness) -> None:
    sink = either.open_with(topic=f"{either.kafka.prefix}.nowhere", timeout_ms=2000)
    delivery = sink.deliver(batch(0, 10))
    sink.close()
    assert (delivery.settled, type(delivery.error)) == (0, OperatorError)
    assert "create_topics" in str(delivery.error)


@pytest.mark.sinks
def test_topics_that_the_cluster_refuses_to_create_need_an_operator(either: KafkaHarness) -> None:
    sink = either.open_with(
        topic=f"{either.kafka.prefix}.new", create_topics=KafkaTopics(replication_factor=5)
    )
    delivery = sink.deliver(batch(0, 10))
    sink.close()
    assert (delivery.settled, type(delivery.error)) == (0, OperatorError)
    assert "replication_factor" in str(delivery.error)


def test_a_cursor_topic_says_how_far_it_had_come_and_whose_it_is(once: KafkaHarness) -> None:
    sink = once.open()
    assert sink.deliver(batch(0, 10)).top == ORIGIN
    assert sink.deliver(batch(10, 20)).top == cursor_of(9)
    sink.close()
    again = once.open()
    assert again.deliver(batch(15, 25)).top == cursor_of(19)
    again.close()
    stranger = once.open_with(consumer="renamed")
    delivery = stranger.deliver(batch(25, 30))
    stranger.close()
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)
    assert "of the consumer orders, not of renamed" in delivery.error.what


@pytest.mark.sinks
def test_a_cursor_that_cannot_be_used_leaves_no_producer_at_each_try(once: KafkaHarness) -> None:
    _deliver(once.open(), batch(0, 10))
    stranger = once.open_with(consumer="renamed")

    def threads() -> int:
        """Those of the client library are not Python's."""
        stranger.deliver(batch(25, 30))
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    gc.disable()  # it would remove them, some time
    try:
        counts = [threads() for _ in range(4)]
    finally:
        gc.enable()
        stranger.close()
    assert counts[-1] - counts[0] < 5, "a producer has so many threads"


@pytest.mark.sinks
def test_a_cursor_is_found_behind_many_aborted_transactions(once: KafkaHarness) -> None:
    small = once.kafka.create("small", max_message_bytes="20000")
    sink = once.open_with(topic=small, compression="none")
    _deliver(sink, batch(0, 10))
    large = batch_of([Sample({"id": 10, "blob": _noise(40_000)})], start=10)
    for _ in range(10):
        delivery = sink.deliver(large)
        assert isinstance(delivery.error, PoisonError)
    sink.close()
    again = once.open_with(topic=small)
    assert again.deliver(batch(0, 10)).absorbed == 10
    again.close()


def test_a_process_that_was_replaced_is_fenced_and_adds_nothing(once: KafkaHarness) -> None:
    """The stale one has a transaction open when another process takes over."""
    stale, fresh = once.open_with(), once.open_with()
    assert isinstance(stale, _Worker)
    _deliver(stale, batch(0, 10))
    connection, _ = stale.sink._opened  # type: ignore[attr-defined]
    connection.producer.begin_transaction()
    connection.producer.produce(once.topic, b"never to be seen")
    connection.producer.flush(5)
    _deliver(fresh, batch(10, 20))
    failure = stale.sink._end(connection)  # type: ignore[attr-defined]
    assert (type(failure), failure.kind) == (TransientError, FENCED)
    assert "cursor_topic" in failure.fix
    _deliver(stale, batch(10, 30))
    stale.close()
    fresh.close()
    assert once.held() == expected(numbered(0, 30))


@pytest.mark.sinks
def test_two_that_fence_each_other_all_the_time_are_refused(once: KafkaHarness) -> None:
    """A sink takes over once in a delivery, not for ever."""
    sink = once.open_with()
    assert isinstance(sink, _Worker)
    _deliver(sink, batch(0, 10))
    plain, others = sink.sink, []

    def fenced_meanwhile(connection: object) -> object:
        other = once.open_with(consumer=CONSUMER)
        _deliver(other, batch(0, 10))
        others.append(other)
        return end(connection)

    end = plain._end  # type: ignore[attr-defined]
    plain._end = fenced_meanwhile  # type: ignore[attr-defined]
    delivery = plain.deliver(batch(10, 20))
    for each in (*others, sink):
        each.close()
    assert (delivery.settled, delivery.error and delivery.error.kind) == (0, FENCED)
    assert once.held() == expected(numbered(0, 10))


@pytest.mark.sinks
def test_readers_of_committed_messages_see_a_delivery_whole(once: KafkaHarness) -> None:
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(len(once.kafka.read(once.topic)))

    reader = threading.Thread(target=look)
    reader.start()
    sink = once.open()
    try:
        for start in range(0, 5000, 500):
            _deliver(sink, batch(start, start + 500))
    finally:
        done.set()
        reader.join()
        sink.close()
    assert seen == sorted(seen)
    assert all(count % 500 == 0 for count in seen)
    assert once.held() == expected(numbered(0, 5000))


@pytest.mark.sinks
def test_the_example_of_the_page_delivers(kafka: Kafka) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sinks" / "kafka.md").read_text()
    example, security = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    database = "{name: shop, database: shop, slot: {name: w}, publication: {name: w}}"
    environ = {"KAFKA_SERVER": kafka.servers, "KAFKA_PASSWORD": "p"}
    topic = f"walbrook.public.{kafka.prefix}"
    for text in (example, example + security):
        config = loads(f"databases: [{database}]\n{text}", Path("/"), environ)
    config = loads(f"databases: [{database}]\n{example}", Path("/"), environ)
    (configured,) = config.sinks
    sink = open_sink(
        configured.destination,
        consumer=configured.name,
        batch_size=configured.effective_batch_size,
        source="shop",
    )
    samples = [Sample({"id": n}, action="delete", table=kafka.prefix) for n in range(3)]
    _deliver(sink, batch_of(samples))
    sink.close()
    values = [one.value() for one in kafka.read(topic)]
    assert len(values) == 6
    assert values.count(None) == 3


def _noise(size: int) -> str:
    """Text that cannot be compressed below the limit."""
    return "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=size))


def _murmur2(data: Sequence[int]) -> int:
    """The hash of Kafka's own default partitioner."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(bytes(data[at : at + 4]), "little")
        k = k * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    rest = data[whole:]
    if rest:
        h = (h ^ int.from_bytes(bytes(rest), "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)
