"""Messages per second of each sink beside the bare loop of its client library, in the same run.

Both send the same messages to the same local server, in pieces of the same size. The sink is handed
decoded changes and makes everything else itself; the bare loop is handed its arguments ready made.
``CASES`` has one entry per sink: a new one needs a context that opens both.

The service then delivers the same changes at a steady rate to Redis and to Kafka in both modes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks import sink_postgres
from benchmarks.sink_latency import latencies
from benchmarks.sink_messages import message_batches
from benchmarks.sizes import Sizes, progress
from cdc.change import MessageBatch
from cdc.config.destination import KafkaDestination, RedisStreamDestination
from cdc.config.secrets import SecretText
from cdc.errors import ProtocolError
from demo.embedded_redis import EmbeddedRedis
from sinks import open_sink
from sinks.base import Sink
from tests.kafka_broker import KafkaBroker

_CONSUMER = "bench"
_PIECE = 10_000  # messages that a sink is handed at once, as delivery does
_REDIS_PIECE = 1_000


@dataclass(frozen=True)
class SinkCase:
    """A sink and its bare loop, both open and warm."""

    sink: Sink
    prepare: Callable[[Sequence[MessageBatch]], Callable[[], None]]  # the bare loop over these


@dataclass(frozen=True)
class Servers:
    """What the sinks of one run deliver to."""

    redis: EmbeddedRedis
    kafka: KafkaBroker


@contextmanager
def _redis_stream(servers: Servers, number: int) -> Iterator[SinkCase]:
    key = f"own-{number}"
    destination = RedisStreamDestination(url=SecretText(servers.redis.url), stream_key=key)
    sink = open_sink(destination, consumer=_CONSUMER, batch_size=_REDIS_PIECE)
    with redis.Redis.from_url(servers.redis.url) as client:

        def prepare(batches: Sequence[MessageBatch]) -> Callable[[], None]:
            ready = [_entries(piece) for batch in batches for piece in batch.slices(_REDIS_PIECE)]

            def loop() -> None:
                for entries in ready:
                    pipeline = client.pipeline()
                    for entry_id, fields in entries:
                        pipeline.xadd(f"bare-{number}", fields, id=entry_id)
                    pipeline.execute()

            return loop

        yield SinkCase(sink, prepare)
        client.flushdb()
    sink.close()


def _entries(batch: MessageBatch) -> list[tuple[str, dict[str, str]]]:
    columns = {name: column.to_pylist() for name, column in batch.fields().items()}
    lsn, idx = (batch.rows.column(name).to_pylist() for name in ("commit_lsn", "commit_idx"))
    fields = [
        {name: value or "null" for name, value in zip(columns, values, strict=True)}
        for values in zip(*columns.values(), strict=True)
    ]
    ids = [f"{one}-{other}" for one, other in zip(lsn, idx, strict=True)]
    return list(zip(ids, fields, strict=True))


def _kafka(exactly_once: bool) -> Callable[[Servers, int], AbstractContextManager[SinkCase]]:
    @contextmanager
    def opened(servers: Servers, number: int) -> Iterator[SinkCase]:
        from sinks.kafka import RecordForm, client_settings
        from sinks.kafka.client import producer_settings
        from sinks.kafka.library import Producer

        name = f"{'once' if exactly_once else 'atleast'}-{number}"
        destination = KafkaDestination.model_validate(
            {
                "bootstrap_servers": (servers.kafka.servers,),
                "topic": name,
                "create_topics": {"partitions": 1},
                "exactly_once": exactly_once,
                "cursor_topic": f"cursor-{name}" if exactly_once else None,
                "timeout_ms": 60_000,
            }
        )
        sink = open_sink(destination, consumer=_CONSUMER, batch_size=_PIECE, source="bench")
        settings = producer_settings(
            client_settings(destination), compression=destination.compression, timeout_s=60
        )
        if exactly_once:
            settings |= {"transactional.id": f"bare-{name}", "transaction.timeout.ms": 120_000}
        producer = Producer(settings)
        if exactly_once:
            producer.init_transactions(30)
        form = RecordForm(_CONSUMER, f"bare-{name}", f"bare-{name}")
        sink.deliver(next(message_batches(1, 1, first=0)))  # it connects, and topics are made
        _create(servers.kafka, f"bare-{name}")

        def prepare(batches: Sequence[MessageBatch]) -> Callable[[], None]:
            ready = [
                [(topic, value, key, _headers(*rest)) for topic, key, value, *rest in made]
                for made in (form.records(batch).rows() for batch in batches)
            ]

            def loop() -> None:
                produce = producer.produce
                for each in ready:
                    if exactly_once:
                        producer.begin_transaction()
                    for topic, value, key, headers in each:
                        produce(topic, value, key, headers=headers)
                    if exactly_once:
                        producer.commit_transaction(60)
                    else:
                        producer.flush(60)

            return loop

        yield SinkCase(sink, prepare)
        sink.close()

    return opened


def _headers(cursor: str, key: str) -> list[tuple[str, str | bytes | None]]:
    return [("walbrook-cursor", cursor), ("idempotency-key", key)]


def _create(broker: KafkaBroker, topic: str) -> None:
    from sinks.kafka.topics import NewTopics, create_topics

    create_topics({"bootstrap.servers": broker.servers}, [topic], NewTopics(1, 1), 30)


CASES: dict[str, Callable[[Servers, int], AbstractContextManager[SinkCase]]] = {
    "redis_stream": _redis_stream,
    "kafka": _kafka(exactly_once=False),
    "kafka_exactly_once": _kafka(exactly_once=True),
}
"""By the name of the field ``sink_ratio_<name>``; each round opens its own, under a number."""


@dataclass(frozen=True)
class Rate:
    """One measurement: messages per second, and microseconds of our CPU time per message."""

    per_s: float
    cpu_us: float


def run(sizes: Sizes) -> dict[str, object]:
    """Every case ``sizes.rounds`` times with ``sizes.rows`` messages, then the latencies."""
    found: dict[str, object] = {"messages": sizes.rows}
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-sinks-") as name,
        EmbeddedRedis(Path(name) / "redis") as own_redis,
        KafkaBroker(Path(name) / "kafka") as broker,
    ):
        servers = Servers(own_redis, broker)
        batches = list(message_batches(sizes.rows, _PIECE))
        for case, opened in CASES.items():
            found |= _measure(case, opened, servers, batches, sizes.rounds)
        found |= sink_postgres.run(sizes.rows, sizes.rounds)
        found |= latencies(Path(name), own_redis, broker, sizes)
    return found


def _measure(
    name: str,
    opened: Callable[[Servers, int], AbstractContextManager[SinkCase]],
    servers: Servers,
    batches: Sequence[MessageBatch],
    rounds: int,
) -> dict[str, object]:
    own, bare = [], []
    for number in range(rounds):
        with opened(servers, number) as case:
            loop = case.prepare(batches)
            bare.append(_timed(loop, batches))
            own.append(_timed(lambda case=case: _deliver(case.sink, batches), batches))  # type: ignore[misc]
    # The better of each: a busy moment must not flatter us.
    ours, limit = (max(one, key=lambda rate: rate.per_s) for one in (own, bare))
    ratio = round(ours.per_s / limit.per_s, 3)
    progress(f"sinks: {name} {ours.per_s:,.0f} messages/s, bare {limit.per_s:,.0f}, {ratio}")
    return {
        f"sink_ratio_{name}": ratio,
        f"sink_cpu_ratio_{name}": round(
            min(rate.cpu_us for rate in bare) / min(rate.cpu_us for rate in own), 3
        ),
        f"{name}_messages_per_s": round(ours.per_s),
        f"{name}_bare_loop_per_s": round(limit.per_s),
        f"{name}_cpu_us_per_message": round(min(rate.cpu_us for rate in own), 2),
        f"{name}_bare_loop_cpu_us_per_message": round(min(rate.cpu_us for rate in bare), 2),
        f"{name}_rounds": {
            "messages_per_s": [round(rate.per_s) for rate in own],
            "bare_loop_per_s": [round(rate.per_s) for rate in bare],
        },
    }


def _deliver(sink: Sink, batches: Sequence[MessageBatch]) -> None:
    for batch in batches:
        delivery = sink.deliver(batch)
        if delivery.error is not None or delivery.settled != len(batch) or delivery.absorbed:
            raise ProtocolError(f"a sink settled {delivery.settled} of {len(batch)}: {delivery}")


def _timed(send: Callable[[], None], batches: Sequence[MessageBatch]) -> Rate:
    messages = sum(map(len, batches))
    started_at, used = time.perf_counter(), time.process_time()
    send()
    took_s, used_s = time.perf_counter() - started_at, time.process_time() - used
    return Rate(messages / took_s, used_s * 1e6 / messages)
