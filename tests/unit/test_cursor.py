"""Cursors and LSNs in Postgres' own spelling."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.cursor import (
    Cursor,
    format_lsn,
    free_place,
    idle_place,
    is_free,
    parse_lsn,
    place_before,
)
from cdc.errors import GapError, OperatorError


@given(lsn=st.integers(0, 2**64 - 1), idx=st.integers(0, 2**62))
def test_a_cursor_is_read_back_as_it_was_written(lsn: int, idx: int) -> None:
    assert Cursor.parse(str(Cursor(lsn, idx))) == Cursor(lsn, idx)
    assert parse_lsn(format_lsn(lsn)) == lsn


def test_an_lsn_is_spelled_as_postgres_does() -> None:
    assert format_lsn(0x16_B374_D848) == "16/B374D848"


def test_cursors_compare_in_commit_order() -> None:
    assert Cursor(1, 9) < Cursor(2, 0) < Cursor(2, 1)


@pytest.mark.parametrize("text", ["", "1/2", "1/2:x", "zz:1", "-1:2", "1/2:-1", "²:1"])
def test_a_text_that_is_no_cursor_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OperatorError, match="16/B374D848"):
        Cursor.parse(text)


def test_an_error_keeps_its_kind_and_its_fix_between_processes() -> None:
    again = pickle.loads(pickle.dumps(GapError("what", fix="do this")))
    assert isinstance(again, GapError)
    assert str(again) == "what. To fix it: do this"


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 30))
def test_a_free_place_lies_between_a_commit_and_whatever_follows_it(at: int, idx: int) -> None:
    commit = at * 8
    place = free_place(Cursor(commit, idx))
    following = Cursor(commit + 40, 0)  # no commit record is shorter
    assert Cursor(commit, 1 << 40) < place < place_before(following) < following
    assert is_free(place.lsn)
    assert free_place(Cursor(place.lsn, idx)) == Cursor(place.lsn, idx)


def test_an_idle_source_stands_at_a_free_place_behind_every_commit_below_it() -> None:
    end = 0x2000
    place = idle_place(end)
    assert Cursor(end - 40, 1 << 40) < place < place_before(Cursor(end, 0))
    assert free_place(place) == place


@given(lsn=st.integers(0, 2**63 - 1), idx=st.integers(0, 2**62))
def test_a_cursor_is_read_in_the_spelling_of_idempotency_keys_too(lsn: int, idx: int) -> None:
    assert Cursor.parse(f"{lsn}:{idx}") == Cursor(lsn, idx)
    assert Cursor.parse(Cursor(lsn, idx).key) == Cursor(lsn, idx)
