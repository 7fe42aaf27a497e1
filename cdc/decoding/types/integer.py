"""int2, int4, int8 and oid: the digits that Postgres wrote, exactly; JSON has no bound on them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import bytes_of, offsets_of, refuse_values
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.form import JsonColumn, TypeForm, quoted

_INTEGER = "^-?(0|[1-9][0-9]*)$"
_ZERO, _NINE = b"09"
_DIGITS_MAX = len(str(-(2**63)))


def _integer(arrow: pa.DataType, spark: str, *, rounded: bool = False) -> TypeForm:
    """``rounded``: many JSON readers make a 64-bit float of it, and lose its last digits."""

    def json(texts: pa.BinaryArray, form: ValueFormat) -> JsonColumn:
        digits = _checked(texts).view(pa.string())
        return quoted(digits) if rounded and form.numbers == "string" else JsonColumn(digits)

    def typed(texts: pa.BinaryArray) -> pa.Array:
        try:
            return _checked(texts).view(pa.string()).cast(arrow)
        except pa.ArrowInvalid:
            return _beyond(texts)

    def _beyond(texts: pa.BinaryArray) -> pa.Array:
        bounds = _BOUNDS[arrow]
        beyond = [text is not None and not _within(text, *bounds) for text in texts.to_pylist()]
        refuse_values(np.array(beyond), "this value is beyond the range of its type")
        raise AssertionError("an integer within its range was refused")

    return TypeForm(arrow, spark, json, typed)


def _checked(texts: pa.BinaryArray) -> pa.BinaryArray:
    if _are_digits(texts):
        return texts
    numbers = pc.match_substring_regex(texts, _INTEGER)
    if not pc.all(numbers, min_count=0).as_py():
        good = pc.fill_null(numbers, True).to_numpy(zero_copy_only=False)
        refuse_values(~good, "this value is no whole number")
    return texts


def _are_digits(texts: pa.BinaryArray) -> bool:
    """Whether all are plain digits without sign: true of most columns, and cheap to tell."""
    data, offsets = bytes_of(texts), offsets_of(texts)
    lengths = np.diff(offsets)
    if texts.null_count or not len(data) or not lengths.min():
        return False
    if data.min() < _ZERO or data.max() > _NINE:
        return False
    leading_zero = (data[offsets[:-1] - offsets[0]] == _ZERO) & (lengths > 1)
    return not leading_zero.any()


def _within(digits: bytes, low: int, high: int) -> bool:
    # Python refuses to read integers of thousands of digits.
    return len(digits) <= _DIGITS_MAX and low <= int(digits) <= high


_BOUNDS = {
    pa.int16(): (-(2**15), 2**15 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
}

INT2 = _integer(pa.int16(), "smallint")
INT4 = _integer(pa.int32(), "int")
INT8 = _integer(pa.int64(), "bigint", rounded=True)
OID = _integer(pa.int64(), "bigint")
"""Unsigned 32 bits in Postgres; Spark has no such type, and the next larger one holds it."""
