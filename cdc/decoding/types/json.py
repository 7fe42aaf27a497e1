"""json and jsonb: embedded as the source wrote them, spacing, duplicate keys and digits kept.

Postgres has checked these texts, with limits of its own (depth, lone surrogates) that no other
parser shares. So they are taken at its word; only an empty one is refused.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cdc.decoding.columns import PlacedError, first, nulls_of, offsets_of
from cdc.decoding.types.form import JsonColumn
from cdc.decoding.types.text import valid_utf8


def embedded_json(texts: pa.BinaryArray) -> JsonColumn:
    """The value itself. A JSON ``null`` is a value; only an SQL NULL is null."""
    empty = np.diff(offsets_of(texts)) == 0
    if empty.any():
        empty &= ~nulls_of(texts)
        if empty.any():
            raise PlacedError(first(empty), "this JSON value is empty")
    return JsonColumn(valid_utf8(texts))
