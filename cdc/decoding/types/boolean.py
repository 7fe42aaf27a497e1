"""bool: Postgres writes ``t`` and ``f``."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import refuse_values
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.form import JsonColumn, TypeForm

_TEXTS = pa.array([b"f", b"t"], pa.binary())
_JSON = pa.array(["false", "true"])
_VALUES = pa.array([False, True])


def _json(texts: pa.BinaryArray, _form: ValueFormat) -> JsonColumn:
    return JsonColumn(_JSON.take(_which(texts)))


def _typed(texts: pa.BinaryArray) -> pa.BooleanArray:
    return _VALUES.take(_which(texts))


def _which(texts: pa.BinaryArray) -> pa.Int32Array:
    which = pc.index_in(texts, value_set=_TEXTS)
    if which.null_count != texts.null_count:
        unknown = pc.and_(which.is_null(), texts.is_valid()).to_numpy(zero_copy_only=False)
        refuse_values(unknown, "this value is no boolean")
    return which


BOOLEAN = TypeForm(pa.bool_(), "boolean", _json, _typed)
