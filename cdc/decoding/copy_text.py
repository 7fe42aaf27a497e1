"""Columns as the text that COPY reads: tabs between values, one line per row, \\ before the
special.

Whole columns at a time; a column without anything special is not copied.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import bytes_of

# The backslash first: it stands before all others then.
_SPECIAL = (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r"))
_DIGITS = np.frombuffer(b"0123456789ABCDEF", dtype=np.uint8)
_LSN_CHARACTERS = 17  # eight digits, a slash, eight more


def copied_text(column: pa.StringArray) -> pa.StringArray:
    """A column of texts for COPY; null stays null."""
    raw = bytes_of(column)
    for character, written in _SPECIAL:
        if (raw == ord(character)).any():
            column = pc.replace_substring(column, character, written)
    return column


def read_text(column: pa.StringArray) -> pa.StringArray:
    """What ``copied_text`` was given, null where a line has ``\\N``."""
    if not (bytes_of(column) == ord("\\")).any():
        return column
    column = pc.if_else(pc.equal(column, "\\N"), pa.scalar(None, pa.string()), column)
    if not (bytes_of(column) == ord("\\")).any():
        return column
    # No value has a NUL in it: it stands for a backslash until all others are read.
    column = pc.replace_substring(column, "\\\\", "\0")
    for character, written in _SPECIAL[1:]:
        column = pc.replace_substring(column, written, character)
    return pc.replace_substring(column, "\0", "\\")


def lsn_texts(lsns: pa.Int64Array) -> pa.StringArray:
    """LSNs as Postgres reads them, each with all its digits: ``00000016/B374D848``."""
    numbers = lsns.to_numpy(zero_copy_only=False).astype(np.uint64)
    shifts = np.arange(60, -4, -4, dtype=np.uint64)
    digits = _DIGITS[((numbers[:, None] >> shifts) & np.uint64(15)).astype(np.intp)]
    text = np.empty((len(numbers), _LSN_CHARACTERS), dtype=np.uint8)
    text[:, :8], text[:, 8], text[:, 9:] = digits[:, :8], ord("/"), digits[:, 8:]
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * _LSN_CHARACTERS
    return pa.StringArray.from_buffers(
        len(numbers), pa.py_buffer(offsets), pa.py_buffer(text.reshape(-1))
    )
