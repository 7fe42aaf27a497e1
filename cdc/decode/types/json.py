"""json and jsonb: embedded as the source wrote them, spacing, duplicate keys and digits kept.

Postgres has checked these texts, with limits of its own (depth, lone surrogates) that no other
parser shares. So they are taken at its word; only an empty one is refused.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from cdc.decode.columns import PlacedError, first
from cdc.decode.types.form import JsonColumn
from cdc.decode.types.text import valid_utf8


def embedded_json(texts: pa.BinaryArray) -> JsonColumn:
    """The value itself. A JSON ``null`` is a value; only an SQL NULL is null."""
    empty = pc.fill_null(pc.equal(pc.binary_length(texts), 0), False)
    if pc.any(empty, min_count=0).as_py():
        raise PlacedError(first(empty.to_numpy(zero_copy_only=False)), "this JSON value is empty")
    return JsonColumn(valid_utf8(texts))
