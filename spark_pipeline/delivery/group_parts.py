"""How a consumer's changes are spread over deliveries that run at once. Pure.

Invariants: the changes of one group are in one part, in order; a change that is ordered against its
whole table is in no part: everything before it is delivered first, then it, then what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.queue.groups import BY_KEY, Grouping, groups_of


class GroupRun(NamedTuple):
    """Neighbours; ``in_order``: they are to be delivered one after another, with nothing beside."""

    rows: pa.RecordBatch
    groups: pa.Int64Array  # of each row; null: it is for itself
    in_order: bool


def runs_between_barriers(rows: pa.RecordBatch, grouping: Grouping = BY_KEY) -> Iterator[GroupRun]:
    """Cut a batch, in order, where changes that are ordered against their whole table stand."""
    groups = groups_of(rows, grouping)
    barriers = groups.whole_table.to_numpy(zero_copy_only=False)
    cuts = np.flatnonzero(np.diff(barriers)) + 1
    bounds = [0, *cuts.tolist(), rows.num_rows] if rows.num_rows else []
    for start, end in pairwise(bounds):
        count = end - start
        ids = groups.ids.slice(start, count)
        yield GroupRun(rows.slice(start, count), ids, bool(barriers[start]))


def spread(run: GroupRun, parts: int) -> list[pa.RecordBatch]:
    """At most so many parts of about the same number of groups, none empty, each in order."""
    taken = _part_of_each(run.groups, parts)
    found = (run.rows.filter(pa.array(taken == part)) for part in range(parts))
    return [part for part in found if part.num_rows]


def _part_of_each(groups: pa.Int64Array, parts: int) -> npt.NDArray[np.int64]:
    """Groups take turns in the order of their numbers, which is as good as random.

    In the order of their rows one part could get all of one table: what is refused would then
    seem to be all that there is. Rows without a group take turns in a random order.
    """
    _, group = np.unique(
        pc.fill_null(groups, 0).to_numpy(zero_copy_only=False), return_inverse=True
    )
    if not groups.null_count:
        return group % parts
    turns = np.random.default_rng(0).permutation(len(groups))
    return np.where(groups.is_null().to_numpy(zero_copy_only=False), turns, group) % parts
