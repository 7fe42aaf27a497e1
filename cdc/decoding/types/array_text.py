"""The text of one array, read exactly: bounds, NULLs, quoted elements, up to six dimensions.

Invariant: what ``array_out`` cannot have written is refused.
"""

from __future__ import annotations

import re
from functools import lru_cache

DIMENSIONS_MAX = 6
"""Postgres' own bound; it keeps a hostile value from nesting without end."""

DELIMITERS = frozenset("!#$%&'()*+,-./:;<=>?@[]^_`|~")
"""What may stand between elements: a comma, for boxes a semicolon, and whatever else ASCII has for
a user's own type that has no meaning in an array already."""

_BOUNDS = re.compile(r"((?:\[[+-]?\d+:[+-]?\d+\])+)=")
_BOUND = re.compile(r"\[([+-]?\d+):([+-]?\d+)\]")
# Possessive: what cannot match otherwise needs no memory of how it might.
_QUOTED = re.compile(r'"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class MalformedArrayError(Exception):
    """Says what is wrong, never what the value is."""


def read_array(text: str, delimiter: str) -> tuple[tuple[int, ...], list[bytes | None]]:
    """How long it is in each dimension, and its elements in order, None for NULL."""
    reader = _ArrayReader(text, delimiter)
    reader.read()
    lengths = tuple(reader.lengths[depth] for depth in sorted(reader.lengths))
    return lengths, reader.elements


@lru_cache(maxsize=len(DELIMITERS))
def _bare(delimiter: str) -> re.Pattern[str]:
    """An element without quotes: ``array_out`` puts them around all that could be mistaken."""
    return re.compile(rf'[^{re.escape(delimiter)}{{}}"\\ \t\n\v\f\r]+')


class _ArrayReader:
    """Reads one array value."""

    def __init__(self, text: str, delimiter: str) -> None:
        self._text = text
        self._delimiter = delimiter
        self._bare = _bare(delimiter)
        self._at = 0
        self._leaf_depth = 0
        self.lengths: dict[int, int] = {}  # by depth; all arrays of one depth are equally long
        self.elements: list[bytes | None] = []

    def read(self) -> None:
        bounds = _BOUNDS.match(self._text)
        if bounds:
            self._at = bounds.end()
        if not self._next_is("{"):
            raise MalformedArrayError("it does not start with a brace")
        if self._text[self._at :] == "{}" and not bounds:
            return
        self._array(1)
        if self._at != len(self._text):
            raise MalformedArrayError("text follows its last brace")
        if bounds:
            self._check(bounds.group(1))

    def _next_is(self, character: str) -> bool:
        return self._text.startswith(character, self._at)

    def _array(self, depth: int) -> None:
        if depth > DIMENSIONS_MAX:
            raise MalformedArrayError(f"it has more than {DIMENSIONS_MAX} dimensions")
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
                raise MalformedArrayError(f"character {self._at + 1} is no delimiter")
            self._at += 1
        self._at += 1
        if self.lengths.setdefault(depth, count) != count:
            raise MalformedArrayError("its sub-arrays differ in length")

    def _element(self, depth: int) -> None:
        if self._leaf_depth not in (0, depth):
            raise MalformedArrayError("its elements differ in depth")
        self._leaf_depth = depth
        quoted = _QUOTED.match(self._text, self._at)
        match = quoted or self._bare.match(self._text, self._at)
        if match is None:
            raise MalformedArrayError(f"character {self._at + 1} starts no element")
        self._at = match.end()
        if quoted:
            self.elements.append(_ESCAPED.sub(r"\1", quoted.group(1)).encode())
        else:
            null = match.group().upper() == "NULL"
            self.elements.append(None if null else match.group().encode())

    def _check(self, bounds: str) -> None:
        lengths = [int(high) - int(low) + 1 for low, high in _BOUND.findall(bounds)]
        if lengths != [self.lengths[depth] for depth in sorted(self.lengths)]:
            raise MalformedArrayError("its bounds do not fit its elements")
