"""A source's own time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdc.eventtime.clock import SourceClock

S = 1_000_000


def test_the_clock_starts_at_zero_and_the_first_commit_fixes_the_offset() -> None:
    clock = SourceClock()
    assert clock.now == 0
    clock.read(1_700_000_000 * S)
    assert clock.now == 0
    clock.read(1_700_000_005 * S)
    assert clock.now == 5 * S


def test_time_that_passed_at_the_end_before_the_first_commit_counts() -> None:
    clock = SourceClock()
    clock.at_end(100 * S)
    clock.at_end(107 * S)
    clock.read(1_700_000_000 * S)
    assert clock.now == 7 * S
    clock.read(1_700_000_001 * S)
    assert clock.now == 8 * S


def test_a_backlog_passes_by_its_commit_times_however_long_reading_it_takes() -> None:
    clock = SourceClock()
    clock.at_end(0)
    for at in range(1, 11):
        clock.read(1_700_000_000 * S + at)
        clock.waiting(at * 60 * S)
    clock.at_end(1_000 * S)
    assert clock.now == 9
    clock.at_end(1_003 * S)
    assert clock.now == 9 + 3 * S


def test_time_from_the_end_to_the_next_row_passes_by_its_commit() -> None:
    clock = SourceClock()
    clock.read(1_700_000_000 * S)
    clock.at_end(0)
    clock.read(1_700_000_001 * S)
    clock.at_end(60 * S)
    assert clock.now == 1 * S


def test_time_at_the_end_does_not_count_twice_when_the_next_commit_shows_it() -> None:
    clock = SourceClock()
    clock.read(1_700_000_000 * S)
    clock.at_end(0)
    clock.at_end(30 * S)
    clock.read(1_700_000_031 * S)
    assert clock.now == 31 * S


def test_commits_that_overtook_each_other_move_nothing() -> None:
    clock = SourceClock()
    for commit in (10 * S, 12 * S, 11 * S, 12 * S):
        clock.read(commit)
    assert clock.now == 2 * S


def test_after_a_database_clock_was_set_back_its_commits_still_count() -> None:
    clock = SourceClock()
    for commit in (3_600 * S, 3_605 * S, 5 * S, 9 * S):
        clock.read(commit)
    assert clock.now == 9 * S


@given(
    st.lists(
        st.tuples(st.sampled_from(["read", "at_end", "waiting"]), st.integers(-(10**9), 10**9))
    )
)
def test_the_clock_never_goes_back(calls: list[tuple[str, int]]) -> None:
    clock = SourceClock()
    last = 0
    for call, at in calls:
        getattr(clock, call)(at)
        assert clock.now >= last
        last = clock.now
