"""Which messages must wait for which: the groups and tables that a consumer's queue blocks. Pure.

The rule, here for fresh messages: a message waits for every earlier one of its group; a message of
the whole table (a truncate, say) waits for every earlier one of the table, and every later one of
the table waits for it. SQL has the same rule for messages in a queue: ``walbrook.is_head`` of the
retry queue says it for one row, ``promote`` beside it and ``_CLAIM`` of ``cdc.queue.claims`` use it
for sets of rows; for pull consumers ``hold_back`` in ``pull_claim_steps.sql``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.joins import joined

GROUP, WHOLE_TABLE = "group_id", "whole_table"
"""The columns that say of each row which group it is of, and whether its place is in the table."""

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BlockedGroups:
    """The groups and tables of which something waits; tables as ``schema.table``."""

    groups: Ids = field(default_factory=lambda: np.empty(0, np.int64))  # sorted, each once
    tables: frozenset[str] = frozenset()
    blocked_tables: frozenset[str] = frozenset()  # of these all that follows
    count: int = 0

    def __bool__(self) -> bool:
        return bool(self.count)

    def holds(self, rows: pa.RecordBatch) -> Mask:
        """For each row, which has the columns GROUP and WHOLE_TABLE, whether it must wait."""
        groups = rows.column(GROUP)
        held = np.isin(pc.fill_null(groups, 0).to_numpy(zero_copy_only=False), self.groups)
        held &= groups.is_valid().to_numpy(zero_copy_only=False)
        tables = tables_of(rows)
        if self.blocked_tables:
            held |= _among(tables, self.blocked_tables)
        whole = rows.column(WHOLE_TABLE).to_numpy(zero_copy_only=False)
        for table in tables.filter(rows.column(WHOLE_TABLE)).unique().to_pylist():
            of_table = _among(tables, {table})
            # The first that has its place in the table and stands behind something that waits: from
            # there on the whole table waits.
            waits = np.flatnonzero(held & of_table)
            first = 0 if table in self.tables else int(waits[0]) if len(waits) else len(held)
            barriers = np.flatnonzero(whole[first:] & of_table[first:])
            if len(barriers):
                at = first + int(barriers[0])
                held[at:] |= of_table[at:]
        return held

    def with_these(self, rows: pa.RecordBatch) -> BlockedGroups:
        """As it is once these rows wait too."""
        if not rows.num_rows:
            return self
        added = rows.column(GROUP).drop_null().to_numpy()
        whole = rows.filter(rows.column(WHOLE_TABLE))
        return BlockedGroups(
            np.union1d(self.groups, added),
            self.tables | _each(rows),
            self.blocked_tables | _each(whole),
            self.count + rows.num_rows,
        )


NOTHING = BlockedGroups()
"""An empty queue."""


def tables_of(rows: pa.RecordBatch) -> pa.StringArray:
    return joined(rows.column("table_schema"), ".", rows.column("table_name"))


def _each(rows: pa.RecordBatch) -> frozenset[str]:
    return frozenset(tables_of(rows).unique().to_pylist())


def _among(tables: pa.StringArray, some: frozenset[str] | set[str]) -> Mask:
    return np.array(
        pc.is_in(tables, value_set=pa.array(sorted(some), pa.string())).to_numpy(
            zero_copy_only=False
        )
    )
