"""Topics: creating those that do not exist, and reading the cursor that a topic holds last."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import ConfigError, ProtocolError, TransientError
from sinks.kafka.client import Settings
from sinks.kafka.errors import Trouble, from_exception, meaning, telling
from sinks.kafka.library import (
    AdminClient,
    Consumer,
    KafkaError,
    KafkaException,
    NewTopic,
    TopicPartition,
)

_END_WAIT_MS = 10  # of a broker, before it says that a topic ends here; its default is 500
_TAIL = 16  # records looked at first; further back only if all of those were aborted
_CURSOR_TOPIC = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "min.cleanable.dirty.ratio": "0.01",
}


@dataclass(frozen=True)
class NewTopics:
    """How topics are created; None stands for the broker's default."""

    partitions: int | None = None
    replication_factor: int | None = None
    config: Mapping[str, str] = field(default_factory=dict)

    def for_cursor(self) -> NewTopics:
        """The same for a topic that holds a cursor."""
        return NewTopics(1, self.replication_factor, _CURSOR_TOPIC)


def create_topics(
    settings: Settings, names: Iterable[str], how: NewTopics, timeout_s: float
) -> None:
    """Create topics; those that exist stay as they are."""
    new = [
        NewTopic(
            name,
            num_partitions=how.partitions or -1,
            replication_factor=how.replication_factor or -1,
            config=dict(how.config),
        )
        for name in names
    ]
    with _administration(settings) as client:
        created = client.create_topics(new, operation_timeout=timeout_s, request_timeout=timeout_s)
        for future in created.values():
            try:
                future.result(timeout_s)
            except KafkaException as error:
                if from_exception(error).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise


def missing_topics(settings: Settings, names: Iterable[str], timeout_s: float) -> list[str]:
    """Which of these topics the cluster does not have, as far as this account may see."""
    with _administration(settings) as client:
        known = client.list_topics(timeout=timeout_s).topics
    return [name for name in names if name not in known]


def probe(settings: Settings, timeout_s: float) -> str:
    """Connect, authenticate and ask for the topics; nothing changes."""
    with _administration(settings) as client:
        known = client.list_topics(timeout=timeout_s)
    return (
        f"connected; {len(known.brokers)} brokers, {len(known.topics)} topics that the account may "
        "see; producing is not checked"
    )


@contextmanager
def _administration(settings: Settings) -> Iterator[AdminClient]:
    """A client whose errors are raised as ours, with the cause that it said elsewhere."""
    trouble = Trouble()
    callbacks: dict[str, Any] = {"error_cb": trouble.noted}
    client = AdminClient(settings | callbacks)
    try:
        yield client
    except KafkaException as error:
        client.poll(0)
        cause, _ = telling([(from_exception(error), None), (trouble.error, None)])
        raise meaning(cause, "to list or create topics") from error


def cursor_record(consumer: str, cursor: Cursor) -> bytes:
    """What the cursor topic holds of a consumer."""
    return orjson.dumps({"consumer": consumer, "lsn": cursor.lsn, "idx": cursor.idx})


def read_cursor(settings: Settings, topic: str, consumer: str, timeout_s: float) -> Cursor:
    """The last committed cursor of a topic; ORIGIN if it holds none.

    Invariant: the caller has fenced every earlier writer, so no transaction is open there.
    """
    reader = Consumer(
        settings
        | {
            "group.id": topic,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": _END_WAIT_MS,
            "auto.offset.reset": "earliest",
        }
    )
    deadline = time.monotonic() + timeout_s
    try:
        partition = TopicPartition(topic, 0)
        low, high = reader.get_watermark_offsets(partition, timeout=timeout_s)
        start = high
        while start > low:
            # Aborted records and the marks of transactions have offsets, too.
            start = max(low, high - 2 * max(_TAIL, high - start))
            reader.assign([TopicPartition(topic, 0, start)])
            last = _last_value(reader, topic, deadline)
            if last is not None:
                return _cursor(last, topic, consumer)
        return ORIGIN
    finally:
        reader.close()


def _last_value(reader: Consumer, topic: str, deadline: float) -> bytes | None:
    """The value of the last record from the reader's position on; None if there is none."""
    last: bytes | None = None
    while True:
        message = reader.poll(max(0.0, deadline - time.monotonic()))
        if message is None:
            raise TransientError(
                f"the cursor could not be read from topic {topic} in time",
                fix="it is retried; check that the brokers are up and reachable",
            )
        error = message.error()
        if error is None:
            last = message.value()
        elif error.code() == KafkaError._PARTITION_EOF:
            return last
        else:
            raise meaning(error, f"to read topic {topic}")


def _cursor(record: bytes, topic: str, consumer: str) -> Cursor:
    try:
        said = orjson.loads(record)
        owner, cursor = said["consumer"], Cursor(said["lsn"], said["idx"])
    except (ValueError, LookupError, TypeError):
        raise ProtocolError(
            f"the last record of topic {topic} is no cursor",
            fix="give the sink a cursor_topic that nothing else writes to",
        ) from None
    if owner != consumer:
        raise ConfigError(
            f"topic {topic} holds the cursor of the consumer {owner}, not of {consumer}",
            fix="give every sink a cursor_topic of its own",
        )
    return cursor
