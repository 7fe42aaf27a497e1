"""Bisection: rows that fail together are tried in halves, until a row that fails stands alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

Range = tuple[int, int]


def halves(start: int, stop: int) -> tuple[Range, Range]:
    """The two halves of the rows ``[start, stop)``."""
    middle = (start + stop) // 2
    return (start, middle), (middle, stop)


def bisect(
    rows: int,
    attempt: Callable[[int, int], T],
    refused: type[E] | tuple[type[E], ...],
    suspect: Callable[[E], bool] = lambda _: True,
) -> Iterator[tuple[int, int, T | E]]:
    """Try all rows at once; yields in order ``start, stop`` and the result of ``attempt`` on them.

    Invariant: an error in place of a result is of one row that was tried alone. An error that is
    not ``refused``, or not ``suspect``, passes through.
    """
    waiting = [(0, rows)] if rows else []
    while waiting:
        start, stop = waiting.pop()
        try:
            result: T | E = attempt(start, stop)
        except refused as error:
            if not suspect(error):
                raise
            if stop - start > 1:
                first, second = halves(start, stop)
                waiting += [second, first]
                continue
            result = error
        yield start, stop, result
