"""json and jsonb: embedded as the source wrote them, spacing, duplicate keys and digits kept.

Postgres has checked these texts, with limits of its own (depth, lone surrogates) that no other
parser shares. So they are taken at its word; only an empty one is refused. Arrow and Spark have no
type for them that keeps every digit: there they are text.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cdc.decoding.columns import nulls_of, offsets_of, refuse_values
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.form import JsonColumn, TypeForm, quoted
from cdc.decoding.types.text import escape, valid_utf8


def _json(texts: pa.BinaryArray, form: ValueFormat) -> JsonColumn:
    """The value itself. A JSON ``null`` is a value; only an SQL NULL is null."""
    values = _typed(texts)
    return quoted(escape(values)) if form.documents == "text" else JsonColumn(values)


def _typed(texts: pa.BinaryArray) -> pa.StringArray:
    empty = np.diff(offsets_of(texts)) == 0
    if empty.any():
        refuse_values(empty & ~nulls_of(texts), "this JSON value is empty")
    return valid_utf8(texts)


JSON = TypeForm(pa.string(), "string", _json, _typed)
