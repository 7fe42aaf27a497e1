"""The ``debezium`` shape: that product's envelope, as its JSON converter writes it.

Names and meanings follow it, so its consumers work unchanged. What has no counterpart there is an
addition: ``commit_idx``, ``unchanged``, ``transaction_annotations`` and what event-time order needs
in ``source``, and an action
that it does not know (a gap, a change of a table) is its own ``op``, its record under that name.
Invariant: a value that the source did not send is left out, never a placeholder.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import READ, origin
from cdc.decoding.format import KEY, OLD_KEY, ROW_SCHEMA
from cdc.decoding.joins import joined
from cdc.decoding.shapes.base import Context, Parts, message_rows
from cdc.decoding.shapes.debezium_schema import envelope_schemas, key_schemas
from cdc.decoding.shapes.metadata import METADATA_BYTES, idempotency_keys, metadata, placed
from cdc.decoding.shapes.text import for_each_value, member, replaced, with_member, without
from cdc.decoding.types.text import escape

_OPS = {
    "insert": "c", "update": "u", "read": "r", "delete": "d", "truncate": "t", "message": "m"
}  # fmt: skip
_OF_ROWS = pa.array(["insert", "update", "read", "delete", "truncate"])
_UPDATE = '"op":"u"'
_COLUMNS = ("before", "after", "source", "tail")


@dataclass(frozen=True)
class DebeziumShape:
    """Adds the members of the envelope; ``tail`` is all that follows ``source``."""

    context: Context
    schemas: bool = False  # whether Kafka Connect's schemas stand beside keys and values
    message_parts: ClassVar[Parts] = Parts(_COLUMNS, 40)
    entry_parts: ClassVar[Parts] = Parts((*_COLUMNS, "record_pks"), 40 + METADATA_BYTES)

    def rows(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        plain = message_rows(changes)
        action, record = changes.column("action"), changes.column("record")
        nothing = pa.nulls(changes.num_rows, pa.string())
        before = changes.column("before") if "before" in changes.schema.names else nothing
        made = (
            _where(pc.equal(action, "delete"), record, before),
            _where(pc.is_in(action, _OF_ROWS[:3]), record, nothing),
            _source(changes, self.context),
            _tail(action, record, self.context.now_ns),
        )
        for name, column in zip(_COLUMNS, made, strict=True):
            plain = plain.append_column(name, column)
        for name in (KEY, OLD_KEY, ROW_SCHEMA):
            if name in changes.schema.names:
                plain = plain.append_column(name, changes.column(name))
        return plain

    def messages(self, rows: pa.RecordBatch, end: str = "") -> pa.StringArray:
        if not self.schemas:
            return self._payloads(rows, end)
        schemas, payloads = self._described(rows, envelope_schemas), self._payloads(rows)
        return joined('{"schema":', schemas, ',"payload":', payloads, "}" + end, null="null")

    def _payloads(self, rows: pa.RecordBatch, end: str = "") -> pa.StringArray:
        return joined(
            '{"before":',
            rows.column("before"),
            ',"after":',
            rows.column("after"),
            ',"source":',
            rows.column("source"),
            rows.column("tail"),
            end,
            null="null",
        )

    def fields(self, rows: pa.RecordBatch) -> dict[str, pa.StringArray]:
        return {"value": self.messages(rows), "metadata": metadata(rows, self.context)}

    def keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return self._keys(rows, KEY, "record_pks")

    def old_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return self._keys(rows, OLD_KEY, "old_record_pks")

    def _keys(self, rows: pa.RecordBatch, name: str, otherwise: str) -> pa.StringArray:
        """The key as an object, if decode was asked for it."""
        if name not in rows.schema.names:
            return rows.column(otherwise)
        if not self.schemas:
            return rows.column(name)
        schemas = self._described(rows, key_schemas)
        return joined('{"schema":', schemas, ',"payload":', rows.column(name), "}")

    def _described(
        self, rows: pa.RecordBatch, write: Callable[[pa.StringArray, str], pa.StringArray]
    ) -> pa.StringArray:
        """The schema of each row, null for what is no row."""
        if ROW_SCHEMA not in rows.schema.names:
            return pa.nulls(rows.num_rows, pa.string())
        prefix = self.context.database_name
        return for_each_value(rows.column(ROW_SCHEMA), lambda each: write(each, prefix))

    def key_changes(self, rows: pa.RecordBatch) -> tuple[pa.StringArray, pa.StringArray]:
        """A delete of the row as it was, and a create of the row as it is."""
        return self._as(rows, "d", "after"), self._as(rows, "c", "before")

    def _as(self, rows: pa.RecordBatch, op: str, without: str) -> pa.StringArray:
        """The messages of updates under another ``op``, one of the two rows left out."""
        tail = pc.replace_substring(
            rows.column("tail"), _UPDATE, f'"op":"{op}"', max_replacements=1
        )
        for name, column in (("tail", tail), (without, pa.nulls(rows.num_rows, pa.string()))):
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(at, rows.schema.field(at), column)
        return self.messages(rows)

    def idempotency_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return idempotency_keys(rows, self.context)

    def refer(self, rows: pa.RecordBatch, references: pa.StringArray) -> pa.RecordBatch:
        columns = {name: without(rows.column(name), references) for name in ("before", "after")}
        columns["source"] = with_member(rows.column("source"), "claim_check", references)
        # What is no change of rows has its content in the tail.
        end = _end(self.context.now_ns)
        short = for_each_value(rows.column("action"), lambda each: _ops(each, end))
        columns["tail"] = pc.if_else(references.is_null(), rows.column("tail"), short)
        return replaced(rows, columns)


def _where(mask: pa.BooleanArray, chosen: pa.StringArray, other: pa.StringArray) -> pa.StringArray:
    """``chosen`` where the mask says so; a copy only if it is neither for all nor for none."""
    count = mask.true_count
    if count in (0, len(mask)):
        return chosen if count else other
    return pc.if_else(mask, chosen, other)


def _source(changes: pa.RecordBatch, context: Context) -> pa.StringArray:
    lsn, idx = (column.cast(pa.string()) for column in origin(changes))
    of_all = {
        "version": context.version,
        "connector": "postgresql",
        "name": context.database_name,
    }
    return joined(
        orjson.dumps(of_all).decode()[:-1],
        for_each_value(changes.column("action"), lambda each: _snapshots(each, context.database)),
        for_each_value(changes.column("commit_timestamp"), _commit_times),
        *_sequence(changes, lsn, idx),
        ',"schema":"',
        escape(changes.column("table_schema")),
        '","table":"',
        escape(changes.column("table_name")),
        '","txId":',
        changes.column("xid").cast(pa.string()),
        ',"lsn":',
        lsn,
        ',"xmin":null,"commit_idx":',
        idx,
        *member("unchanged", changes.column("unchanged")),
        *member("transaction_annotations", changes.column("annotations")),
        *placed(changes),
        "}",
        null="",
    )


def _sequence(
    changes: pa.RecordBatch, lsn: pa.StringArray, idx: pa.StringArray
) -> list[pa.StringArray | str]:
    """The cursor; in event-time order there is the number instead, which ``placed`` gives."""
    if "origin_lsn" in changes.schema.names:
        return []
    return [',"sequence":"[\\"', lsn, '\\",\\"', idx, '\\"]"']


def _snapshots(actions: pa.StringArray, database: str) -> pa.StringArray:
    """Rows of a backfill are marked as those of an incremental snapshot."""
    said = ["incremental" if action == READ else "false" for action in actions.to_pylist()]
    db = orjson.dumps(database).decode()
    return pa.array([f',"snapshot":"{each}","db":{db}' for each in said], pa.string())


def _commit_times(times: pa.TimestampArray) -> pa.StringArray:
    us = times.view(pa.int64())
    ms = pc.divide(us, 1000).cast(pa.string())
    written = us.cast(pa.string())
    return joined(',"ts_ms":', ms, ',"ts_us":', written, ',"ts_ns":', written, "000")


def _tail(action: pa.StringArray, record: pa.StringArray, now_ns: int) -> pa.StringArray:
    """Everything behind ``source``; for what is no change of rows, with what it says."""
    end = _end(now_ns)
    of_rows = pc.is_in(action, _OF_ROWS)
    if of_rows.true_count == len(action):
        return for_each_value(action, lambda each: _ops(each, end))
    key = _where(of_rows, pa.nulls(len(action), pa.string()), action)
    is_message = pc.equal(action, "message")
    said = pc.replace_with_mask(record, is_message, _messages(record.filter(is_message)))
    said = joined(',"', key, '":', said)  # null where there is no key
    # As a column, since a constant of a join is kept for the next one and this is never the same.
    ends = pa.repeat(end, len(action))
    return joined(for_each_value(action, _ops), said, ends, null="")


def _end(now_ns: int) -> str:
    return f',"ts_ms":{now_ns // 1_000_000},"ts_us":{now_ns // 1000},"ts_ns":{now_ns}}}'


def _ops(actions: pa.StringArray, end: str = "") -> pa.StringArray:
    ops = [_OPS.get(each, each) for each in actions.to_pylist()]
    return pa.array([f',"transaction":null,"op":"{op}"{end}' for op in ops], pa.string())


def _messages(records: pa.StringArray) -> pa.StringArray:
    """Logical messages, whose content is always base64 here: rare, so they are read one by one."""
    written = []
    for text in records.to_pylist():
        record = orjson.loads(text)
        content = record.get("content_base64")
        if content is None:
            content = base64.b64encode(record["content"].encode()).decode()
        message = {
            "transactional": record["transactional"],
            "prefix": record["prefix"],
            "content": content,
        }
        written.append(orjson.dumps(message).decode())
    return pa.array(written, pa.string())
