"""Columns of one table version, in the types of another. Pure.

Invariants: a value either becomes the same value in the other type, or its row is named
as one that cannot; nothing is rounded, cut off, moved to another time zone or guessed. A column
that this version does not have is null, one that it alone has is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.bisection import bisect

Mask = NDArray[np.bool_]
_TEXT = pa.string()
_SCALE_PLAIN_MAX = 6  # Arrow writes smaller decimals with an exponent, which Postgres does not


def conform_row(
    values: pa.StructArray, target: pa.StructType
) -> tuple[pa.StructArray, dict[str, Mask]]:
    """A table's columns by name; for each column that has such, the rows it cannot give."""
    if values.type == target:
        return values, {}
    count = len(values)
    columns, faults = [], {}
    for field in target:
        position = values.type.get_field_index(field.name)
        if position < 0:
            columns.append(pa.nulls(count, field.type))
            continue
        column, bad = conform(pc.struct_field(values, [position]), field.type)
        columns.append(column)
        if bad.any():
            faults[field.name] = bad
    if not columns:
        return pa.array([{}] * count, target), {}
    fields = list(target)
    return pa.StructArray.from_arrays(columns, fields=fields, mask=values.is_null()), faults


def conform(values: pa.Array, target: pa.DataType) -> tuple[pa.Array, Mask]:
    """The values in another type, and where that cannot be: there the result is null."""
    source = values.type
    if source == target:
        return values, np.zeros(len(values), bool)
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        row, faults = conform_row(values, target)
        return row, np.logical_or.reduce([np.zeros(len(values), bool), *faults.values()])
    if pa.types.is_integer(source) and pa.types.is_decimal(target):
        # Arrow goes by how large the type is, not the values; through text it goes by these.
        return _cast(values.cast(_TEXT), target)
    if any(_is(source) and to(target) for _is, to in _EXACT):
        return _cast(values, target)
    if any(_is(source) and to(target) for _is, to in _THERE_AND_BACK):
        return _there_and_back(values, target)
    return pa.nulls(len(values), target), np.asarray(values.is_valid())


def _cast(values: pa.Array, target: pa.DataType) -> tuple[pa.Array, Mask]:
    """Arrow refuses all of an array for one value: bisection finds it."""
    cast: list[pa.Array] = [pa.nulls(0, target)]
    bad = np.zeros(len(values), bool)
    for start, stop, result in bisect(
        len(values), lambda start, stop: values[start:stop].cast(target), pa.ArrowInvalid
    ):
        bad[start:stop] = isinstance(result, pa.ArrowInvalid)
        cast.append(pa.nulls(1, target) if bad[start] else result)
    return pa.concat_arrays(cast) if len(cast) > 2 else cast[-1], bad


def _there_and_back(values: pa.Array, target: pa.DataType) -> tuple[pa.Array, Mask]:
    """A cast that Arrow does not refuse may still have lost something."""
    found, bad = _cast(values, target)
    back, bad_back = _cast(found, values.type)
    same = pc.equal(back, values)
    if pa.types.is_floating(values.type):
        same = pc.or_(same, pc.and_(pc.is_nan(back), pc.is_nan(values)))
    bad = bad | bad_back | np.logical_not(np.asarray(pc.fill_null(same, values.is_null())))
    return pc.if_else(pa.array(bad), pa.scalar(None, target), found), bad


def _is_number(one: pa.DataType) -> bool:
    return bool(pa.types.is_integer(one) or pa.types.is_floating(one) or pa.types.is_decimal(one))


def _is_whole_or_decimal(one: pa.DataType) -> bool:
    return bool(pa.types.is_integer(one) or pa.types.is_decimal(one))


def _is_written_alike(one: pa.DataType) -> bool:
    """Whether Arrow and Postgres write its values with the same letters."""
    small = pa.types.is_decimal(one) and one.scale > _SCALE_PLAIN_MAX
    plain = pa.types.is_boolean(one) or pa.types.is_date(one)
    return plain or (_is_whole_or_decimal(one) and not small)


def _is_local_timestamp(one: pa.DataType) -> bool:
    return pa.types.is_timestamp(one) and one.tz is None


_Test = Callable[[pa.DataType], bool]
_EXACT: tuple[tuple[_Test, _Test], ...] = (
    (_is_written_alike, pa.types.is_string),
    (pa.types.is_string, _is_whole_or_decimal),
    (pa.types.is_date, _is_local_timestamp),
)
_THERE_AND_BACK: tuple[tuple[_Test, _Test], ...] = (
    (_is_number, _is_number),
    (_is_local_timestamp, pa.types.is_date),
)
