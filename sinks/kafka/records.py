"""What is produced of a batch: topics, keys, values and headers, made by whole columns.

Each message is one record, and a delete is followed by a tombstone if the sink asks for them. The
only Python objects per record are those that the client library takes. Invariant: the records of a
message stand together, in the order of the messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROUTE, MessageBatch
from cdc.config.kafka import TOPIC_CHARACTERS_MAX
from cdc.decoding.joins import joined
from cdc.queue.groups import BY_KEY, Grouping, message_keys

CURSOR_HEADER, KEY_HEADER = "walbrook-cursor", "idempotency-key"
_NOT_IN_TOPICS = re.compile(r"[^a-zA-Z0-9._-]")

Headers = list[tuple[str, str | bytes | None]]


@dataclass(frozen=True)
class Records:
    """Columns of what is produced, one element per record."""

    topics: list[str]
    keys: list[str | None]
    values: list[str | None]  # None is a tombstone
    headers: list[Headers]


@dataclass(frozen=True)
class RecordForm:
    """How a sink's messages become records."""

    consumer: str
    topic: str  # a template
    topic_without_table: str  # a template
    grouping: Grouping = BY_KEY
    tombstones: bool = False

    def records(self, batch: MessageBatch) -> Records:
        """The records of a batch, in order."""
        rows, shape = batch.rows, batch.shape
        cursors = joined(
            rows.column("commit_lsn").cast(pa.string()),
            ":",
            rows.column("commit_idx").cast(pa.string()),
        )
        own = shape.idempotency_keys(rows)
        texts = _objects(cursors)
        own_texts = texts if own.equals(cursors) else _objects(own)
        headers = [
            [(CURSOR_HEADER, cursor), (KEY_HEADER, key)]
            for cursor, key in zip(texts, own_texts, strict=True)
        ]
        keys = message_keys(rows, shape.keys(rows), self.grouping)
        records = Records(self.topics(rows), _objects(keys), _objects(batch.messages()), headers)
        return self._with_tombstones(rows, records) if self.tombstones else records

    def topics(self, rows: pa.RecordBatch) -> list[str]:
        """The topic of each message: its route, or what the template makes of its table."""
        tables = joined(rows.column("table_schema"), "\n", rows.column("table_name"))
        encoded = tables.dictionary_encode()
        names = pa.array([self._topic(table) for table in encoded.dictionary.to_pylist()])
        topics = names.take(encoded.indices)
        if ROUTE in rows.schema.names:
            topics = pc.coalesce(rows.column(ROUTE), topics)
        return _objects(topics)

    def _topic(self, table: str) -> str:
        schema, _, name = table.partition("\n")
        template = self.topic if name else self.topic_without_table
        for placeholder, value in (("schema", schema), ("table", name), ("sink", self.consumer)):
            template = template.replace(f"{{{placeholder}}}", _NOT_IN_TOPICS.sub("_", value))
        return template[:TOPIC_CHARACTERS_MAX]

    def _with_tombstones(self, rows: pa.RecordBatch, plain: Records) -> Records:
        """The same with a tombstone behind each delete that has a key, and for each key that an
        update left, before that update."""
        deletes = pc.equal(rows.column("action"), "delete").to_numpy(zero_copy_only=False)
        left = rows.column("old_record_pks").is_valid().to_numpy(zero_copy_only=False)
        if not deletes.any() and not left.any():
            return plain
        old_keys = _objects(rows.column("old_record_pks"))
        made = Records([], [], [], [])
        for at in range(len(plain.values)):
            own = (plain.topics[at], plain.headers[at])
            if left[at] and plain.keys[at] is not None:
                _add(made, *own, old_keys[at], None)
            _add(made, *own, plain.keys[at], plain.values[at])
            if deletes[at] and plain.keys[at] is not None:
                _add(made, *own, plain.keys[at], None)
        return made


def _add(
    records: Records, topic: str, headers: Headers, key: str | None, value: str | None
) -> None:
    records.topics.append(topic)
    records.keys.append(key)
    records.values.append(value)
    records.headers.append(headers)


def _objects(column: pa.StringArray) -> list[Any]:
    """The texts of a column as Python objects, several times faster than one by one."""
    values: list[Any] = np.asarray(column.to_numpy(zero_copy_only=False)).tolist()
    return values
