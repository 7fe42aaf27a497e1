"""Which rows a chunk holds: a range of blocks of a heap, or of the values of a column. Pure.

A range of blocks is read by ctid, whatever the key is, and costs what its blocks cost. A range of
values serves where blocks do not: the table is no heap, or an operator asked for an order.

Invariant: the ranges of a plan follow each other without a gap, and the last one has no end. So a
table that grows while it is read is read to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

CHUNKS_MAX = 100_000
"""Of one table. A table that would need more gets larger ones."""


@dataclass(frozen=True)
class BlockRange:
    """The blocks ``[first, end)``; without ``end`` all from ``first`` on."""

    first: int
    end: int | None


@dataclass(frozen=True)
class ValueRange:
    """The rows above ``after`` up to and including ``until``, as the column's own text.

    Without ``after`` from the first row on, nulls included; without ``until`` to the last one.
    """

    after: str | None
    until: str | None


@dataclass(frozen=True)
class GoneRows:
    """The rows that the destination has and the table has not."""


class ReloadStep(StrEnum):
    """A mark of a reload, which stands among the changes where a chunk of rows would."""

    BEGIN = "begin"  # a shadow of the table is made, which gets all that follows
    SWAP = "swap"  # the table becomes what its shadow is
    DROP = "drop"  # the shadow goes: the reload was cancelled


RowRange = BlockRange | ValueRange
"""Rows of a leaf."""

Range = RowRange | GoneRows | ReloadStep
"""What a chunk is made of."""


def block_ranges(
    blocks: int, block_bytes: int, chunk_bytes: int, small: int = 0
) -> Iterator[BlockRange]:
    """Ranges of about ``chunk_bytes`` each over a heap of so many blocks, at least one.

    The first ``small`` of them have a quarter of that, so that there is soon something to deliver.
    What is less than a quarter at the end belongs to the range before it.
    """
    per_chunk = max(1, chunk_bytes // block_bytes, -(-blocks // (CHUNKS_MAX - small)))
    first, quarter = 0, per_chunk // 4
    while True:
        end = first + (max(1, quarter) if small > 0 else per_chunk)
        small -= 1
        if end + quarter > blocks or end >= blocks:
            yield BlockRange(first, None)
            return
        yield BlockRange(first, end)
        first = end
