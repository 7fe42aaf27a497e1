"""Java properties files: names, values, comments, escapes, lines that go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_SEPARATOR: Final = re.compile(r"(?P<key>(?:\\.|[^\\=:\s])+)\s*(?:[=:]\s*|\s)?(?P<value>.*)", re.S)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.S)
_CONTROL: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(text: str) -> dict[str, str]:
    """The properties by name; the last of equal names counts."""
    found = {}
    for line in _logical_lines(text):
        match = _SEPARATOR.fullmatch(line)
        if match is not None:
            found[_unescaped(match["key"])] = _unescaped(match["value"])
    return found


def _logical_lines(text: str) -> Iterator[str]:
    begun = ""
    for physical in text.splitlines():
        line = physical.lstrip()
        if not begun and (not line or line[0] in "#!"):
            continue
        ends = len(line) - len(line.rstrip("\\"))
        if ends % 2:
            begun += line[:-1]
            continue
        yield begun + line
        begun = ""
    if begun:
        yield begun


def _unescaped(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        escaped = match[1]
        if len(escaped) > 1:
            return chr(int(escaped[1:], 16))
        return _CONTROL.get(escaped, escaped)

    return _ESCAPE.sub(one, text)
