"""Arrays of any dimension: nested JSON arrays, lists in Arrow, elements in the form of their type.

Most columns hold flat arrays whose elements need no quotes: they are cut at the delimiters by one
native call. Any other column is read value by value, exactly (``array_text``). Either way the
elements of a whole column go through their own type together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.decoding.columns import (
    BadValuesError,
    nulls_of,
    offsets_of,
    only_where,
    refuse_values,
)
from cdc.decoding.format import ValueFormat
from cdc.decoding.joins import constant, joined
from cdc.decoding.types.array_text import MalformedArrayError, read_array
from cdc.decoding.types.brackets import plain_insides
from cdc.decoding.types.form import JsonColumn, TypeForm
from cdc.decoding.types.text import valid_utf8

_Result = TypeVar("_Result")


def array_of(element: TypeForm, delimiter: str = ",", dimensions: int = 1) -> TypeForm:
    """Arrays of ``element``; ``dimensions`` as declared, which only Arrow must know beforehand."""
    arrow, spark = element.arrow, element.spark
    for _ in range(dimensions):
        arrow, spark = pa.list_(arrow), f"array<{spark}>"

    def json(texts: pa.BinaryArray, form: ValueFormat) -> JsonColumn:
        arrays = _read(texts, delimiter)
        elements = _of_elements(arrays, lambda them: element.json(them, form).whole())
        return JsonColumn(arrays.as_json(elements))

    def typed(texts: pa.BinaryArray) -> pa.Array:
        arrays = _read(texts, delimiter)
        return arrays.as_lists(_of_elements(arrays, element.typed), dimensions)

    return TypeForm(arrow, spark, json, typed)


@dataclass(frozen=True)
class _Arrays:
    """A column of arrays: all elements in a row, and which of them each array has."""

    elements: pa.BinaryArray
    bounds: NDArray[np.int64]  # of each array's elements; one more than there are arrays
    null: NDArray[np.bool_]
    lengths: list[tuple[int, ...]] | None  # by dimension; None: all of them flat

    def as_json(self, elements: pa.StringArray) -> pa.StringArray:
        texts = pc.fill_null(elements, constant("null"))
        if self.lengths is None:
            lists = pa.ListArray.from_arrays(pa.array(self.bounds, pa.int32()), texts)
            arrays = joined("[", pc.binary_join(lists, constant(",")), "]")
        else:
            flat = texts.to_pylist()
            arrays = pa.array(
                [
                    _nested(flat[start:stop], lengths)
                    for start, stop, lengths in zip(
                        self.bounds[:-1], self.bounds[1:], self.lengths, strict=True
                    )
                ],
                pa.string(),
            )
        return only_where(arrays, ~self.null) if self.null.any() else arrays

    def as_lists(self, elements: pa.Array, dimensions: int) -> pa.ListArray:
        lengths = self.lengths
        if lengths is None:
            lengths = [(count,) if count else () for count in np.diff(self.bounds).tolist()]
        other = np.array([len(one) not in (0, dimensions) for one in lengths], bool)
        refuse_values(other, f"this array does not have the declared {dimensions} dimensions")
        levels, inside = [], np.ones(len(lengths), np.int64)
        for dimension in range(dimensions):
            here = np.array([one[dimension] if one else 0 for one in lengths], np.int64)
            levels.append(np.concatenate([[0], np.cumsum(np.repeat(here, inside))]))
            inside = inside * here
        for offsets in reversed(levels):
            elements = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements)
        return pc.if_else(pa.array(~self.null), elements, pa.scalar(None, elements.type))


def _of_elements(arrays: _Arrays, of: Callable[[pa.BinaryArray], _Result]) -> _Result:
    """What the element's type makes of all elements; a bad one is its array's fault."""
    try:
        return of(arrays.elements)
    except BadValuesError as bad:
        rows = np.searchsorted(arrays.bounds, list(bad.faults), side="right") - 1
        raise BadValuesError(
            {
                row: f"an element of this array is wrong: {what}"
                for row, what in zip(rows.tolist(), bad.faults.values(), strict=True)
            }
        ) from None


def _read(texts: pa.BinaryArray, delimiter: str) -> _Arrays:
    return _read_flat(texts, delimiter) or read_exactly(texts, delimiter)


def _read_flat(texts: pa.BinaryArray, delimiter: str) -> _Arrays | None:
    """Arrays of one dimension without quotes; None if the column has any other."""
    inside = plain_insides(texts, "{", "}")
    if inside is None:
        return None
    lists = pc.split_pattern(inside, delimiter)
    empty = np.diff(offsets_of(inside)) == 0
    if empty.any():
        # Nothing between the braces is no element, where split sees an empty one.
        lists = pc.if_else(pa.array(empty), pa.scalar([], lists.type), lists)
    elements = lists.flatten()
    if len(elements) and pc.min(pc.binary_length(elements)).as_py() == 0:
        return None
    bounds = np.concatenate([[0], np.cumsum(pc.list_value_length(lists).to_numpy())])
    return _Arrays(_with_nulls(elements), bounds.astype(np.int64), nulls_of(texts), None)


def _with_nulls(elements: pa.StringArray) -> pa.BinaryArray:
    named = pc.equal(pc.ascii_upper(elements), constant("NULL"))
    if pc.any(named, min_count=0).as_py():
        elements = pc.if_else(named, pa.scalar(None, pa.string()), elements)
    return elements.view(pa.binary())


def read_exactly(texts: pa.BinaryArray, delimiter: str) -> _Arrays:
    """Every array that Postgres can write, one value after another."""
    elements: list[bytes | None] = []
    stops: list[int] = []
    lengths: list[tuple[int, ...]] = []
    faults: dict[int, str] = {}
    for position, text in enumerate(valid_utf8(texts).to_pylist()):
        lengths.append(())
        if text is not None:
            try:
                lengths[-1], found = read_array(text, delimiter)
                elements += found
            except MalformedArrayError as fault:
                faults[position] = f"this array is malformed ({fault})"
        stops.append(len(elements))
    if faults:
        raise BadValuesError(faults)
    bounds = np.array([0, *stops], np.int64)
    return _Arrays(pa.array(elements, pa.binary()), bounds, nulls_of(texts), lengths)


def _nested(texts: list[str], lengths: tuple[int, ...]) -> str:
    if not lengths:
        return "[]"
    for length in reversed(lengths):
        texts = [
            f"[{','.join(texts[start : start + length])}]" for start in range(0, len(texts), length)
        ]
    return texts[0]
