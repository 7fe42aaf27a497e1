"""Bisection: every row is tried, in order, and an error is of one row alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.bisection import bisect


@given(st.integers(0, 60), st.sets(st.integers(0, 59)))
def test_results_and_errors_cover_all_rows_in_order(rows: int, bad: set[int]) -> None:
    def attempt(start: int, stop: int) -> list[int]:
        if bad & set(range(start, stop)):
            raise ValueError
        return list(range(start, stop))

    good: list[int] = []
    refused: list[int] = []
    reached = 0
    for start, stop, result in bisect(rows, attempt, ValueError):
        assert start == reached
        reached = stop
        if isinstance(result, ValueError):
            assert stop == start + 1
            refused.append(start)
        else:
            good += result
    assert reached == rows
    assert refused == sorted(bad & set(range(rows)))
    assert good == sorted(set(range(rows)) - bad)


def test_an_error_that_no_row_is_suspected_of_passes_through() -> None:
    tried: list[tuple[int, int]] = []

    def attempt(start: int, stop: int) -> None:
        tried.append((start, stop))
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(bisect(8, attempt, OSError, suspect=lambda _: False))
    with pytest.raises(OSError, match="disk"):
        list(bisect(8, attempt, ValueError))
    assert tried == [(0, 8), (0, 8)]
