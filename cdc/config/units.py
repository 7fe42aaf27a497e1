"""Sizes and durations as people write them.

A size is ``64MiB``, ``64MB``, or a plain number of bytes; a duration is ``100ms``, ``5s``, ``1m``,
``2h``, ``1d`` or ``0``, in whole microseconds.
"""

from __future__ import annotations

import re
from typing import Final

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FACTORS = _DECIMAL | _BINARY
_SIZE = re.compile(r"([0-9]+)\s*([A-Za-z]*)")

_MICROSECONDS: Final = {
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
}
_DURATION: Final = re.compile(r"([0-9]{1,15})\s*(ms|[smhd])")
_DAYS_MAX: Final = 36_500


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


def parse_duration(text: str) -> int:
    """The number of microseconds that ``text`` names; ``ValueError`` if it names none."""
    if text.strip() == "0":
        return 0
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("should be a duration such as 100ms, 5s, 1m, 2h or 1d, or 0")
    duration = int(match[1]) * _MICROSECONDS[match[2]]
    if duration > _DAYS_MAX * _MICROSECONDS["d"]:
        raise ValueError(f"should be at most {_DAYS_MAX}d")
    return duration
