"""Kafka at least once: an idempotent producer, and no memory of what was delivered.

The broker drops what the producer itself repeats, and keeps the order of each partition. After a
crash, or a request that failed, the messages that were not settled are sent again, under the same
headers. Invariant: no message arrives for the first time behind a later one of its partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow as pa

from cdc.backfill.table import PublishedTable
from cdc.change import MessageBatch
from cdc.errors import WalbrookError
from cdc.verify.held import Form, Key
from sinks.base import Delivery
from sinks.kafka.client import Settings, producer_settings
from sinks.kafka.connection import Connection
from sinks.kafka.errors import from_exception, meaning
from sinks.kafka.halves import send_in_halves
from sinks.kafka.library import KafkaException
from sinks.kafka.read_back import held_in_topic
from sinks.kafka.records import RecordForm
from sinks.kafka.topics import NewTopics, probe


class KafkaSink:
    """Produces over one producer, opened when it is first needed."""

    def __init__(
        self,
        settings: Settings,
        form: RecordForm,
        *,
        batch_size: int,
        timeout_s: float,
        compression: str = "lz4",
        create: NewTopics | None = None,
    ) -> None:
        self._common = settings
        self._settings = producer_settings(settings, compression=compression, timeout_s=timeout_s)
        self._form = form
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self._create = create
        self._connection: Connection | None = None

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Produce the messages in order, up to the first one that failed."""
        settled = 0
        try:
            for piece in batch.slices(self._batch_size):
                done = send_in_halves(piece, self._send)
                settled += done.settled
                if done.error is not None:
                    return Delivery(settled, error=done.error)
        except BaseException:
            self.close()
            raise
        return Delivery(settled)

    @property
    def held_form(self) -> Form:
        return Form.RECORD

    def read_back(
        self, table: PublishedTable, keys: Collection[Key] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The messages about a table, of the topic that its changes go to."""
        topic = self._form.topic_of(table.name.schema, table.name.table)
        return held_in_topic(self._common, topic, table, keys, self._timeout_s)

    def probe(self) -> str:
        return probe(self._common, self._timeout_s)

    def close(self) -> None:
        """Let go of the connections; the next delivery connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _send(self, batch: MessageBatch) -> Delivery:
        try:
            connection = self._open()
            connection.produce(batch, self._form)
        except KafkaException as error:
            self.close()
            return Delivery(0, error=meaning(from_exception(error)))
        except WalbrookError as error:
            self.close()
            return Delivery(0, error=error)
        if connection.flush():
            return Delivery(len(batch))
        reason = connection.error()
        self.close()
        return Delivery(0, error=reason)

    def _open(self) -> Connection:
        if self._connection is None:
            self._connection = Connection(
                self._settings, self._common, timeout_s=self._timeout_s, create=self._create
            )
        return self._connection
