"""One producer: what it is handed, what failed of it, and what it said of itself meanwhile.

Invariant: a connection on which a record failed is not used again, so nothing that waits in its
queues can arrive behind what is sent later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cdc.errors import WalbrookError
from sinks.kafka.client import Settings
from sinks.kafka.errors import CONSEQUENCES, meaning, needs_operator
from sinks.kafka.library import KafkaError, KafkaException, Message, Producer
from sinks.kafka.records import Records
from sinks.kafka.topics import NewTopics, create_topics, missing_topics

_POLL_S = 0.25  # how often an error that no wait can help is looked for
_TOPICS_MAX = 10_000


@dataclass(frozen=True)
class Failure:
    """A record that was not delivered."""

    error: KafkaError
    topic: str | None
    key: bytes | None
    value: bytes | None


class Connection:
    """A producer that is opened at once."""

    def __init__(
        self, settings: Settings, common: Settings, *, timeout_s: float, create: NewTopics | None
    ) -> None:
        self._common = common
        self._timeout_s = timeout_s
        self._create = create
        self._topics: set[str] = set()
        self._failures: list[Failure] = []
        self._trouble: KafkaError | None = None
        self._refused: KafkaError | None = None
        self._queued = 0
        callbacks = {"error_cb": self._noted, "on_delivery": self._reported}
        self.producer = Producer({**settings, **callbacks})

    def require_topics(self, topics: Sequence[str]) -> None:
        """Create those that do not exist, if the sink is asked to; raises if that fails."""
        if self._create is None:
            return
        new = [topic for topic in dict.fromkeys(topics) if topic not in self._topics]
        if not new:
            return
        missing = missing_topics(self._common, new, self._timeout_s)
        if missing:
            create_topics(self._common, missing, self._create, self._timeout_s)
        if len(self._topics) + len(new) > _TOPICS_MAX:
            self._topics.clear()
        self._topics.update(new)

    def produce(self, records: Records) -> None:
        """Queue the records, up to the first that the library refuses at once."""
        produce = self.producer.produce
        columns = (records.topics, records.values, records.keys, records.headers)
        left = zip(*columns, strict=True)
        try:
            for topic, value, key, headers in left:
                produce(topic, value, key, headers=headers)
        except (KafkaException, BufferError) as error:
            self._refused = from_exception(error)
            self._queued = len(records.topics) - 1 - sum(1 for _ in left)
        else:
            self._queued = len(records.topics)

    def flush(self) -> bool:
        """Wait until everything has arrived or failed; returns whether all of it has arrived.

        What has done neither in time is given up.
        """
        deadline = time.monotonic() + self._timeout_s + _POLL_S
        while self.producer.flush(_POLL_S):
            hopeless = self._trouble is not None and needs_operator(self._trouble)
            if hopeless or time.monotonic() > deadline:
                self.producer.purge()
                self.producer.flush(_POLL_S)
                break
        return not self._failures and self._refused is None

    def first_failed(self, records: Records) -> int:
        """The position of the first record that failed or was not queued.

        Failed ones are told by what they are. Two that are alike in everything are taken for the
        first of them: it is sent again.
        """
        failed = {(one.topic, one.key, one.value) for one in self._failures}
        for at, (topic, key, value) in enumerate(
            zip(records.topics, records.keys, records.values, strict=True)
        ):
            if (topic, _bytes(key), _bytes(value)) in failed:
                return min(at, self._queued)
        return self._queued

    def error(self, last: KafkaError | None = None) -> WalbrookError:
        """Why it failed: the first cause that is known, else ``last``, else what followed from it.

        Polls once, because a cause may be waiting to be noted.
        """
        self.producer.poll(0)
        said = [(one.error, one.topic) for one in self._failures]
        others = (self._refused, last, self._trouble)
        said += [(error, None) for error in others if error is not None]
        causes = [one for one in said if one[0].code() not in CONSEQUENCES]
        error, topic = (causes or said or [(KafkaError(KafkaError._TIMED_OUT), None)])[0]
        return meaning(error, f"a message to topic {topic}" if topic else "")

    def close(self) -> None:
        """Give up what was not delivered, and let go of the connections."""
        self._failures = []
        self.producer.purge(blocking=False)
        self.producer.flush(0)
        # The library's threads end with the last reference to the producer.
        del self.producer

    def _noted(self, error: KafkaError) -> None:
        if self._trouble is None or not needs_operator(self._trouble):
            self._trouble = error

    def _reported(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failures.append(Failure(error, message.topic(), message.key(), message.value()))


def from_exception(error: Exception) -> KafkaError:
    """The error in what the library raised."""
    if isinstance(error, KafkaException) and isinstance(error.args[0], KafkaError):
        return error.args[0]
    full = isinstance(error, BufferError)
    return KafkaError(KafkaError._QUEUE_FULL if full else KafkaError._FAIL)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
