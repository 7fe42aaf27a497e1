"""bytea: ``\\x`` and two hexadecimal digits a byte."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cdc.decoding.columns import bytes_of, gather, nulls_of, offsets_of, only_where, refuse_values
from cdc.decoding.types.form import TypeForm
from cdc.decoding.types.text import text_json

_NIBBLE = np.full(256, 255, np.uint8)
for _digit in b"0123456789abcdef":
    _NIBBLE[_digit] = int(chr(_digit), 16)
_BAD = "this value is not hexadecimal; bytea_output must be hex"


def _typed(texts: pa.BinaryArray) -> pa.BinaryArray:
    offsets, data = offsets_of(texts).astype(np.int64), texts.buffers()[2]
    starts, stops = offsets[:-1], offsets[1:]
    present = ~nulls_of(texts)
    lengths = stops - starts
    whole = np.frombuffer(data or b"", np.uint8)
    refuse_values(present & ((lengths < 2) | (lengths % 2 == 1)), _BAD)
    marked = starts[present]
    bad = np.zeros(len(texts), bool)
    bad[present] = (whole[marked] != ord("\\")) | (whole[marked + 1] != ord("x"))
    refuse_values(bad, _BAD)
    digits = gather(data or pa.py_buffer(b""), np.where(present, starts + 2, stops), stops)
    nibbles = _NIBBLE[bytes_of(digits)]
    ends = offsets_of(digits)
    if (nibbles == 255).any():
        of_row = np.searchsorted(ends, np.flatnonzero(nibbles == 255), side="right") - 1
        bad[of_row] = True
        refuse_values(bad, _BAD)
    values = pa.py_buffer((nibbles[0::2] << 4 | nibbles[1::2]).astype(np.uint8))
    halves = pa.py_buffer((ends // 2).astype(np.int32))
    array = pa.Array.from_buffers(pa.binary(), len(texts), [None, halves, values])
    return only_where(array, present) if texts.null_count else array


BYTEA = TypeForm(pa.binary(), "binary", text_json, _typed)
"""In JSON it stays the text, which every Postgres client reads."""
