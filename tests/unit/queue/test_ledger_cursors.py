"""Cursors as bytes: exact, and in the order of the cursors."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import Cursor
from cdc.queue.ledger.base import Integers, LedgerUse, among, pack, pack_note, packed, together

_NUMBERS = st.one_of(st.integers(0, 3), st.integers(2**53 - 2, 2**53 + 2), st.just(2**63 - 1))
_CURSORS = st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=40)


def columns(cursors: list[tuple[int, int]]) -> tuple[Integers, Integers]:
    both = np.array(cursors, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


@settings(deadline=None)
@given(_CURSORS, _CURSORS)
def test_a_cursor_is_among_others_only_if_both_of_its_numbers_are(
    asked: list[tuple[int, int]], noted: list[tuple[int, int]]
) -> None:
    found = among(*columns(asked), pack(*columns(noted)))
    assert found.tolist() == [cursor in set(noted) for cursor in asked]


@settings(deadline=None)
@given(_CURSORS)
def test_packed_cursors_sort_as_cursors_do(cursors: list[tuple[int, int]]) -> None:
    one_by_one = [packed(Cursor(*each)) for each in cursors]
    assert pack(*columns(cursors)) == b"".join(one_by_one)
    if cursors:
        high, request = pack_note(*columns(cursors))
        assert high == max(cursors)
        assert request == b"".join(sorted(one_by_one, reverse=True))
    assert sorted(one_by_one) == [packed(Cursor(*each)) for each in sorted(cursors)]


def test_deliveries_together_are_lost_if_one_is_and_none_where_no_ledger_was_asked() -> None:
    assert together([None, None]) is None
    assert together([None, LedgerUse()]) == LedgerUse()
    assert together([LedgerUse(), LedgerUse("why", 2), LedgerUse("later", 3)]) == LedgerUse(
        "why", 5
    )
