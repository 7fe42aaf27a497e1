"""The schemas of Debezium's envelope and key, for readers whose converter wants them.

A schema stands beside each payload, as Kafka Connect's JSON converter writes and reads it with
``schemas.enable=true``. Members of the payload that a schema does not name are ignored there.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import pyarrow as pa

Schema = dict[str, Any]


def _field(name: str, kind: str, *, optional: bool = True) -> Schema:
    return {"type": kind, "optional": optional, "field": name}


_TIMES: Final = [_field(name, "int64") for name in ("ts_ms", "ts_us", "ts_ns")]
_SOURCE: Final[Schema] = {
    "type": "struct",
    "fields": [
        *(_field(name, "string", optional=False) for name in ("version", "connector", "name")),
        _field("ts_ms", "int64", optional=False),
        _field("snapshot", "string"),
        _field("db", "string", optional=False),
        _field("sequence", "string"),
        *_TIMES[1:],
        *(_field(name, "string", optional=False) for name in ("schema", "table")),
        *(_field(name, "int64") for name in ("txId", "lsn", "xmin", "commit_idx")),
        {
            "type": "array",
            "items": {"type": "string", "optional": False},
            "optional": True,
            "field": "unchanged",
        },
    ],
    "optional": False,
    "name": "io.debezium.connector.postgresql.Source",
    "field": "source",
}
_TRANSACTION: Final[Schema] = {
    "type": "struct",
    "fields": [
        _field("id", "string", optional=False),
        _field("total_order", "int64", optional=False),
        _field("data_collection_order", "int64", optional=False),
    ],
    "optional": True,
    "name": "event.block",
    "version": 1,
    "field": "transaction",
}


def envelope_schemas(described: pa.StringArray, prefix: str) -> pa.StringArray:
    """Of each table version the schema of its envelope; names begin with ``prefix``."""
    return pa.array([_envelope(orjson.loads(text), prefix) for text in described.to_pylist()])


def key_schemas(described: pa.StringArray, prefix: str) -> pa.StringArray:
    """Of each table version the schema of its key."""
    return pa.array([_key(orjson.loads(text), prefix) for text in described.to_pylist()])


def _envelope(described: Schema, prefix: str) -> str:
    table = f"{prefix}.{described['table']}"
    row = {
        "type": "struct",
        "fields": described["row"],
        "optional": True,
        "name": f"{table}.Value",
    }
    return _text(
        {
            "type": "struct",
            "fields": [
                {**row, "field": "before"},
                {**row, "field": "after"},
                _SOURCE,
                _TRANSACTION,
                _field("op", "string", optional=False),
                *_TIMES,
            ],
            "optional": False,
            "name": f"{table}.Envelope",
            "version": 2,
        }
    )


def _key(described: Schema, prefix: str) -> str:
    return _text(
        {
            "type": "struct",
            "fields": described["key"],
            "optional": False,
            "name": f"{prefix}.{described['table']}.Key",
        }
    )


def _text(schema: Schema) -> str:
    return orjson.dumps(schema).decode()
