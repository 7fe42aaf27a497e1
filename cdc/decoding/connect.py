"""The columns of a table version in the words of Kafka Connect's JSON schemas.

Invariant: a value that decode writes in a form fits the schema of its column in the same form. So
the schema is that of what is written, with the names of Debezium where the value is Debezium's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from cdc.decoding.catalog import TypeNote
from cdc.decoding.format import ValueFormat
from cdc.decoding.plan import TablePlan
from cdc.decoding.relation import Relation
from cdc.decoding.types.builtin import ELEMENT_OF_ARRAY, NUMERIC_OID

Schema = dict[str, Any]

_DEPTH_MAX = 32
_STRING: Final[Schema] = {"type": "string"}
_TYPES: Final[dict[int, Schema]] = {
    16: {"type": "boolean"},
    21: {"type": "int16"},
    23: {"type": "int32"},
    26: {"type": "int64"},
    700: {"type": "float"},
    701: {"type": "double"},
    114: {"type": "string", "name": "io.debezium.data.Json", "version": 1},
    142: {"type": "string", "name": "io.debezium.data.Xml", "version": 1},
    2950: {"type": "string", "name": "io.debezium.data.Uuid", "version": 1},
    3802: {"type": "string", "name": "io.debezium.data.Json", "version": 1},
}
"""By type; everything else is its text."""

_INT8, _TIMESTAMP, _TIMESTAMPTZ = 20, 1114, 1184
_MICROSECONDS: Final[Schema] = {
    "type": "int64",
    "name": "io.debezium.time.MicroTimestamp",
    "version": 1,
}
_ZONED: Final[Schema] = {
    "type": "string",
    "name": "io.debezium.time.ZonedTimestamp",
    "version": 1,
}
_HSTORE: Final[Schema] = {
    "type": "map",
    "keys": {"type": "string", "optional": False},
    "values": {"type": "string", "optional": True},
}
_VECTOR: Final[Schema] = {"type": "array", "items": {"type": "double", "optional": True}}
_OF_EXTENSIONS: Final = {
    ("hstore", "hstore"): _HSTORE,
    ("vector", "vector"): _VECTOR,
    ("vector", "halfvec"): _VECTOR,
}


def row_schema(plan: TablePlan, form: ValueFormat) -> str:
    """``{"table": ..., "row": [...], "key": [...]}``: the fields of a row and of its key, as JSON.

    Columns of the key are never null, unless the whole row stands for one. The source does not say
    that of others: they are optional.
    """
    text = plan.described.get(form)
    if text is None:
        text = plan.described[form] = orjson.dumps(_described(plan.relation, form)).decode()
    return text


def _described(relation: Relation, form: ValueFormat) -> Schema:
    dimensions = relation.catalog.dimensions or (0,) * len(relation.columns)
    whole_row = relation.replica_identity == "f" and len(relation.key) == len(relation.columns)
    fields = [
        {
            **_schema(column.type_oid, relation.catalog.types, form, declared),
            "optional": whole_row or at not in relation.key,
            "field": column.name,
        }
        for at, (column, declared) in enumerate(zip(relation.columns, dimensions, strict=True))
    ]
    return {"table": str(relation), "row": fields, "key": [fields[at] for at in relation.key]}


def _schema(
    oid: int, notes: Mapping[int, TypeNote], form: ValueFormat, dimensions: int = 0, depth: int = 0
) -> Schema:
    if depth > _DEPTH_MAX:
        return _STRING
    if oid == _INT8:
        return _STRING if form.numbers == "string" else {"type": "int64"}
    if oid == NUMERIC_OID:
        return _STRING if form.numbers == "string" else {"type": "double"}
    if oid in (_TIMESTAMP, _TIMESTAMPTZ):
        return _time(form, zoned=oid == _TIMESTAMPTZ)
    if oid in _TYPES:
        return _TYPES[oid]
    note = notes.get(oid)
    element = ELEMENT_OF_ARRAY.get(oid) or (note.element if note is not None else 0)
    if element:
        return _array(_schema(element, notes, form, 0, depth + 1), max(1, dimensions))
    return _STRING if note is None else _noted(note, notes, form, depth)


def _noted(note: TypeNote, notes: Mapping[int, TypeNote], form: ValueFormat, depth: int) -> Schema:
    if note.kind == "d":
        return _schema(note.base, notes, form, note.dimensions, depth + 1)
    if note.kind == "c":
        fields = [
            {**_schema(oid, notes, form, 0, depth + 1), "optional": True, "field": name}
            for name, oid, _ in note.fields
        ]
        return {"type": "struct", "fields": fields}
    return _OF_EXTENSIONS.get((note.extension, note.name), _STRING)


def _time(form: ValueFormat, *, zoned: bool) -> Schema:
    if form.timestamps == "unix_microsecond":
        return _MICROSECONDS
    return _ZONED if zoned and form.timestamps == "iso8601" else _STRING


def _array(items: Schema, dimensions: int) -> Schema:
    for _ in range(dimensions):
        items = {"type": "array", "items": {**items, "optional": True}}
    return items
