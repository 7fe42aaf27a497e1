"""Kafka exactly once: each delivery is a transaction that holds the consumer's cursor.

The cursor is a record of a compacted topic of its own. The transactional id is the name of that of
the first generation, so that a later generation fences the processes of the earlier ones.
A reader with ``isolation.level=read_committed`` sees the messages of a transaction and its cursor
together, or neither. Invariants: the cursor is read only after ``init_transactions``, which ends
every transaction of an earlier process and fences it; messages at or below the cursor are absorbed;
after an error whose outcome is not known the cursor is read again before anything is sent.

A process that was fenced between two deliveries takes over once, because the driver and its
workers take turns. One that is fenced again in the same delivery says so.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import replace

import pyarrow as pa

from cdc.backfill.table import PublishedTable
from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.cursor_columns import prefix_at_or_below
from cdc.errors import WalbrookError
from cdc.failpoints import reached
from cdc.verify.held import Form, Key
from sinks.base import Delivery
from sinks.kafka.client import Settings, producer_settings
from sinks.kafka.connection import Connection
from sinks.kafka.errors import FENCED, from_exception, meaning
from sinks.kafka.halves import send_in_halves
from sinks.kafka.library import KafkaException
from sinks.kafka.read_back import held_in_topic
from sinks.kafka.records import RecordForm
from sinks.kafka.topics import (
    NewTopics,
    create_topics,
    cursor_record,
    missing_topics,
    probe,
    read_cursor,
)

_TRANSACTION_MS_MAX = 900_000  # the default limit of brokers
_SPARE_MS = 30_000


class ExactlyOnceKafkaSink:
    """Produces in transactions under a stable id, opened when it is first needed."""

    def __init__(
        self,
        settings: Settings,
        form: RecordForm,
        *,
        cursor_topic: str,
        transactional_id: str = "",
        batch_size: int,
        timeout_s: float,
        compression: str = "lz4",
        create: NewTopics | None = None,
    ) -> None:
        self._common = settings
        self._settings = producer_settings(
            settings, compression=compression, timeout_s=timeout_s
        ) | {
            "transactional.id": transactional_id or cursor_topic,
            "enable.gapless.guarantee": False,  # a transaction with a gap is aborted
            "transaction.timeout.ms": min(_TRANSACTION_MS_MAX, round(2000 * timeout_s) + _SPARE_MS),
        }
        self._form = form
        self._cursor_topic = cursor_topic
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self._create = create
        self._opened: tuple[Connection, Cursor] | None = None  # the cursor as it was committed

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Commit the messages in order, up to the first that failed; absorb those it has."""
        try:
            done = self._deliver(batch)
            if done.error is None or done.error.kind != FENCED:
                return done
            rest = self._deliver(batch.slice(done.settled))
        except BaseException:
            self.close()
            raise
        return replace(
            rest,
            settled=done.settled + rest.settled,
            absorbed=done.absorbed + rest.absorbed,
            top=rest.top if done.top is None else done.top,
        )

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
        """Let go of the connections; a transaction that is open is never committed."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()

    def _deliver(self, batch: MessageBatch) -> Delivery:
        settled = absorbed = 0
        top: Cursor | None = None
        try:
            _, top = self._open()
            for piece in batch.slices(self._batch_size):
                known = prefix_at_or_below(piece.rows, self._open()[1])
                settled, absorbed = settled + known, absorbed + known
                if known == len(piece):
                    continue
                done = send_in_halves(piece.slice(known), self._commit)
                settled += done.settled
                if done.error is not None:
                    return Delivery(settled, absorbed, done.error, top=top)
        except KafkaException as error:
            self.close()
            return Delivery(settled, absorbed, meaning(from_exception(error)), top=top)
        except WalbrookError as error:
            self.close()
            return Delivery(settled, absorbed, error, top=top)
        return Delivery(settled, absorbed, top=top)

    def _open(self) -> tuple[Connection, Cursor]:
        if self._opened is not None:
            return self._opened
        self._require_cursor_topic()
        connection = Connection(
            self._settings, self._common, timeout_s=self._timeout_s, create=self._create
        )
        try:
            connection.producer.init_transactions(self._timeout_s)
            cursor = read_cursor(
                self._common, self._cursor_topic, self._form.consumer, self._timeout_s
            )
        except KafkaException as error:
            reason = connection.error(from_exception(error))
            connection.close()
            raise reason from error
        except BaseException:
            connection.close()
            raise
        self._opened = connection, cursor
        return self._opened

    def _require_cursor_topic(self) -> None:
        missing = missing_topics(self._common, [self._cursor_topic], self._timeout_s)
        if missing:
            how = (self._create or NewTopics()).for_cursor()
            create_topics(self._common, missing, how, self._timeout_s)

    def _commit(self, batch: MessageBatch) -> Delivery:
        """Send a batch and its last cursor in one transaction: all of it is settled, or nothing."""
        connection, _ = self._open()
        cursor = batch.cursor(-1)
        connection.producer.begin_transaction()
        connection.produce(batch, self._form)
        reached("produced")
        connection.producer.produce(
            self._cursor_topic,
            cursor_record(self._form.consumer, cursor),
            self._form.consumer,
            partition=0,
        )
        reached("enclosed")
        failure = self._end(connection)
        if failure is not None:
            return Delivery(0, error=failure)
        reached("committed")
        self._opened = connection, cursor
        return Delivery(len(batch))

    def _end(self, connection: Connection) -> WalbrookError | None:
        """Commit the open transaction, or abort it and return why."""
        if not connection.flush():
            return self._abort(connection)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection.producer.commit_transaction(max(0.1, deadline - time.monotonic()))
                return None
            except KafkaException as raised:
                error = from_exception(raised)
                if not error.retriable() or time.monotonic() > deadline:
                    # Whether it went through is not known: the cursor is read again.
                    reason = connection.error(error)
                    self.close()
                    return reason

    def _abort(self, connection: Connection) -> WalbrookError:
        """Abort what could not be sent whole, and return why.

        The producer is not used again: its sequence numbers have a gap that the broker refuses.
        """
        reason = connection.error()
        try:
            connection.producer.abort_transaction(self._timeout_s)
        except (KafkaException, SystemError) as raised:
            fatal = meaning(from_exception(raised))
            reason = fatal if fatal.kind == FENCED else reason
        self.close()
        return reason
