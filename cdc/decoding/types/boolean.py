"""bool: Postgres writes ``t`` and ``f``."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import PlacedError, first
from cdc.decoding.types.form import JsonColumn

_TEXTS = pa.array([b"f", b"t"], pa.binary())
_JSON = pa.array(["false", "true"])


def boolean_json(texts: pa.BinaryArray) -> JsonColumn:
    """``true`` or ``false``."""
    which = pc.index_in(texts, value_set=_TEXTS)
    if which.null_count != texts.null_count:
        unknown = pc.and_(which.is_null(), texts.is_valid()).to_numpy(zero_copy_only=False)
        raise PlacedError(first(unknown), "this value is no boolean")
    return JsonColumn(_JSON.take(which))
