"""Arrow string arrays by their buffers: cut out of a larger buffer, masked, read as bytes.

Everything here is one native call or a view. Invariant: arrays made here start at
offset 0 of their buffers, so that a mask can be laid over them without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.errors import DecodeError

Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]

_EVENS = pa.array(np.arange(0, 1 << 17, 2, dtype=np.int32))  # for most frames, made once


class PlacedError(DecodeError):
    """The message at ``position`` of its group is broken; the caller, which knows the table and
    the cursors, turns it into a DecodeError that names them, so it never leaves this room."""

    def __init__(self, position: int, what: str, column: str | None = None) -> None:
        super().__init__(what)
        self.position = position
        self.column = column


class BadValuesError(DecodeError):
    """Values of a column that its type cannot have: the position of each, and what is wrong.

    The messages are sound, so only the rows that hold them suffer.
    """

    def __init__(self, faults: Mapping[int, str]) -> None:
        assert faults  # else taking the bad ones out and trying again would never end
        super().__init__("a column holds values that its type cannot have")
        self.faults = faults


def refuse_values(bad: Mask, what: str) -> None:
    """Raise if any value is bad."""
    if bad.any():
        raise BadValuesError(dict.fromkeys(np.flatnonzero(bad).tolist(), what))


@dataclass(frozen=True)
class TextColumn:
    """One column of a group's tuples, as the text that Postgres wrote."""

    values: pa.BinaryArray  # null where no text was sent
    unchanged: Mask | None = None  # where the value is an unchanged TOAST value; None: nowhere


def first(mask: Mask) -> int:
    """The position of the first true value."""
    return int(np.argmax(mask))


def gather(data: pa.Buffer, starts: Positions, stops: Positions) -> pa.BinaryArray:
    """Copy ``data[start:stop]`` for each pair. The pairs must lie in ``data``, in rising order."""
    count = len(starts)
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = starts
    offsets[1::2] = stops
    offsets[-1] = stops[-1] if count else 0
    # Even elements are the values, odd ones what lies between them: one take copies the values.
    cuts = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), data])
    return cuts.take(_evens(count))


def _evens(count: int) -> pa.Array:
    if count <= len(_EVENS):
        return _EVENS.slice(0, count)
    return pa.array(np.arange(0, 2 * count, 2, dtype=np.int32))


def without(values: pa.Array, positions: Iterable[int]) -> pa.Array:
    """The same values, null also at these positions."""
    keep = np.ones(len(values), bool)
    keep[list(positions)] = False
    return pc.if_else(pa.array(keep), values, pa.scalar(None, values.type))


def only_where(values: pa.Array, present: Mask) -> pa.Array:
    """The same values, null where not ``present``. What was null before is not any more."""
    validity = pa.py_buffer(np.packbits(present, bitorder="little"))
    _, offsets, data = values.buffers()
    return pa.Array.from_buffers(values.type, len(values), [validity, offsets, data])


def offsets_of(values: pa.Array) -> NDArray[np.int32]:
    """Where each value starts in the array's data; one more than there are values."""
    offsets = np.frombuffer(values.buffers()[1], np.int32)
    return offsets[values.offset : values.offset + len(values) + 1]


def bytes_of(values: pa.Array) -> NDArray[np.uint8]:
    """All bytes of the array's values, one value after another."""
    data = values.buffers()[2]
    if data is None or not len(values):
        return np.empty(0, np.uint8)
    offsets = offsets_of(values)
    return np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]


def nulls_of(values: pa.Array) -> Mask:
    """Where the array is null."""
    mask: Mask = values.is_null().to_numpy(zero_copy_only=False)
    return mask
