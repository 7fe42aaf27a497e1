"""Partitions follow the size of a range, by rows and by bytes, and share it evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_pipeline.source.slicing import (
    BYTES_PER_PARTITION,
    ROWS_PER_PARTITION,
    cut,
    partitions_for,
)

MB = 1 << 20


def test_small_ranges_are_one_partition_and_large_ones_as_many_as_there_may_be() -> None:
    assert partitions_for([100] * 40, [20_000] * 40, 8) == 1
    assert partitions_for([2 * ROWS_PER_PARTITION], [MB], 8) == 2
    assert partitions_for([10], [3 * BYTES_PER_PARTITION], 8) == 3
    assert partitions_for([1_000_000], [100 * MB], 8) == 8
    assert partitions_for([0, 0], [500, 500], 8) == 1


def test_few_heavy_rows_weigh_as_much_as_many_light_ones() -> None:
    planned = cut(0, [10, 100_000], 2, [80 * MB, 10 * MB])
    assert [[(one.batch_idx, one.start, one.stop) for one in part] for part in planned] == [
        [(0, 0, 10)],
        [(1, 0, 100_000)],
    ]


@given(
    batches=st.lists(
        st.tuples(st.integers(0, 20_000), st.integers(500, 20 * MB)), min_size=1, max_size=20
    ),
    partitions=st.integers(1, 12),
)
def test_no_partition_has_much_more_than_its_share(
    batches: list[tuple[int, int]], partitions: int
) -> None:
    rows, sizes = [count for count, _ in batches], [size for _, size in batches]
    planned = cut(3, rows, partitions, sizes)
    assert 1 <= len(planned) <= partitions
    assert all(planned)

    def work(batch: int) -> float:
        return max(rows[batch] / ROWS_PER_PARTITION, sizes[batch] / BYTES_PER_PARTITION)

    shares = [
        sum(
            (one.stop - one.start) * work(one.batch_idx - 3) / rows[one.batch_idx - 3]
            for one in slices
            if one.stop > one.start
        )
        for slices in planned
    ]
    a_row = max((work(batch) / count for batch, count in enumerate(rows) if count), default=0)
    assert max(shares) <= sum(shares) / partitions + 2 * a_row + 1e-9
    for slices in planned:
        touched = [one.batch_idx for one in slices]
        assert touched == list(range(touched[0], touched[0] + len(touched)))
