"""Walk the tuples of many messages at once: column by column, all rows in step.

Invariant: no byte outside a row's own message is ever taken as its value. Every
length is checked against the end of its row before anything is copied, and the first row that
breaks the format is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.decoding.columns import (
    Mask,
    PlacedError,
    Positions,
    TextColumn,
    first,
    gather,
    only_where,
)

_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"


@dataclass(frozen=True)
class Payloads:
    """The bytes of all messages of a frame, for reading at many positions at once."""

    data: pa.Buffer

    @cached_property
    def bytes(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.data, np.uint8)

    @cached_property
    def _uint32_at_every_byte(self) -> NDArray[np.uint32]:
        # They overlap on purpose, so that one can be read at any position.
        return np.ndarray((max(len(self.bytes) - 3, 0),), ">u4", self.data, 0, (1,))

    def uint32(self, positions: Positions) -> Positions:
        """The big-endian number at each position; that of the last bytes if none starts there."""
        numbers = self._uint32_at_every_byte
        return numbers[np.minimum(positions, len(numbers) - 1)].astype(np.int64)

    def uint16(self, positions: Positions) -> Positions:
        """The big-endian number that starts at each position."""
        return (self.bytes[positions].astype(np.int64) << 8) | self.bytes[positions + 1]


def read_tuples(
    payloads: Payloads, at: Positions, ends: Positions, names: tuple[str, ...]
) -> tuple[list[TextColumn], Positions]:
    """The columns of the tuples that start ``at``, and where each tuple stops."""
    _refuse(at + 2 > ends, "its message ends before the tuple")
    counts = payloads.uint16(at)
    wrong = counts != len(names)
    if wrong.any():
        row = first(wrong)
        raise PlacedError(row, f"its tuple has {counts[row]} columns, its table {len(names)}")
    at = at + 2
    columns = []
    for name in names:
        column, at = _read_column(payloads, at, ends, name)
        columns.append(column)
    return columns, at


def _read_column(
    payloads: Payloads, at: Positions, ends: Positions, name: str
) -> tuple[TextColumn, Positions]:
    # A row that has ended already reads a byte of its neighbour here. No value is that short:
    # it then stops behind its end, and one comparison finds every kind of overrun.
    kinds = payloads.bytes.take(at, mode="clip")
    text = kinds == _TEXT
    if text.all():
        starts = at + 5
        stops = starts + payloads.uint32(at + 1)
        _refuse_overrun(at, stops, ends, text, name)
        return TextColumn(gather(payloads.data, starts, stops)), stops
    unchanged = kinds == _UNCHANGED
    _refuse(at >= ends, "its message ends before this column", name)
    _refuse_kinds(kinds, text | unchanged | (kinds == _NULL), name)
    starts = at + np.where(text, 5, 1)
    stops = starts + np.where(text, payloads.uint32(at + 1), 0)
    _refuse_overrun(at, stops, ends, text, name)
    values = only_where(gather(payloads.data, starts, stops), text)
    return TextColumn(values, unchanged if unchanged.any() else None), stops


def _refuse(bad: Mask, what: str, name: str | None = None) -> None:
    if bad.any():
        raise PlacedError(first(bad), what, name)


def _refuse_overrun(
    at: Positions, stops: Positions, ends: Positions, text: Mask, name: str
) -> None:
    if not (stops > ends).any():
        return
    _refuse(at >= ends, "its message ends before this column", name)
    _refuse(text & (at + 5 > ends), "its message ends within this column's length", name)
    _refuse(stops > ends, "this value is longer than its message", name)


def _refuse_kinds(kinds: NDArray[np.uint8], known: Mask, name: str) -> None:
    if known.all():
        return
    row = first(~known)
    what = "binary: read the slot without that option" if kinds[row] == _BINARY else "not known"
    raise PlacedError(row, f"this value's kind {bytes([kinds[row]])!r} is {what}", name)
