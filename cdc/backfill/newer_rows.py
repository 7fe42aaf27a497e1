"""Which rows of a table transactions from some number on have written. Pure.

A row says in ``xmin`` who wrote it, in the lower 32 bits of the number. Freezing does not change
that: it sets a flag beside it. So of two numbers less than a round (2^32) apart the row tells which
is which, whatever was frozen since. An older row whose 32 bits happen to lie in between is read
without need, which does no harm.

Invariant: no row that a transaction from the number on has written is left out. Where a round has
gone by, the condition is true for every row.
"""

from __future__ import annotations

from typing import Final

_ROUND: Final = 1 << 32

XIDS_MAX: Final = 1 << 31
"""Beyond so many transactions a whole table is read: a round may go by while it is."""


def written_since(xid: int) -> str:
    """The SQL condition of rows that the transaction with this number of 64 bits, or a later one,
    has written; the snapshot of the statement bounds it above."""
    behind = f"mod(xmin::text::int8 - {xid % _ROUND} + {_ROUND}, {_ROUND})"
    return f"{behind} < pg_snapshot_xmax(pg_current_snapshot())::text::int8 - {xid}"
