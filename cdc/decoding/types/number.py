"""Numbers: the digits that Postgres wrote, exactly; JSON has no bound on them.

JSON knows neither NaN nor infinities: they are kept as strings, never as null.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import PlacedError, bytes_of, first, offsets_of
from cdc.decoding.types.form import JsonColumn

_INTEGER = "^-?(0|[1-9][0-9]*)$"
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-]?[0-9]+)?$"
_ZERO, _NINE = b"09"
_NOT_FINITE = pa.array(["NaN", "Infinity", "-Infinity"])


def integer_json(texts: pa.BinaryArray) -> JsonColumn:
    """int2, int4, int8 and oid, verbatim."""
    if _are_digits(texts):
        return JsonColumn(texts.view(pa.string()))
    numbers = pc.match_substring_regex(texts, _INTEGER)
    if pc.all(numbers, min_count=0).as_py():
        return JsonColumn(texts.view(pa.string()))
    raise _no_number(numbers)


def number_json(texts: pa.BinaryArray) -> JsonColumn:
    """float4, float8 and numeric, verbatim; ``"NaN"`` and the infinities as strings."""
    numbers = pc.match_substring_regex(texts, _NUMBER)
    if pc.all(numbers, min_count=0).as_py():
        return JsonColumn(texts.view(pa.string()))
    named = pc.is_in(texts, value_set=_NOT_FINITE.view(pa.binary()))
    if not pc.all(pc.or_(numbers, named), min_count=0).as_py():
        raise _no_number(pc.or_(numbers, named))
    # Each value is a number or a name of ASCII letters by now.
    values = texts.view(pa.string())
    return JsonColumn(pc.if_else(named, pc.binary_join_element_wise('"', values, '"', ""), values))


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


def _no_number(numbers: pa.BooleanArray) -> PlacedError:
    good = pc.fill_null(numbers, True).to_numpy(zero_copy_only=False)
    return PlacedError(first(~good), "this value is no number")
