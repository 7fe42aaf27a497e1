"""The members of JSON objects and the elements of JSON arrays, cut out a whole column at a time.

Decode wrote these texts, so they are valid, and nothing stands between a key, its colon and its
value; only what a json column of the source holds may have spaces, and that is never cut into.
Invariant: a value is given exactly as it was written, every digit of it. A parser would
make 64-bit floats of numbers, Spark's own does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.decoding.columns import Positions, gather, offsets_of
from cdc.errors import ProtocolError

_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPENING, _CLOSING = b"[{", b"]}"
_MARKS: Final = np.zeros(256, bool)
_MARKS[list(b'"{}[],:')] = True
_STEP: Final = np.zeros(256, np.int32)
_STEP[list(_OPENING)] = 1
_STEP[list(_CLOSING)] = -1
_PIECE_BYTES: Final = 1 << 20
_NULL = pa.scalar(b"null", pa.binary())


def members(objects: pa.BinaryArray, names: Sequence[bytes]) -> list[pa.BinaryArray]:
    """For each name, quoted and escaped as decode writes it, the JSON that the objects have there.

    Null where an object has no such member, where it is JSON's null, and where there is no object.
    """
    parts = [_members(piece, names) for piece in _pieces(objects)]
    return [pa.concat_arrays(columns) for columns in zip(*parts, strict=True)]


def _members(objects: pa.BinaryArray, names: Sequence[bytes]) -> list[pa.BinaryArray]:
    cuts = _Cuts.of(objects)
    colons = np.flatnonzero(cuts.kinds == _COLON)
    row_of = cuts.rows[colons]
    keys = gather(cuts.data, cuts.at[colons - 1] + 1, cuts.at[colons])
    which = pc.index_in(keys, pa.array(names, pa.binary())).fill_null(-1).to_numpy()
    found = []
    for place in range(len(names)):
        here = np.flatnonzero(which == place)
        colon = colons[here]
        values = gather(cuts.data, cuts.at[colon] + 1, cuts.at[colon + 1])
        found.append(_spread(_without_null(values), row_of[here], len(objects)))
    return found


def pairs(objects: pa.BinaryArray) -> tuple[Positions, pa.BinaryArray, pa.BinaryArray]:
    """Where each object's members begin (one more than there are objects), all keys, all values."""
    cuts = _Cuts.of(objects)
    colons = np.flatnonzero(cuts.kinds == _COLON)
    keys = gather(cuts.data, cuts.at[colons - 1] + 1, cuts.at[colons])
    values = gather(cuts.data, cuts.at[colons] + 1, cuts.at[colons + 1])
    return _bounds(cuts.rows[colons], len(objects)), keys, _without_null(values)


def elements(arrays: pa.BinaryArray) -> tuple[Positions, pa.BinaryArray]:
    """Where each array's elements begin (one more than there are arrays), and all elements."""
    cuts = _Cuts.of(arrays)
    # Every mark but the last one of an array begins an element, unless the array is empty.
    begins = np.flatnonzero(cuts.rows[:-1] == cuts.rows[1:])
    begins = begins[cuts.at[begins + 1] > cuts.at[begins] + 1]
    values = gather(cuts.data, cuts.at[begins] + 1, cuts.at[begins + 1])
    return _bounds(cuts.rows[begins], len(arrays)), _without_null(values)


@dataclass(frozen=True)
class _Cuts:
    """The marks on the outermost level of each text: its brackets, commas and colons."""

    data: pa.Buffer
    at: Positions
    kinds: NDArray[np.uint8]
    rows: Positions  # the text that each is of

    @classmethod
    def of(cls, texts: pa.BinaryArray) -> _Cuts:
        bounds = offsets_of(texts).astype(np.int64)
        data = texts.buffers()[2] or pa.py_buffer(b"")
        first, last = int(bounds[0]), int(bounds[-1])
        whole = np.frombuffer(data, np.uint8)[first:last]
        at, kinds = _outside_strings(whole)
        step = _STEP[kinds]
        depth = np.cumsum(step)  # behind each mark
        if len(depth) and (depth[-1] or depth.min() < 0):
            raise _broken()
        outer = (depth == 0) | ((depth == 1) & (step >= 0))
        at, kinds = at[outer] + first, kinds[outer]
        rows = np.searchsorted(bounds, at, side="right") - 1
        return cls(data, at, kinds, rows)


def _pieces(texts: pa.BinaryArray) -> list[pa.BinaryArray]:
    """Slices small enough that all that is worked out of one stays near the processor."""
    bounds = offsets_of(texts).astype(np.int64)
    stops = np.arange(bounds[0] + _PIECE_BYTES, bounds[-1], _PIECE_BYTES)
    rows = np.unique([0, *np.searchsorted(bounds, stops), len(texts)])
    if len(rows) < 3:
        return [texts]
    return [texts.slice(at, to - at) for at, to in pairwise(rows.tolist())]


def _outside_strings(data: NDArray[np.uint8]) -> tuple[Positions, NDArray[np.uint8]]:
    """Where brackets, commas and colons are that belong to no string, and which they are."""
    at = np.flatnonzero(_MARKS[data])
    kinds = data[at]
    quotes = kinds == _QUOTE
    escaped = _escaped(data)
    if len(escaped):
        quotes &= ~np.isin(at, escaped, assume_unique=True)
    inside = np.cumsum(quotes, dtype=np.int64) & 1
    if len(inside) and inside[-1]:
        raise _broken()
    outside = (inside == 0) & (kinds != _QUOTE)
    return at[outside], kinds[outside]


def _escaped(data: NDArray[np.uint8]) -> Positions:
    """The bytes that a backslash stands before which is not escaped itself."""
    slashes = np.flatnonzero(data == _BACKSLASH)
    if not len(slashes):
        return slashes
    begins = np.concatenate([[True], np.diff(slashes) > 1])
    run_start = np.maximum.accumulate(np.where(begins, np.arange(len(slashes)), 0))
    escaped: Positions = slashes[(np.arange(len(slashes)) - run_start) % 2 == 0] + 1
    return escaped


def _bounds(rows: Positions, count: int) -> Positions:
    return np.searchsorted(rows, np.arange(count + 1)).astype(np.int64)


def _without_null(values: pa.BinaryArray) -> pa.BinaryArray:
    named = pc.equal(values, _NULL)
    if not pc.any(named, min_count=0).as_py():
        return values
    return pc.if_else(named, pa.scalar(None, pa.binary()), values)


def _spread(values: pa.BinaryArray, rows: Positions, count: int) -> pa.BinaryArray:
    if len(rows) == count:
        return values
    at = np.full(count, -1, np.int64)
    at[rows] = np.arange(len(rows))
    return values.take(pa.array(at, mask=at < 0))


def _broken() -> ProtocolError:
    return ProtocolError(
        "a record came to a window that is no JSON object of decode's",
        fix="report it with this text; nothing was skipped",
    )
