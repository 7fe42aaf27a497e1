"""The numbers of a transaction's changes, with a free one wherever a schema change may be needed.

A schema change stands directly before the first row of the version that it tells of. Which version
a table had before is known only from memory, and the catalog, which is asked about the
new one, may answer otherwise the next time. So the numbers of rows must not depend on either.

The rule: a row *opens* its table if it is the first row of the table in its transaction, or if the
source has described the table otherwise since the table's last row in the transaction. A schema
change is only ever written directly before a row that opens its table. Before each such row one
number is left free, except before the first change of the transaction, which has
``(commit_lsn - 1, 1)`` before it. Everything else is numbered in order, from 0.

Why a replay gives the same cursors: a transaction is always sent from its beginning, and which rows
open their tables follows from its own rows and from what the source says of their tables. The
source says that as of the row, by the catalog that its WAL had built up to there. So the
connection, the batches, and whether the transaction comes whole or in pieces make no difference. A
description that is only sent again opens nothing, because descriptions are compared by their bytes,
without what the catalog adds to them.

Why cursors rise in the order of the log: the free number lies between the number of the row and
that of the change before it. The LSN below a commit is above every earlier commit, and an idle
source stops there with number 0 (``cdc.cursor.idle_place``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cdc.replication.wire.relations import by_value
from cdc.replication.wire.wire import Ints, Mask


@dataclass
class OpenTransaction:
    """The transaction that the last batch ended in, or the one it ended with."""

    lsn: int = 0
    commit_ts: int = 0
    xid: int = 0
    next_idx: int = 0  # counts changes alone
    left_free: int = 0  # numbers that were left free between them
    in_progress: bool = False


@dataclass
class Openings:
    """Which rows open their table; remembers the last row of each table, across batches."""

    last: dict[int, tuple[int, int]] = field(default_factory=dict)  # transaction, description

    def among(self, relation: int, described: int, lsn: Ints) -> Mask:
        """For rows of one table under one description, in order; ``lsn`` are their commits."""
        opens = np.empty(len(lsn), dtype=bool)
        opens[0] = self.last.get(relation) != (int(lsn[0]), described)
        np.not_equal(lsn[1:], lsn[:-1], out=opens[1:])
        self.last[relation] = (int(lsn[-1]), described)
        return opens

    def within(self, lsn: int, relation: Ints, described: npt.NDArray[np.uint64]) -> Mask:
        """For rows of one transaction, in order, each with the hash of its table's description."""
        opens = np.zeros(len(relation), dtype=bool)
        for rows in by_value(relation):
            oid = int(relation[rows[0]])
            if oid == 0:
                continue
            said = described[rows]
            for part in np.split(rows, np.flatnonzero(said[1:] != said[:-1]) + 1):
                opens[part] = self.among(oid, int(described[part[0]]), np.full(len(part), lsn))
        return opens


def needs_place(opens: Mask, number: Ints) -> Mask:
    """Before which rows a number is left free; ``number`` counts the changes alone."""
    found: Mask = opens & (number > 0)
    return found
