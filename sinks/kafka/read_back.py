"""The records of a topic as the rows that they left: the last message of each key.

A tombstone is passed over: the delete stands before it, and where compaction has removed the
delete, it has removed everything before it as well.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator
from typing import Final

import pyarrow as pa

from cdc.backfill.table import PublishedTable
from cdc.cursor import Cursor
from cdc.errors import OperatorError, TransientError
from cdc.verify.held import Key
from sinks.held_messages import HeldMessages, refuse_short_lived
from sinks.kafka.client import Settings
from sinks.kafka.errors import from_exception, meaning
from sinks.kafka.library import Consumer, KafkaError, KafkaException, Message, TopicPartition
from sinks.kafka.topics import missing_topics

_AT_ONCE: Final = 1_000
_DECODER: Final = json.JSONDecoder()


def held_in_topic(
    settings: Settings,
    topic: str,
    table: PublishedTable,
    keys: Collection[Key] | None,
    timeout_s: float,
) -> Iterator[pa.RecordBatch]:
    """The messages of a topic that are about a table, up to its end as it is now."""
    if missing_topics(settings, [topic], timeout_s):
        return
    own = {
        "group.id": f"walbrook-{uuid.uuid4().hex}", "enable.auto.commit": False,
        "auto.offset.reset": "earliest", "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }  # fmt: skip
    reader = Consumer({**settings, **own})
    try:
        yield from _held(reader, topic, HeldMessages(table, keys), timeout_s)
    except KafkaException as error:
        raise meaning(from_exception(error)) from error
    finally:
        reader.close()


def _held(
    reader: Consumer, topic: str, found: HeldMessages, timeout_s: float
) -> Iterator[pa.RecordBatch]:
    known = reader.list_topics(topic, timeout_s).topics[topic].partitions
    ends: dict[int, int] = {}
    starts = []
    for number in known:
        low, high = reader.get_watermark_offsets(TopicPartition(topic, number), timeout_s)
        if low > 0:
            raise refuse_short_lived(f"the topic {topic}", "a retention that removes messages")
        if high > 0:
            ends[number] = high
            starts.append(TopicPartition(topic, number, 0))
    reader.assign(starts)
    deadline = time.monotonic() + timeout_s
    while ends:
        messages = reader.consume(_AT_ONCE, timeout=0.5)
        if messages:
            deadline = time.monotonic() + timeout_s
        elif time.monotonic() > deadline:
            raise TransientError(f"the topic {topic} gives no messages", fix="it is tried again")
        for message in messages:
            number, offset = message.partition(), message.offset()
            assert number is not None
            assert offset is not None
            if not _is_end(message, topic):
                value = message.value()
                if value is not None:
                    _add(found, topic, value)
                offset += 1
            elif number in ends:
                offset = ends[number]  # what is left there are marks of transactions
            if offset >= ends.get(number, offset + 1):
                del ends[number]
        yield found.take()


def _is_end(message: Message, topic: str) -> bool:
    """Whether a partition has no more, in place of a message."""
    error = message.error()
    if error is None:
        return False
    if error.code() == KafkaError._PARTITION_EOF:
        return True
    raise meaning(error, f"to read topic {topic}")


def _add(found: HeldMessages, topic: str, value: bytes) -> None:
    """A message of the shape sequin; its record is cut out as it was written."""
    text = value.decode()
    parts: list[tuple[object, str]] = []
    at = 0
    for name in ('{"record":', ',"changes":', ',"action":', ',"metadata":'):
        if not text.startswith(name, at):
            raise OperatorError(
                f"the topic {topic} has messages of another shape than sequin",
                fix="compare a sink with shape: sequin and a topic of its own",
                kind="not_readable",
            )
        at += len(name)
        member, end = _DECODER.raw_decode(text, at)
        parts.append((member, text[at:end]))
        at = end
    (_, record), (_, changes), (action, _), (metadata, _) = parts
    assert isinstance(metadata, dict)
    place = Cursor(int(metadata["commit_lsn"]), int(metadata["commit_idx"]))
    found.add(place, str(action), record.encode(), changes.encode(), metadata)
