"""Values between brackets that need no quotes: what most arrays and composites are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cdc.decoding.columns import BadValuesError, bytes_of, gather, nulls_of, offsets_of
from cdc.decoding.types.text import valid_utf8

# Where one of these is in a value, array_out and record_out put quotes around it.
_QUOTED = [bytes([mark]) for mark in b'"\\ \t\n\v\f\r']


def plain_insides(texts: pa.BinaryArray, opening: str, closing: str) -> pa.StringArray | None:
    """What each value has between its brackets, empty for a null.

    None if any value has quotes, or is not in one pair of brackets: then nothing can be said of a
    whole column at once.
    """
    data, offsets = bytes_of(texts), offsets_of(texts).astype(np.int64)
    null = nulls_of(texts)
    starts, stops = offsets[:-1][~null] - offsets[0], offsets[1:][~null] - offsets[0]
    if not len(starts) or (stops - starts < 2).any():
        return None
    whole = data.tobytes()
    if any(mark in whole for mark in _QUOTED):
        return None
    opens, closes = data == ord(opening), data == ord(closing)
    if not (opens[starts].all() and closes[stops - 1].all()):
        return None
    if opens.sum() > len(starts) or closes.sum() > len(starts):
        return None
    first = np.where(null, offsets[1:], offsets[:-1] + 1)
    last = np.where(null, offsets[1:], offsets[1:] - 1)
    try:
        return valid_utf8(gather(texts.buffers()[2], first, last))
    except BadValuesError:
        return None  # not every byte that looks like a delimiter is one
