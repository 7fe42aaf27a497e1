"""A real Kafka broker for the tests, started once per test process, and readers of its topics."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tests.kafka_broker import KafkaBroker
from tests.proxy import Proxy

_READ_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Kafka:
    """The broker, a prefix that no other test uses, and a proxy that can be cut."""

    broker: KafkaBroker
    proxy: Proxy
    prefix: str

    @property
    def servers(self) -> str:
        return self.broker.servers

    @property
    def through_proxy(self) -> str:
        return f"127.0.0.1:{self.proxy.port}"

    def create(self, topic: str, partitions: int = 1, **config: str) -> str:
        """A new topic under the test's prefix."""
        name = f"{self.prefix}.{topic}"
        named = {key.replace("_", "."): value for key, value in config.items()}
        client = AdminClient({"bootstrap.servers": self.servers})
        new = NewTopic(name, num_partitions=partitions, replication_factor=1, config=named)
        client.create_topics([new])[name].result(_READ_TIMEOUT_S)
        return name

    def topics(self) -> list[str]:
        """The topics under the test's prefix."""
        known = AdminClient({"bootstrap.servers": self.servers}).list_topics(timeout=10).topics
        return sorted(name for name in known if name.startswith(self.prefix))

    def read(self, topic: str) -> list[Message]:
        """What a reader of committed messages finds, partition after partition."""
        return read_committed(self.servers, topic)


def read_committed(servers: str, topic: str) -> list[Message]:
    """The messages of a topic, without those of aborted transactions."""
    reader = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"reader.{uuid.uuid4().hex}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # before a broker says that a topic ends here
            "auto.offset.reset": "earliest",
        }
    )
    try:
        known = reader.list_topics(topic, timeout=_READ_TIMEOUT_S).topics[topic].partitions
        found: dict[int, list[Message]] = {number: [] for number in known}
        reader.assign([TopicPartition(topic, number, 0) for number in known])
        ended: set[int] = set()
        while len(ended) < len(found):
            message = reader.poll(_READ_TIMEOUT_S)
            assert message is not None, f"the end of {topic} was not reached in time"
            error, partition = message.error(), message.partition()
            assert partition is not None
            if error is None:
                found[partition].append(message)
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                ended.add(partition)
        return [message for number in sorted(found) for message in found[number]]
    finally:
        reader.close()


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[tuple[KafkaBroker, Proxy]]:
    """A broker, and a proxy before one of its listeners."""
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-kafka-"))
    try:
        with Proxy("host=127.0.0.1 port=1") as proxy:
            broker = KafkaBroker(directory, proxy_port=proxy.port)
            proxy.retarget(f"host=127.0.0.1 port={broker.ports.proxied}")
            with broker:
                yield broker, proxy
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def kafka(kafka_server: tuple[KafkaBroker, Proxy]) -> Kafka:
    """The broker of this test process; topics of the test begin with ``prefix``."""
    broker, proxy = kafka_server
    return Kafka(broker, proxy, f"t{uuid.uuid4().hex[:12]}")
