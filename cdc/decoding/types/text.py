"""Text, and every type whose text is its value: a JSON string, escaped exactly.

Most columns hold nothing that JSON must escape: one pass over a column's bytes tells, and then
its bytes are the JSON already.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.decoding.columns import BadValuesError, bytes_of
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.form import JsonColumn, TypeForm, quoted

_QUOTE, _BACKSLASH = b'"\\'
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def text_json(texts: pa.BinaryArray, _form: ValueFormat | None = None) -> JsonColumn:
    """Each text as a JSON string."""
    return quoted(escape(valid_utf8(texts)))


def valid_utf8(texts: pa.BinaryArray) -> pa.StringArray:
    """The same values as strings; refused where one is not UTF-8."""
    try:
        return texts.cast(pa.string())
    except pa.ArrowInvalid:
        # Rare, so it may be slow: find the values to name.
        faults = {}
        for position, value in enumerate(texts.to_pylist()):
            try:
                (value or b"").decode()
            except UnicodeDecodeError as fault:
                faults[position] = f"this value is not UTF-8 ({fault.reason})"
        raise BadValuesError(faults) from None


def from_codec(texts: pa.BinaryArray, codec: str) -> pa.BinaryArray:
    """Texts of another encoding in UTF-8; refused where one is not of that encoding either."""
    data = bytes_of(texts)
    if not len(data) or data.max() < 0x80:
        return texts  # every encoding of a server has ASCII in it
    values: list[bytes | None] = []
    faults = {}
    for position, value in enumerate(texts.to_pylist()):
        try:
            values.append(None if value is None else value.decode(codec).encode())
        except UnicodeDecodeError as fault:
            values.append(None)
            faults[position] = f"this value is not {codec.upper()} ({fault.reason})"
    if faults:
        raise BadValuesError(faults)
    return pa.array(values, pa.binary())


def escape(strings: pa.StringArray) -> pa.StringArray:
    """Escape what JSON must have escaped: quotes, backslashes and control characters."""
    data = bytes_of(strings)
    if not _needs_escape(data):
        return strings
    special = np.unique(data[(data < 0x20) | (data == _QUOTE) | (data == _BACKSLASH)])
    # The backslash goes first, or it would escape the others' escapes.
    for code in sorted(special.tolist(), key=lambda code: code != _BACKSLASH):
        character = chr(code)
        escaped = f"\\{character}" if code >= 0x20 else _SHORT.get(character, f"\\u{code:04x}")
        strings = pc.replace_substring(strings, character, escaped)
    return strings


def _needs_escape(data: NDArray[np.uint8]) -> bool:
    if not len(data):
        return False
    # A minimum and two searches run at memory speed; comparing byte by byte does not.
    text = data.tobytes()
    return bool(data.min() < 0x20) or b'"' in text or b"\\" in text


TEXT = TypeForm(pa.string(), "string", text_json, valid_utf8)
"""text, varchar, char, name, citext, ltree, xml, uuid; time, timetz, interval; money; network
addresses, bit strings, geometric types, ranges and multiranges, tsvector, enums; and whatever is
not known here. None of them has a form that is both richer and exact everywhere: ``24:00:00`` is no
time in Arrow, an interval of months and days no duration."""
