"""JSON values that decode wrote, back in the Arrow types of their columns.

Invariants: a value becomes exactly what typed decode makes of the text that Postgres
wrote (docs/types.md), or it is refused; nothing is rounded, and null stays null. What JSON cannot
say is lost before: a json ``null`` is an SQL NULL here.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import (
    BadValuesError,
    bytes_of,
    gather,
    nulls_of,
    offsets_of,
    only_where,
    refuse_values,
)
from cdc.decoding.json_members import elements, members, pairs
from cdc.decoding.types.binary import BYTEA
from cdc.decoding.types.decimal import FLOAT4, FLOAT8, numeric
from cdc.decoding.types.form import TypeForm
from cdc.decoding.types.integer import INT2, INT4, INT8
from cdc.decoding.types.temporal import DATE, TIMESTAMP, TIMESTAMPTZ
from cdc.decoding.types.text import TEXT

_FORMS: Final = {
    form.arrow: form
    for form in (INT2, INT4, INT8, FLOAT4, FLOAT8, DATE, TIMESTAMP, TIMESTAMPTZ, BYTEA, TEXT)
}
_TYPMOD_HEADER: Final = 4  # a typmod counts from there
_BOOLEANS: Final = pa.array([b"false", b"true"], pa.binary())
_VALUES: Final = pa.array([False, True])
_QUOTE, _BACKSLASH = b'"\\'


def typed_values(values: pa.BinaryArray, wanted: pa.DataType, *, json: bool = False) -> pa.Array:
    """The values in the type ``wanted``; ``json``: they are those of a json column, its texts.

    BadValuesError names those that the type cannot have.
    """
    if json:
        return values.cast(pa.string())
    if pa.types.is_list(wanted):
        return _lists(values, wanted)
    if pa.types.is_struct(wanted):
        return _structs(values, wanted)
    if pa.types.is_map(wanted):
        return _maps(values, wanted)
    if pa.types.is_boolean(wanted):
        return _booleans(values)
    texts = _texts(values)
    if pa.types.is_timestamp(wanted):
        # As Postgres writes it. Nothing else in a timestamp has these letters.
        texts = pc.replace_substring(texts, b"T", b" ")
        texts = pc.replace_substring(texts, b"Z", b"+00")
    return _form(wanted).typed(texts)


def _form(wanted: pa.DataType) -> TypeForm:
    if pa.types.is_decimal(wanted):
        return numeric((wanted.precision << 16 | wanted.scale) + _TYPMOD_HEADER)
    return _FORMS[wanted]


def _booleans(values: pa.BinaryArray) -> pa.BooleanArray:
    which = pc.index_in(values, value_set=_BOOLEANS)
    unknown = pc.and_(which.is_null(), values.is_valid()).to_numpy(zero_copy_only=False)
    refuse_values(unknown, "this value is no boolean")
    return _VALUES.take(which)


def _lists(values: pa.BinaryArray, wanted: pa.ListType) -> pa.ListArray:
    _refuse_all_but(values, b"[", "this value is no array of the declared dimensions")
    bounds, inside = elements(values)
    try:
        items = typed_values(inside, wanted.value_type)
    except BadValuesError as bad:
        raise _of_outer(bad, bounds, "an element of this array is wrong") from None
    lists = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), items, type=wanted)
    return _null_as(values, lists)


def _structs(values: pa.BinaryArray, wanted: pa.StructType) -> pa.StructArray:
    _refuse_all_but(values, b"{", "this value has more or fewer fields than its type")
    names = [orjson.dumps(field.name) for field in wanted]
    arrays = []
    for field, column in zip(wanted, members(values, names), strict=True):
        try:
            arrays.append(typed_values(column, field.type))
        except BadValuesError as bad:
            raise BadValuesError(
                {at: f"its field {field.name!r}: {what}" for at, what in bad.faults.items()}
            ) from None
    return pa.StructArray.from_arrays(arrays, fields=list(wanted), mask=values.is_null())


def _maps(values: pa.BinaryArray, wanted: pa.MapType) -> pa.MapArray:
    _refuse_all_but(values, b"{", "this value is no map")
    bounds, keys, items = pairs(values)
    try:
        typed = [typed_values(keys, wanted.key_type), typed_values(items, wanted.item_type)]
    except BadValuesError as bad:
        raise _of_outer(bad, bounds, "an entry of this map is wrong") from None
    offsets = pa.array(bounds, pa.int32())
    return _null_as(values, pa.MapArray.from_arrays(offsets, *typed, type=wanted))


def _of_outer(bad: BadValuesError, bounds: np.ndarray, what: str) -> BadValuesError:
    rows = np.searchsorted(bounds, list(bad.faults), side="right") - 1
    faults = zip(rows.tolist(), bad.faults.values(), strict=True)
    return BadValuesError({row: f"{what}: {said}" for row, said in faults})


def _refuse_all_but(values: pa.BinaryArray, opening: bytes, what: str) -> None:
    """A value that did not fit its type is its text in JSON."""
    fits = pc.fill_null(pc.starts_with(values, opening), True).to_numpy(zero_copy_only=False)
    refuse_values(~fits, what)


def _null_as(values: pa.Array, made: pa.Array) -> pa.Array:
    if not values.null_count:
        return made
    return pc.if_else(values.is_valid(), made, pa.scalar(None, made.type))


def _texts(values: pa.BinaryArray) -> pa.BinaryArray:
    """Strings without their quotes and escapes; whatever is no string as it is written."""
    if not len(values) or values.null_count == len(values):
        return values
    bounds = offsets_of(values).astype(np.int64)
    starts, stops = bounds[:-1], bounds[1:]
    data = values.buffers()[2]
    present = ~nulls_of(values)
    quoted = np.zeros(len(values), np.int64)
    quoted[present] = np.frombuffer(data, np.uint8)[starts[present]] == _QUOTE
    if not quoted.any():
        return values
    bare = gather(data, starts + quoted, stops - quoted)
    if values.null_count:
        bare = only_where(bare, present)
    return _unescaped(values, bare, quoted.astype(bool))


def _unescaped(values: pa.BinaryArray, bare: pa.BinaryArray, quoted: np.ndarray) -> pa.BinaryArray:
    if _BACKSLASH not in bytes_of(bare).tobytes():
        return bare
    escaped = pc.match_substring(bare, b"\\").fill_null(False).to_numpy(zero_copy_only=False)
    some = pa.array(escaped & quoted)
    # One native call reads all of them: together they are a JSON array.
    listed = b"[" + b",".join(values.filter(some).to_pylist()) + b"]"
    read = pa.array(orjson.loads(listed), pa.string()).cast(pa.binary())
    return pc.replace_with_mask(bare, some, read)
