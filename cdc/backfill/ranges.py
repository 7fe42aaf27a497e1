"""Which rows a chunk holds: a range of blocks of a heap, or of the values of a column. Pure.

A range of blocks is read by ctid, whatever the key is, and costs what its blocks cost. A range of
values serves where blocks do not: the table is no heap, or an operator asked for an order.

Invariant: the ranges of a plan follow each other without a gap, and the last one has no end. So a
table that grows while it is read is read to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


RowRange = BlockRange | ValueRange
"""Rows of a leaf."""

Range = RowRange | GoneRows
"""What a chunk is made of."""


def block_ranges(blocks: int, block_bytes: int, chunk_bytes: int) -> Iterator[BlockRange]:
    """Ranges of about ``chunk_bytes`` each over a heap of so many blocks, at least one."""
    per_chunk = max(1, chunk_bytes // block_bytes, -(-blocks // CHUNKS_MAX))
    starts = range(0, max(blocks, 1), per_chunk)
    for first in starts:
        last = first + per_chunk >= blocks
        yield BlockRange(first, None if last else first + per_chunk)
