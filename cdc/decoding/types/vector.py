"""vector and halfvec of pgvector: their text is a JSON array of numbers already; lists in Arrow.

A sparsevec is its text: ``{1:1.5,3:2}/5``.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import gather, nulls_of, offsets_of, refuse_values
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.form import JsonColumn, TypeForm

_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_VECTOR = rf"^\[{_NUMBER}(?:,{_NUMBER})*\]$"


def _json(texts: pa.BinaryArray, _form: ValueFormat) -> JsonColumn:
    return JsonColumn(_checked(texts).view(pa.string()))


def _typed(texts: pa.BinaryArray) -> pa.ListArray:
    bounds = offsets_of(_checked(texts)).astype(np.int64)
    null = nulls_of(texts)
    starts = np.where(null, bounds[1:], bounds[:-1] + 1)
    stops = np.where(null, bounds[1:], bounds[1:] - 1)
    inside = gather(texts.buffers()[2] or pa.py_buffer(b""), starts, stops).view(pa.string())
    lists = pc.split_pattern(inside, ",")
    lists = pc.if_else(pa.array(~null), lists, pa.scalar(None, lists.type))
    return lists.cast(VECTOR.arrow)


def _checked(texts: pa.BinaryArray) -> pa.BinaryArray:
    good = pc.fill_null(pc.match_substring_regex(texts, _VECTOR), True)
    refuse_values(~good.to_numpy(zero_copy_only=False), "this value is no vector")
    return texts


VECTOR = TypeForm(pa.list_(pa.float32()), "array<float>", _json, _typed)
