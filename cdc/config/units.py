"""Sizes as people write them: ``64MiB``, ``64MB``, or a plain number of bytes."""

from __future__ import annotations

import re

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FACTORS = _DECIMAL | _BINARY
_SIZE = re.compile(r"([0-9]+)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """The number of bytes that ``text`` names; ``ValueError`` if it names none."""
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError("should be a size: a number of bytes, or one such as 64MiB, 64MB or 1GiB")
    return int(match[1]) * factor


def format_size(size: int) -> str:
    """The shortest exact form that ``parse_size`` reads back."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)
