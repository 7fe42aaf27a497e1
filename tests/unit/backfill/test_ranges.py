"""Ranges of blocks: without a gap, bounded, the last one open."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cdc.backfill.ranges import CHUNKS_MAX, BlockRange, block_ranges


@given(
    st.integers(0, 1 << 32),
    st.sampled_from([8192, 32768]),
    st.integers(1, 1 << 30),
    st.integers(0, 16),
)
def test_ranges_follow_each_other_and_the_last_is_open(
    blocks: int, block_bytes: int, chunk_bytes: int, small: int
) -> None:
    # A plan of the largest table is long: its first and last ranges say enough.
    blocks, chunk_bytes = min(blocks, 5_000_000), max(chunk_bytes, 1 << 20)
    ranges = list(block_ranges(blocks, block_bytes, chunk_bytes, small))
    assert ranges[0].first == 0
    assert ranges[-1].end is None
    assert all(one.end == other.first for one, other in pairwise(ranges))
    assert len(ranges) <= CHUNKS_MAX


def test_a_range_has_about_the_bytes_that_were_asked_for() -> None:
    assert list(block_ranges(10, 8192, 4 * 8192)) == [
        BlockRange(0, 4), BlockRange(4, 8), BlockRange(8, None)
    ]  # fmt: skip
    assert list(block_ranges(9, 8192, 8 * 8192)) == [BlockRange(0, None)]
    assert list(block_ranges(0, 8192, 1)) == [BlockRange(0, None)]


def test_the_first_ranges_may_be_smaller() -> None:
    assert list(block_ranges(10, 8192, 4 * 8192, small=2)) == [
        BlockRange(0, 1), BlockRange(1, 2), BlockRange(2, 6), BlockRange(6, None)
    ]  # fmt: skip


def test_no_table_has_more_chunks_than_are_allowed() -> None:
    for small in (0, 16):
        assert len(list(block_ranges(1 << 32, 8192, 8192, small))) <= CHUNKS_MAX
