"""Cutting a range of batches into slices of about equal size, one list of slices a partition. Pure.

A batch may be cut; each of its slices says which part of how many it is, so that the reorder step
knows when a batch is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """Rows ``[start, stop)`` of a batch: part ``part`` of ``parts``."""

    batch_idx: int
    start: int
    stop: int
    part: int
    parts: int


def cut(first_batch: int, rows: Sequence[int], partitions: int) -> list[list[Slice]]:
    """Cut batches of ``rows`` rows each, numbered from ``first_batch``, for ``partitions``."""
    target = max(1, -(-sum(rows) // max(1, partitions)))
    planned: list[list[Slice]] = [[]]
    room = target
    for offset, count in enumerate(rows):
        bounds = [0]
        owners = []
        while True:
            if room == 0 and count:
                planned.append([])
                room = target
            taken = min(room, count - bounds[-1])
            bounds.append(bounds[-1] + taken)
            owners.append(len(planned) - 1)
            room -= taken
            if bounds[-1] == count:
                break
        for part, owner in enumerate(owners):
            planned[owner].append(
                Slice(first_batch + offset, bounds[part], bounds[part + 1], part, len(owners))
            )
    return planned
