"""Composite types: JSON objects, structs in Arrow, each field in the form of its own type.

Where no value of a column has quotes or backslashes, the fields are cut out by native calls;
otherwise value by value, exactly. A composite type can change without a word to those who read its
table: a value whose fields are not those that its type was said to have is its text in JSON, whole
and exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import BadValuesError, Mask, nulls_of, refuse_values, without
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.brackets import plain_insides
from cdc.decoding.types.form import JsonColumn, TypeForm
from cdc.decoding.types.objects import JsonMember, object_of
from cdc.decoding.types.text import TEXT, text_json, valid_utf8

# Possessive: what cannot match otherwise needs no memory of how it might.
_FIELD = re.compile(r'"((?:[^"\\]++|""|\\\\)*+)"|([^,()"\\ \t\n\v\f\r]*)')
_DOUBLED = re.compile(r'""|\\\\')
_OTHER = "this value has more or fewer fields than its type"

_NONE = pa.scalar(0, pa.int32())

_Result = TypeVar("_Result")
Fields = Sequence[tuple[str, TypeForm]]


def composite_of(fields: Fields) -> TypeForm:
    """A composite type with these fields."""
    if not fields:
        return TypeForm(pa.string(), "string", _empty_json, TEXT.typed)
    arrow = pa.struct([pa.field(name, form.arrow) for name, form in fields])
    inside = ",".join(f"`{name.replace('`', '``')}`:{form.spark}" for name, form in fields)
    keys = [f"{orjson.dumps(name).decode()}:" for name, _ in fields]

    def json(texts: pa.BinaryArray, form: ValueFormat) -> JsonColumn:
        columns, other = _read(texts, len(fields))
        members = [
            JsonMember(key, _json_of(field, column, form, other))
            for key, (_, field), column in zip(keys, fields, columns, strict=True)
        ]
        objects = object_of(members, len(texts))
        if other.any():
            objects = pc.if_else(pa.array(other), text_json(texts).whole(), objects)
        return JsonColumn(pc.if_else(texts.is_valid(), objects, pa.scalar(None, pa.string())))

    def typed(texts: pa.BinaryArray) -> pa.StructArray:
        columns, other = _read(texts, len(fields))
        refuse_values(other, _OTHER)
        arrays = [
            _of_field(name, column, field.typed)
            for (name, field), column in zip(fields, columns, strict=True)
        ]
        return pa.StructArray.from_arrays(
            arrays, fields=list(arrow), mask=pa.array(nulls_of(texts))
        )

    return TypeForm(arrow, f"struct<{inside}>", json, typed)


def _empty_json(texts: pa.BinaryArray, _form: ValueFormat) -> JsonColumn:
    """A type without fields: an empty object. Typed it is text: Parquet has no empty struct."""
    empty = pc.equal(texts, pa.scalar(b"()", pa.binary()))
    return JsonColumn(pc.if_else(empty, pa.scalar("{}"), text_json(texts).whole()))


def _json_of(field: TypeForm, column: pa.BinaryArray, form: ValueFormat, other: Mask) -> JsonColumn:
    """The field's JSON; values that its type refuses are of another, and noted in ``other``."""
    while True:
        try:
            return field.json(column, form)
        except BadValuesError as bad:
            other[list(bad.faults)] = True
            column = without(column, bad.faults)


def _of_field(
    name: str, column: pa.BinaryArray, of: Callable[[pa.BinaryArray], _Result]
) -> _Result:
    """What the field's type makes of its column; the error of a bad value has the field's name."""
    try:
        return of(column)
    except BadValuesError as bad:
        raise BadValuesError(
            {at: f"its field {name!r}: {what}" for at, what in bad.faults.items()}
        ) from None


def _read(texts: pa.BinaryArray, count: int) -> tuple[list[pa.BinaryArray], Mask]:
    """The fields as columns, and which values do not have ``count`` of them."""
    return _read_plain(texts, count) or read_exactly(texts, count)


def _read_plain(texts: pa.BinaryArray, count: int) -> tuple[list[pa.BinaryArray], Mask] | None:
    """None if any value has quotes, or is not what it should be."""
    inside = plain_insides(texts, "(", ")")
    if inside is None:
        return None
    null = nulls_of(texts)
    lists = pc.split_pattern(pc.filter(inside, pa.array(~null)), ",")
    if (pc.list_value_length(lists).to_numpy() != count).any():
        return None
    cells = lists.flatten()
    columns = []
    places = np.cumsum(~null) - 1
    for at in range(count):
        column = cells.take(pa.array(np.arange(at, len(cells), count)))
        column = pc.if_else(
            pc.equal(pc.binary_length(column), _NONE), pa.scalar(None, pa.string()), column
        )
        if null.any():
            column = column.take(pa.array(places, mask=null))
        columns.append(column.view(pa.binary()))
    return columns, np.zeros(len(texts), bool)


def read_exactly(texts: pa.BinaryArray, count: int) -> tuple[list[pa.BinaryArray], Mask]:
    """Every composite that ``record_out`` can write, one value after another."""
    columns: list[list[bytes | None]] = [[] for _ in range(count)]
    faults: dict[int, str] = {}
    other = np.zeros(len(texts), bool)
    absent: list[bytes | None] = [None] * count
    for position, text in enumerate(valid_utf8(texts).to_pylist()):
        row = absent if text is None else _fields(text)
        if row is None:
            faults[position] = "this composite value is malformed"
        elif len(row) != count:
            other[position] = True
        whole = row if row is not None and len(row) == count else absent
        for column, field in zip(columns, whole, strict=True):
            column.append(field)
    if faults:
        raise BadValuesError(faults)
    return [pa.array(column, pa.binary()) for column in columns], other


def _fields(text: str) -> list[bytes | None] | None:
    """The fields of one value, None for a null; None instead of a list if it is malformed."""
    if len(text) < 2 or text[0] != "(" or text[-1] != ")":
        return None
    fields: list[bytes | None] = []
    at, end = 1, len(text) - 1
    while True:
        match = _FIELD.match(text, at, end)
        assert match is not None  # the bare form matches nothing at all
        quoted, bare = match.groups()
        if quoted is not None:
            fields.append(_DOUBLED.sub(lambda two: two.group()[0], quoted).encode())
        else:
            fields.append(bare.encode() or None)
        at = match.end()
        if at == end:
            return fields
        if text[at] != ",":
            return None
        at += 1
