"""Arrays of any dimension: nested JSON arrays, each element in the form of its own type.

The array format nests and quotes, so a value is read by itself, exactly: bounds, NULLs, quoted
elements. The elements of a whole column then go through their type's family together.
What must always hold: what ``array_out`` cannot have written is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

import pyarrow as pa

from cdc.decoding.columns import PlacedError
from cdc.decoding.types.form import Family, JsonColumn
from cdc.decoding.types.text import valid_utf8

DIMENSIONS_MAX = 6
"""Postgres' own bound; it keeps a hostile value from nesting without end."""

_BOUNDS = re.compile(r"((?:\[[+-]?\d+:[+-]?\d+\])+)=")
_BOUND = re.compile(r"\[([+-]?\d+):([+-]?\d+)\]")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_BARE = {delimiter: re.compile(rf'[^{delimiter}{{}}"\\\s]+') for delimiter in ",;"}


def array_of(element: Family, delimiter: str = ",") -> Family:
    """The family of arrays whose elements are of the family ``element``."""

    def array_json(texts: pa.BinaryArray) -> JsonColumn:
        pieces = _Pieces()
        for position, text in enumerate(valid_utf8(texts).to_pylist()):
            if text is not None:
                try:
                    _Reader(text, delimiter, pieces).read()
                except _MalformedError as fault:
                    raise PlacedError(position, f"this array is malformed ({fault})") from None
            pieces.stops.append(len(pieces.json))
        pieces.fill(element)
        return JsonColumn(pa.array(pieces.values(texts.is_valid().to_pylist()), pa.string()))

    return array_json


class _MalformedError(Exception):
    pass


@dataclass
class _Pieces:
    """The JSON of a column's arrays in pieces; elements are filled in at the end, all at once."""

    json: list[str] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)  # in json, one a row
    slots: list[int] = field(default_factory=list)  # in json, one an element
    elements: list[str] = field(default_factory=list)

    def fill(self, element: Family) -> None:
        if not self.elements:
            return
        texts = pa.array([text.encode() for text in self.elements], pa.binary())
        try:
            filled = element(texts).bare().to_pylist()
        except PlacedError as fault:
            row = bisect_right(self.stops, self.slots[fault.position])
            raise PlacedError(row, f"an element of this array is wrong: {fault.what}") from None
        for slot, value in zip(self.slots, filled, strict=True):
            self.json[slot] = value

    def values(self, valid: list[bool]) -> list[str | None]:
        starts = [0, *self.stops]
        return [
            "".join(self.json[start:stop]) if is_valid else None
            for start, stop, is_valid in zip(starts, self.stops, valid, strict=False)
        ]


class _Reader:
    """Reads one array value into pieces."""

    def __init__(self, text: str, delimiter: str, pieces: _Pieces) -> None:
        self._text = text
        self._delimiter = delimiter
        self._bare = _BARE[delimiter]
        self._pieces = pieces
        self._at = 0
        self._lengths: dict[int, int] = {}  # by depth; all arrays of one depth are equally long
        self._leaf_depth = 0

    def read(self) -> None:
        bounds = _BOUNDS.match(self._text)
        if bounds:
            self._at = bounds.end()
        if not self._next_is("{"):
            raise _MalformedError("it does not start with a brace")
        if self._text[self._at :] == "{}" and not bounds:
            self._at += 2
            self._pieces.json.append("[]")
            return
        self._array(1)
        if self._at != len(self._text):
            raise _MalformedError("text follows its last brace")
        if bounds:
            self._check(bounds.group(1))

    def _next_is(self, character: str) -> bool:
        return self._text.startswith(character, self._at)

    def _array(self, depth: int) -> None:
        if depth > DIMENSIONS_MAX:
            raise _MalformedError(f"it has more than {DIMENSIONS_MAX} dimensions")
        json = self._pieces.json
        json.append("[")
        self._at += 1
        count = 0
        while True:
            if self._next_is("{"):
                self._array(depth + 1)
            else:
                self._element(depth)
            count += 1
            if self._next_is("}"):
                break
            if not self._next_is(self._delimiter):
                raise _MalformedError(f"character {self._at + 1} is no delimiter")
            self._at += 1
            json.append(",")
        self._at += 1
        json.append("]")
        if self._lengths.setdefault(depth, count) != count:
            raise _MalformedError("its sub-arrays differ in length")

    def _element(self, depth: int) -> None:
        if self._leaf_depth not in (0, depth):
            raise _MalformedError("its elements differ in depth")
        self._leaf_depth = depth
        quoted = _QUOTED.match(self._text, self._at)
        match = quoted or self._bare.match(self._text, self._at)
        if match is None:
            raise _MalformedError(f"character {self._at + 1} starts no element")
        self._at = match.end()
        if quoted:
            element = _ESCAPED.sub(r"\1", quoted.group(1))
        else:
            element = match.group()
            if element.upper() == "NULL":
                self._pieces.json.append("null")
                return
        self._pieces.slots.append(len(self._pieces.json))
        self._pieces.elements.append(element)
        self._pieces.json.append("")

    def _check(self, bounds: str) -> None:
        lengths = [int(high) - int(low) + 1 for low, high in _BOUND.findall(bounds)]
        if lengths != [self._lengths[depth] for depth in sorted(self._lengths)]:
            raise _MalformedError("its bounds do not fit its elements")
