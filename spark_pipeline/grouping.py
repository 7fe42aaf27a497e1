"""Which part of a share each group of changes belongs to, where several tasks share the work. Pure.

What must always hold: every process gives a group the same part, whatever else is in the batch, so
that a group's changes stay with one task, in order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.config import Sink
from cdc.queue.groups import BY_KEY, Grouping, group_ids

_BY_ROW = frozenset(("insert", "update", "delete"))


def splits_by_group(consumer: Sink) -> bool:
    """Whether several tasks may deliver to it at once.

    Its destination must ask for no more than order within a group, and all that it takes must be
    of a row: a truncate, for one, has its place among the changes of many groups. So has a change
    whose group cannot be told, as with groups by other columns than the key: a delete may not say.
    """
    by_group = consumer.destination.ordering == "group" and not consumer.tables
    return by_group and _BY_ROW.issuperset(consumer.actions)


def in_part(
    changes: pa.RecordBatch, part: int, parts: int, grouping: Grouping = BY_KEY
) -> pa.BooleanArray:
    """For each row whether its group belongs to ``part`` of ``parts``."""
    return pa.array(group_hashes(changes, grouping) % np.uint64(parts) == part)


def group_hashes(changes: pa.RecordBatch, grouping: Grouping = BY_KEY) -> npt.NDArray[np.uint64]:
    """A number for each row that all rows of its group share; those without one are spread."""
    if not grouping.by_group:
        lsn, idx = (changes.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
        spread: npt.NDArray[np.int64] = lsn // 8 + idx
        return spread.view(np.uint64)
    ids: npt.NDArray[np.int64] = group_ids(changes, grouping).to_numpy()
    return ids.view(np.uint64)
