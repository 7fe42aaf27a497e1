"""How long a change takes to Redis and to Kafka in both modes: one service, the same changes.

A client of each destination notes when it could see a change. Latency is that time less the
commit's own, which comes with the change from the same machine's clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import redis
from confluent_kafka import Consumer

from benchmarks.catch_up import BenchmarkTarget, service_of, wait_delivering
from benchmarks.pgbench import CONNECTIONS, writing
from benchmarks.processes import ProcessMeter, cpu_s
from benchmarks.service import OWN_ROLES
from benchmarks.sizes import Sizes, progress
from benchmarks.source import ONE_ROW, BenchmarkSource, open_source
from demo.embedded_redis import EmbeddedRedis
from tests.kafka_broker import KafkaBroker

_NAME = "latency"
_STREAM, _TOPIC, _ONCE = "latency", "latency", "latency-once"
_GRACE_S = 60.0
_WARM_UP_S = 5
_BLOCK_MS, _READ_MAX = 200, 1_000

Look = Callable[[], list[bytes]]
"""Waits for messages for a moment; returns the metadata of those that came."""


class Watcher:
    """A client of a destination, in a thread of its own until it is stopped."""

    def __init__(self, name: str, look: Look) -> None:
        self.name = name
        self._look = look
        self._arrivals: list[tuple[float, list[bytes]]] = []
        self._count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        return self._count

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def latencies_ms(self, since_s: float) -> list[float]:
        """Those of the changes that were committed later."""
        found = []
        for arrived_at, messages in self._arrivals:
            for metadata in messages:
                text = orjson.loads(metadata)["commit_timestamp"]
                committed_at = datetime.fromisoformat(text).timestamp()
                if committed_at >= since_s:
                    found.append((arrived_at - committed_at) * 1000)
        return found

    def _watch(self) -> None:
        while not self._stop.is_set():
            messages = self._look()
            if messages:
                self._arrivals.append((time.time(), messages))
                self._count += len(messages)


def latencies(
    directory: Path, own_redis: EmbeddedRedis, broker: KafkaBroker, sizes: Sizes
) -> dict[str, object]:
    """At ``sizes.rate`` changes per second for ``sizes.seconds``."""
    with ExitStack() as held:
        source = held.enter_context(open_source(directory / "postgres"))
        target = _target(source, own_redis, broker)
        service = held.enter_context(service_of(directory, source, target))
        wait_delivering(source, service, target)
        client = held.enter_context(redis.Redis.from_url(own_redis.url, protocol=2))
        watchers = [
            Watcher("redis_stream", _entries_of(client)),
            Watcher("kafka", _messages_of(broker, _TOPIC)),
            Watcher("kafka_exactly_once", _messages_of(broker, _ONCE)),
        ]
        for watcher in watchers:
            held.callback(watcher.stop)
        script = directory / "latency.sql"
        script.write_text(ONE_ROW)
        for seconds in (_WARM_UP_S, sizes.seconds):
            progress(f"sinks: {sizes.rate} changes/s to three sinks for {seconds} s")
            since_s = time.time()
            each = max(1, sizes.rate * seconds // CONNECTIONS)
            source.written += each * CONNECTIONS
            with ProcessMeter(service.own_roles) as meter:
                with writing(source, script, sizes.rate, f"--transactions={each}") as writer:
                    writer.wait(seconds + _GRACE_S)
                service.until(
                    "all changes in all sinks",
                    lambda: min(watcher.count for watcher in watchers) >= service.expected,
                    _GRACE_S,
                )
        cpu_us = cpu_s(meter.figures(), OWN_ROLES) * 1e6 / (each * CONNECTIONS)
        return {
            "latency_rate": sizes.rate,
            "latency_cpu_us_per_change_to_three_sinks": round(cpu_us),
            **{
                f"latency_{name}_ms_{watcher.name}": round(float(np.percentile(found, percent)), 1)
                for watcher in watchers
                for found in [watcher.latencies_ms(since_s)]
                for name, percent in (("p50", 50), ("p99", 99))
            },
        }


def _target(
    source: BenchmarkSource, own_redis: EmbeddedRedis, broker: KafkaBroker
) -> BenchmarkTarget:
    kafka: dict[str, object] = {
        "type": "kafka",
        "bootstrap_servers": [broker.servers],
        "create_topics": {"partitions": 1},
    }
    sinks: dict[str, dict[str, object]] = {
        "redis": {"type": "redis_stream", "url": own_redis.url, "stream_key": _STREAM},
        "kafka": {**kafka, "topic": _TOPIC},
        "once": {**kafka, "topic": _ONCE, "exactly_once": True},
    }

    def arrived() -> int:
        return source.delivered(_NAME)

    return BenchmarkTarget(_NAME, sinks, arrived, lambda: [arrived()])


def _entries_of(client: redis.Redis) -> Look:
    position: list[Any] = ["0"]

    def look() -> list[bytes]:
        asked: Any = {_STREAM: position[0]}
        answer = cast(Any, client.xread(asked, count=_READ_MAX, block=_BLOCK_MS))
        entries = [entry for _, found in answer for entry in found]
        if entries:
            position[0] = entries[-1][0]
        return [fields[b"metadata"] for _, fields in entries]

    return look


def _messages_of(broker: KafkaBroker, topic: str) -> Look:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.servers,
            "group.id": f"watcher-{topic}",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])

    def look() -> list[bytes]:
        message = consumer.poll(_BLOCK_MS / 1000)
        if message is None or message.error() is not None:
            return []
        found = [message]
        while (more := consumer.poll(0)) is not None:
            found.append(more)
        return [_metadata(each.value() or b"") for each in found if each.error() is None]

    return look


def _metadata(message: bytes) -> bytes:
    """The metadata of a message of the default shape, cut out."""
    return message[message.rindex(b'"metadata":') + len(b'"metadata":') : -1]
