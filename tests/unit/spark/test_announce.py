"""Where a schema_change message stands, with transactions and batches cut at every place."""

from __future__ import annotations

import numpy as np
import pytest

from cdc.cursor import Cursor
from spark_pipeline.announce import BatchRows, place, reaches

TABLE, OTHER = 1, 2
L = 0x100
BEFORE, BEHIND = L - 1, L + 1


def batch(*rows: tuple[int, int, int]) -> BatchRows:
    """Rows of (lsn, idx, relation), as one batch of the log has them."""
    lsn, idx, relation = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return BatchRows(lsn, idx, relation, lsn * 1000, {})


@pytest.mark.parametrize(
    ("rows", "since", "where"),
    [
        ([(L, 0, TABLE)], 0, BEFORE),
        ([(L, 0, OTHER), (L, 1, TABLE)], 1, BEFORE),
        ([(L, 0, TABLE), (L, 1, TABLE)], 1, BEHIND),  # the first row had the old version
        ([(L, 0, TABLE), (L, 1, OTHER), (L, 2, TABLE)], 2, BEHIND),
        ([(L - 8, 0, TABLE), (L, 0, TABLE)], 0, BEFORE),
        ([(L - 8, 5, TABLE), (L, 3, OTHER), (L, 4, TABLE)], 4, BEFORE),  # 0 to 2 are not ours
        ([(L, 3, OTHER), (L, 4, TABLE)], 4, BEHIND),  # begun in an earlier batch, or not: unsure
        ([(L, 4, TABLE)], 4, BEHIND),
        ([(L, 0, OTHER), (L, 1, TABLE), (L + 8, 0, TABLE)], 1, BEFORE),
    ],
)
def test_it_is_before_its_transaction_if_that_begins_in_the_batch_and_is_untouched(
    rows: list[tuple[int, int, int]], since: int, where: int
) -> None:
    for standing in ([], [Cursor(8, 0)], [Cursor(L, 0)], [Cursor(L, since + 1), Cursor(L + 8, 0)]):
        assert place(batch(*rows), TABLE, Cursor(L, since), standing) == where


@pytest.mark.parametrize("idx", [1, 2, 3])
def test_it_is_behind_if_a_consumer_stands_within_the_transaction(idx: int) -> None:
    rows = batch((L, 0, OTHER), (L, 1, OTHER), (L, 2, OTHER), (L, 3, TABLE))
    standing = [Cursor(8, 0), Cursor(L, idx)]
    assert place(rows, TABLE, Cursor(L, 3), standing) == BEHIND


def test_a_consumer_at_the_beginning_of_a_transaction_lacks_what_stands_before_it() -> None:
    assert reaches(Cursor(L, 0)) < Cursor(BEFORE, 1)
    assert reaches(Cursor(L, 0)) > Cursor(L - 8 + 1, 9)
    assert reaches(Cursor(BEFORE, 2)) == Cursor(BEFORE, 2)
    assert reaches(Cursor(0, 0)) == Cursor(0, 0)


def test_the_time_is_that_of_the_transaction() -> None:
    rows = batch((L - 8, 0, TABLE), (L, 0, OTHER), (L, 1, TABLE))
    assert rows.committed_us(L) == L * 1000
