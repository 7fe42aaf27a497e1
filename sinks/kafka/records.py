"""What is produced of a batch: topics, keys, values and headers, made by whole columns.

Each message is one record. Tombstones, and the end of a key that an update left, are further ones.
The only Python objects per record are those that the client library takes. Invariant: the records
of a message stand together, in the order of the messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROUTE, MessageBatch
from cdc.config.kafka import TOPIC_CHARACTERS_MAX
from cdc.decoding.joins import joined
from cdc.generation import FIRST, Generation
from cdc.queue.groups import BY_KEY, Grouping, message_keys

CURSOR_HEADER, KEY_HEADER = "walbrook-cursor", "idempotency-key"
_NOT_IN_TOPICS = re.compile(r"[^a-zA-Z0-9._-]")


@dataclass(frozen=True)
class Records:
    """Columns of what is produced, one element per record."""

    topics: list[str]
    keys: list[str | None]
    values: list[bytes | None]  # None is a tombstone
    cursors: list[str]
    idempotency_keys: list[str]

    def rows(self) -> Iterator[tuple[str, str | None, bytes | None, str, str]]:
        """One tuple per record, of its topic, key, value, cursor and idempotency key."""
        columns = (self.topics, self.keys, self.values, self.cursors, self.idempotency_keys)
        return zip(*columns, strict=True)

    def add(
        self, topic: str, key: str | None, value: bytes | None, cursor: str, idempotency_key: str
    ) -> None:
        self.topics.append(topic)
        self.keys.append(key)
        self.values.append(value)
        self.cursors.append(cursor)
        self.idempotency_keys.append(idempotency_key)


@dataclass(frozen=True)
class RecordForm:
    """How a sink's messages become records."""

    consumer: str
    topic: str  # a template
    topic_without_table: str  # a template
    grouping: Grouping = BY_KEY
    tombstones: bool = False
    generation: Generation = FIRST

    def records(self, batch: MessageBatch) -> Records:
        """The records of a batch, in order."""
        rows, shape = batch.rows, batch.shape
        keys = message_keys(rows, shape.keys(rows), self.grouping)
        own = _objects(shape.idempotency_keys(rows))
        records = Records(
            self.topics(rows),
            _objects(keys),
            _objects(batch.messages().view(pa.binary())),
            own if _keys_are_cursors(rows) else _objects(_cursors(rows)),
            own,
        )
        return self._with_others(batch, records)

    def topics(self, rows: pa.RecordBatch) -> list[str]:
        """The topic of each message: its route, or what the template makes of its table."""
        schemas, tables = rows.column("table_schema"), rows.column("table_name")
        routed = ROUTE in rows.schema.names
        if not routed and len(schemas.unique()) == len(tables.unique()) == 1:
            return [self.topic_of(schemas[0].as_py(), tables[0].as_py())] * rows.num_rows
        encoded = joined(schemas, "\n", tables).dictionary_encode()
        names = [self.topic_of(*both.split("\n", 1)) for both in encoded.dictionary.to_pylist()]
        topics = pa.array(names, pa.string()).take(encoded.indices)
        if routed:
            routes = pc.binary_join_element_wise(rows.column(ROUTE), self.generation.named(""), "")
            topics = pc.coalesce(routes, topics)
        return _objects(topics)

    def topic_of(self, schema: str, name: str) -> str:
        """The topic that messages of a table go to, unless they have a route."""
        template = self.topic if name else self.topic_without_table
        for placeholder, value in (("schema", schema), ("table", name), ("sink", self.consumer)):
            template = template.replace(f"{{{placeholder}}}", _NOT_IN_TOPICS.sub("_", value))
        return self.generation.named(template[:TOPIC_CHARACTERS_MAX])

    def _with_others(self, batch: MessageBatch, plain: Records) -> Records:
        """The same with what stands beside messages: tombstones, and what ends a key.

        A delete is followed by a tombstone. An update that changed the key follows what ends the
        old one: the shape's own message, if it has one, and a tombstone.
        """
        rows, shape = batch.rows, batch.shape
        deleted = pc.and_(pc.equal(rows.column("action"), "delete"), self.tombstones)
        left = rows.column("old_record_pks").is_valid()
        if not deleted.true_count and not left.true_count:
            return plain
        moved = rows.filter(left)
        changes = shape.key_changes(moved)
        old_keys = iter(_objects(shape.old_keys(moved)))
        ends, begins = (None, None) if changes is None else map(_values, changes)
        is_left = left.to_numpy(zero_copy_only=False)
        is_deleted = deleted.to_numpy(zero_copy_only=False)
        made = Records([], [], [], [], [])
        for at, (topic, key, value, *headers) in enumerate(plain.rows()):
            if is_left[at]:
                old_key = next(old_keys)
                if ends is not None and begins is not None:
                    made.add(topic, old_key, next(ends), *headers)
                    value = next(begins)
                if self.tombstones and key is not None:
                    made.add(topic, old_key, None, *headers)
            made.add(topic, key, value, *headers)
            if is_deleted[at] and key is not None:
                made.add(topic, key, None, *headers)
        return made


def _values(messages: pa.StringArray) -> Iterator[bytes]:
    return iter(_objects(messages.view(pa.binary())))


def _keys_are_cursors(rows: pa.RecordBatch) -> bool:
    """Whether idempotency keys are no more than cursors: in commit order, but for gaps."""
    if "origin_lsn" in rows.schema.names:
        return False
    return not pc.any(pc.equal(rows.column("action"), "gap")).as_py()


def _cursors(rows: pa.RecordBatch) -> pa.StringArray:
    lsn, idx = (rows.column(name).cast(pa.string()) for name in ("commit_lsn", "commit_idx"))
    return joined(lsn, ":", idx)


def _objects(column: pa.StringArray) -> list[Any]:
    """The texts of a column as Python objects, several times faster than one by one."""
    values: list[Any] = np.asarray(column.to_numpy(zero_copy_only=False)).tolist()
    return values
