"""Cutting a range of batches into slices of about equal work, one list of slices a partition. Pure.

A batch may be cut; each of its slices says which part of how many it is, so that the reorder step
knows when a batch is whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spark_pipeline.slices.raw_rows import LogSlice

ROWS_PER_PARTITION = 5_000
BYTES_PER_PARTITION = 4 << 20
"""What a task should have at least, by one or the other: starting it costs as much as that."""


def cut(
    first_batch: int, rows: Sequence[int], partitions: int, sizes: Sequence[int] | None = None
) -> list[list[LogSlice]]:
    """Cut batches of ``rows`` rows each, numbered from ``first_batch``, for ``partitions``.

    With ``sizes``, their bytes, partitions are balanced by whichever of both is more work.
    """
    if partitions == 1:
        return [[LogSlice(batch, 0, count, 0, 1) for batch, count in enumerate(rows, first_batch)]]
    counts = np.asarray(rows, np.int64)
    ends = np.cumsum(counts)
    cuts = _cuts(counts, ends, _work(counts, sizes), partitions)
    # A batch belongs to all partitions that its rows reach into. One without rows belongs to where
    # the batch before it ends, so that every partition has neighbouring batches.
    first_owner = np.searchsorted(cuts, ends - counts, side="right")
    last_owner = np.searchsorted(cuts, ends, side="left")
    first_owner = np.where(counts > 0, first_owner, last_owner)
    bounds = [0, *cuts.tolist(), int(ends[-1])]
    planned: list[list[LogSlice]] = [[] for _ in range(len(cuts) + 1)]
    spans = zip(first_owner.tolist(), last_owner.tolist(), ends.tolist(), rows, strict=True)
    for batch, (first, last, end, count) in enumerate(spans, start=first_batch):
        begin = end - count
        for owner in range(first, last + 1):
            start, stop = max(bounds[owner], begin), min(bounds[owner + 1], end)
            piece = LogSlice(batch, start - begin, stop - begin, owner - first, last - first + 1)
            planned[owner].append(piece)
    return planned


def partitions_for(rows: Sequence[int], sizes: Sequence[int], most: int) -> int:
    """How many partitions a range is worth, at most ``most``."""
    if most == 1:
        return 1
    return max(1, min(most, int(_work(np.asarray(rows, np.int64), sizes).sum())))


def _work(counts: NDArray[np.int64], sizes: Sequence[int] | None) -> NDArray[np.float64]:
    """What each batch costs, in partitions; one without rows costs nothing."""
    by_rows = counts / ROWS_PER_PARTITION
    if sizes is None:
        return by_rows
    return np.where(counts > 0, np.maximum(by_rows, np.asarray(sizes) / BYTES_PER_PARTITION), 0.0)


def _cuts(
    counts: NDArray[np.int64],
    ends: NDArray[np.int64],
    work: NDArray[np.float64],
    partitions: int,
) -> NDArray[np.int64]:
    """The rows, counted through the whole range, before which one partition ends."""
    done = np.cumsum(work)
    marks = done[-1] * np.arange(1, partitions) / partitions
    batch = np.minimum(np.searchsorted(done, marks), len(counts) - 1)
    left = np.divide(done[batch] - marks, work[batch], where=work[batch] > 0, out=0 * marks)
    cuts: NDArray[np.int64] = np.unique(
        ends[batch] - np.rint(left * counts[batch]).astype(np.int64)
    )
    return np.extract((cuts > 0) & (cuts < ends[-1]), cuts)
