"""One producer: what it is handed, what failed of it, and what it said of itself meanwhile.

Invariant: a connection on which a record failed is not used again, so nothing that waits in its
queues can arrive behind what is sent later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from logging import getLogger

from cdc.change import MessageBatch
from cdc.errors import WalbrookError
from sinks.kafka.client import Settings
from sinks.kafka.errors import Trouble, from_exception, meaning, telling
from sinks.kafka.library import KafkaError, KafkaException, Message, Producer
from sinks.kafka.records import CURSOR_HEADER, KEY_HEADER, RecordForm
from sinks.kafka.topics import NewTopics, create_topics, missing_topics

_POLL_S = 0.25  # how often an error that no wait can help is looked for
_TOPICS_MAX = 10_000
_PART_MESSAGES = 2_500

Headers = list[tuple[str, str | bytes | None]]


class Connection:
    """A producer that is opened at once."""

    def __init__(
        self, settings: Settings, common: Settings, *, timeout_s: float, create: NewTopics | None
    ) -> None:
        self._common = common
        self._timeout_s = timeout_s
        self._create = create
        self._topics: set[str] = set()
        self._failed: dict[int, tuple[KafkaError, str | None]] = {}  # by code, with a topic
        self._trouble = Trouble()
        callbacks = {
            "error_cb": self._trouble.noted,
            "on_delivery": self._reported,
            "logger": getLogger("walbrook.kafka"),
        }
        self.producer = Producer({**settings, **callbacks})

    def _require_topics(self, topics: Sequence[str]) -> None:
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

    def produce(self, batch: MessageBatch, form: RecordForm) -> None:
        """Queue the records of a batch, up to the first that the library refuses at once.

        They are made in parts: what is queued is on its way while the next part is made.
        """
        produce = self.producer.produce
        self._trouble.error = None  # what a client said long ago may have passed
        try:
            for part in batch.slices(_PART_MESSAGES):
                records = form.records(part)
                self._require_topics(records.topics)
                for topic, key, value, cursor, own in records.rows():
                    headers: Headers = [(CURSOR_HEADER, cursor), (KEY_HEADER, own)]
                    produce(topic, value, key, headers=headers)
        except (KafkaException, BufferError) as error:
            self._fail(from_exception(error))

    def flush(self) -> bool:
        """Wait until everything has arrived or failed; returns whether all of it has arrived.

        What has done neither in time is given up.
        """
        deadline = time.monotonic() + self._timeout_s + _POLL_S
        while self._left():
            if self._trouble.is_hopeless or time.monotonic() > deadline:
                self.producer.purge()
                self._left()
                break
        return not self._failed

    def _left(self, wait_s: float = _POLL_S) -> int:
        """Serve the library for a while; returns how many records have neither arrived nor failed.

        It raises a fatal error from whatever call comes next, and from within callbacks.
        """
        try:
            return self.producer.flush(wait_s)
        except (KafkaException, SystemError) as error:
            self._fail(from_exception(error if error.__cause__ is None else error.__cause__))
            self.producer.purge()
            return len(self.producer)

    def error(self, last: KafkaError | None = None) -> WalbrookError:
        """Why it failed: the first cause that is known, else ``last``, else what followed from it.

        Serves the library once more, because a cause may be waiting to be noted.
        """
        self._left(0)
        error, topic = telling([*self._failed.values(), (last, None), (self._trouble.error, None)])
        return meaning(error, f"a message to topic {topic}" if topic else "")

    def close(self) -> None:
        """Give up what was not delivered, and let go of the connections."""
        self.producer.purge(blocking=False)
        self.producer.flush(0)
        # The library's threads end with the last reference to the producer.
        del self.producer

    def _reported(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            return
        try:
            self._fail(error, message.topic())
        except SystemError:  # a fatal error was waiting to be raised by the next call into C
            self._fail(error, message.topic())

    def _fail(self, error: KafkaError, topic: str | None = None) -> None:
        self._failed.setdefault(error.code(), (error, topic))
