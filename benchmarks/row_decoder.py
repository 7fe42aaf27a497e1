"""A decoder that reads one row at a time: plain, obvious, and the yardstick for the columnar one.

It makes a Python object of every value and writes JSON with orjson. For what it knows (scalars;
arrays stay text) it gives the same bytes as ``cdc.decoding``, so tests hold one against the other.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA
from cdc.decoding.relation import Relation, parse_relation

_INTEGERS = {20, 21, 23, 26}
_NUMBERS = {700, 701, 1700}
_JSON = {114, 3802}
_TIMESTAMPTZ = 1184
_ACTIONS = {"I": "insert", "U": "update", "D": "delete", "T": "truncate", "M": "message"}

UNCHANGED = object()
Row = list[object]  # bytes, None or UNCHANGED


class RowChange(NamedTuple):
    """The columns of CHANGE_SCHEMA that depend on the payload."""

    table_schema: str
    table_name: str
    action: str
    record: bytes
    changes: bytes | None
    record_pks: bytes
    old_record_pks: bytes | None
    unchanged: bytes | None


_cached_relation = lru_cache(maxsize=1024)(parse_relation)


def decode_row(payload: bytes, schema: bytes | None) -> RowChange:
    """Decode one message with the Relation message of its table."""
    kind = chr(payload[0])
    if kind == "M":
        return RowChange("", "", "message", _logical(payload), None, b"[]", None, None)
    assert schema is not None
    relation = _cached_relation(schema)
    if kind == "T":
        table = (relation.namespace, relation.name)
        return RowChange(*table, "truncate", b"{}", None, b"[]", None, None)
    old: Row | None = None
    new: Row | None = None
    at, tag = 5, ""
    while at < len(payload):
        tag_here = chr(payload[at])
        row, at = _tuple(payload, at + 1)
        if tag_here == "N":
            new = row
        else:
            tag, old = tag_here, row
    return _change(relation, kind, tag, old, new)


def decode_frame(raw: pa.RecordBatch, schemas: Mapping[int, bytes]) -> pa.RecordBatch:
    """What ``cdc.decoding.decode_changes`` does, row by row."""
    payloads = raw.column("payload").to_pylist()
    schema_ids = raw.column("schema_id").to_pylist()
    rows = [
        decode_row(payload, schemas.get(schema_id))
        for payload, schema_id in zip(payloads, schema_ids, strict=True)
    ]
    decoded = zip(*rows, strict=True) if rows else [()] * len(RowChange._fields)
    return pa.RecordBatch.from_arrays(
        [
            raw.column("commit_lsn"),
            raw.column("commit_idx"),
            raw.column("commit_ts").cast(pa.timestamp("us", tz="UTC")),
            raw.column("xid"),
            *(pa.array(column, pa.string()) for column in decoded),
            *[pa.nulls(len(rows), pa.string())] * 2,
        ],
        schema=CHANGE_SCHEMA,
    )


def write_messages(
    raw: pa.RecordBatch, schemas: Mapping[int, bytes], source: Mapping[str, object]
) -> list[bytes]:
    """Whole messages in the ``sequin`` shape, row by row; ``source`` ends every metadata."""
    return [
        _message(row, decode_row(row["payload"], schemas.get(row["schema_id"])), source)
        for row in raw.to_pylist()
    ]


def _message(raw: Mapping[str, Any], row: RowChange, source: Mapping[str, object]) -> bytes:
    committed = datetime.fromtimestamp(raw["commit_ts"] / 1e6, UTC)
    message: dict[str, object] = {
        "record": orjson.Fragment(row.record),
        "changes": None if row.changes is None else orjson.Fragment(row.changes),
        "action": row.action,
        "metadata": {
            "table_schema": row.table_schema,
            "table_name": row.table_name,
            "commit_timestamp": committed.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "commit_lsn": raw["commit_lsn"],
            "commit_idx": raw["commit_idx"],
            "xid": raw["xid"],
            "idempotency_key": f"{raw['commit_lsn']}:{raw['commit_idx']}",
            "record_pks": orjson.Fragment(row.record_pks),
            "transaction_annotations": None,
            **source,
        },
    }
    return orjson.dumps(message)


def _tuple(payload: bytes, at: int) -> tuple[Row, int]:
    (count,) = struct.unpack_from(">H", payload, at)
    at += 2
    row: Row = []
    for _ in range(count):
        kind = payload[at]
        at += 1
        if kind == ord("t"):
            (length,) = struct.unpack_from(">I", payload, at)
            at += 4
            row.append(payload[at : at + length])
            at += length
        else:
            row.append(None if kind == ord("n") else UNCHANGED)
    return row, at


def _change(relation: Relation, kind: str, tag: str, old: Row | None, new: Row | None) -> RowChange:
    row = new if new is not None else old
    assert row is not None
    if tag == "O" and new is not None and old is not None:
        row = [was if is_ is UNCHANGED else is_ for is_, was in zip(new, old, strict=True)]
    record, unchanged, pks, changes = {}, [], [], {}
    for index, column in enumerate(relation.columns):
        value = row[index]
        if value is UNCHANGED:
            unchanged.append(column.name)
        else:
            record[column.name] = _json(column.type_oid, value)
        if kind == "U" and old is not None and (tag == "O" or column.is_key):
            was = old[index]
            if UNCHANGED not in (was, value) and was != value:
                changes[column.name] = _json(column.type_oid, was)
    old_pks, moved = [], False
    for index in relation.key:
        value = row[index]
        key = old[index] if value is UNCHANGED and old is not None else value
        pks.append(key.decode() if isinstance(key, bytes) else None)
        if kind == "U" and old is not None:
            was = old[index] if tag == "O" or relation.columns[index].is_key else key
            moved |= relation.columns[index].name in changes
            old_pks.append(was.decode() if isinstance(was, bytes) else None)
    return RowChange(
        relation.namespace,
        relation.name,
        _ACTIONS[kind],
        orjson.dumps(record),
        orjson.dumps(changes) if kind == "U" else None,
        orjson.dumps(pks),
        orjson.dumps(old_pks) if moved else None,
        orjson.dumps(unchanged) if unchanged else None,
    )


def _json(type_oid: int, value: object) -> object:
    if not isinstance(value, bytes):
        return None
    if type_oid == 16:
        return value == b"t"
    if type_oid in _INTEGERS or type_oid in _JSON:
        return orjson.Fragment(value)
    if type_oid in _NUMBERS:
        return value.decode() if value[-1:] in b"Ny" else orjson.Fragment(value)
    if type_oid == _TIMESTAMPTZ and value.endswith(b"+00"):
        return value[:-3].replace(b" ", b"T", 1).decode() + "Z"
    return value.decode()


def _logical(payload: bytes) -> bytes:
    stop = payload.index(b"\0", 10)
    content = payload[stop + 5 :]
    record: dict[str, object] = {"prefix": payload[10:stop].decode()}
    try:
        record["content"] = content.decode()
    except UnicodeDecodeError:
        record["content_base64"] = base64.b64encode(content).decode()
    record["transactional"] = payload[1] == 1
    return orjson.dumps(record)
