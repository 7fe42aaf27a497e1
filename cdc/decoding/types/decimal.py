"""numeric and the floats: every digit and the scale that Postgres wrote.

JSON knows neither NaN nor infinities: they are kept as strings, never as null. In Arrow a numeric
with a declared precision of up to 38 is a decimal; others, which no decimal holds, are text.
"""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import BadValuesError, refuse_values
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.form import JsonColumn, TypeForm, quoted

_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-]?[0-9]+)?$"
_NOT_FINITE = pa.array(["NaN", "Infinity", "-Infinity"])
_PRECISION_MAX = 38
_HEADER = 4  # a typmod counts from there
_NUMERICS_MAX = 1024


def _float(arrow: pa.DataType, spark: str) -> TypeForm:
    def json(texts: pa.BinaryArray, _form: ValueFormat) -> JsonColumn:
        return _number_json(texts)

    def typed(texts: pa.BinaryArray) -> pa.Array:
        finite = _finite(texts)
        numbers = texts.view(pa.string()).cast(arrow)
        beyond = pc.is_inf(numbers)
        if finite is not None:
            beyond = pc.and_(beyond, finite)
        if pc.any(beyond, min_count=0).as_py():
            # Read as infinity, which is another value than the one that was written.
            wrong = pc.fill_null(beyond, False).to_numpy(zero_copy_only=False)
            refuse_values(wrong, "this value is beyond the range of its type")
        return numbers

    return TypeForm(arrow, spark, json, typed)


@lru_cache(maxsize=_NUMERICS_MAX)
def numeric(typmod: int) -> TypeForm:
    """``numeric`` as declared: with a precision and a scale, or with neither (-1)."""
    arrow = _decimal(typmod)
    if arrow is None:
        return TypeForm(pa.string(), "string", _numeric_json, _numeric_text)

    def typed(texts: pa.BinaryArray) -> pa.Array:
        _finite(texts)  # Arrow reads more than Postgres writes: a plus sign, leading zeros
        try:
            return texts.view(pa.string()).cast(arrow)
        except pa.ArrowInvalid:
            return _one_by_one(texts, arrow)

    spark = f"decimal({arrow.precision},{arrow.scale})"
    return TypeForm(arrow, spark, _numeric_json, typed)


def precision_and_scale(typmod: int) -> tuple[int, int]:
    """As declared; the scale may be negative: eleven bits with a sign."""
    packed = typmod - _HEADER
    return packed >> 16 & 0xFFFF, (packed & 0x7FF ^ 0x400) - 0x400


def _decimal(typmod: int) -> pa.Decimal128Type | None:
    if typmod < _HEADER:
        return None
    precision, scale = precision_and_scale(typmod)
    # A negative scale rounds before the point; one above the precision begins behind it.
    precision, scale = max(precision, scale, precision - scale), max(scale, 0)
    return pa.decimal128(precision, scale) if precision <= _PRECISION_MAX else None


def _one_by_one(texts: pa.BinaryArray, arrow: pa.Decimal128Type) -> pa.Array:
    """Say which values no decimal of this precision holds: NaN above all."""
    faults = {}
    for position, text in enumerate(texts.view(pa.string())):
        try:
            text.cast(arrow)
        except pa.ArrowInvalid:
            faults[position] = f"this value is no decimal({arrow.precision},{arrow.scale})"
    raise BadValuesError(faults)


def _numeric_text(texts: pa.BinaryArray) -> pa.StringArray:
    _finite(texts)
    return texts.view(pa.string())


def _numeric_json(texts: pa.BinaryArray, form: ValueFormat) -> JsonColumn:
    if form.numbers == "string":
        return quoted(_numeric_text(texts))
    return _number_json(texts)


def _number_json(texts: pa.BinaryArray) -> JsonColumn:
    """Verbatim; ``"NaN"`` and the infinities as strings."""
    finite = _finite(texts)
    values = texts.view(pa.string())
    if finite is None:
        return JsonColumn(values)
    return JsonColumn(pc.if_else(finite, values, quoted(values).whole()))


def _finite(texts: pa.BinaryArray) -> pa.BooleanArray | None:
    """Which values are finite, None if all are; what is no number at all is refused."""
    numbers = pc.match_substring_regex(texts, _NUMBER)
    if pc.all(numbers, min_count=0).as_py():
        return None
    named = pc.is_in(texts, value_set=_NOT_FINITE.view(pa.binary()))
    good = pc.fill_null(pc.or_(numbers, named), True).to_numpy(zero_copy_only=False)
    refuse_values(~good, "this value is no number")
    return numbers


FLOAT4 = _float(pa.float32(), "float")
FLOAT8 = _float(pa.float64(), "double")
