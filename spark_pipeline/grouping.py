"""Groups of changes, the unit of order: which part of a share each belongs to. Pure.

A group is a row of a table, by its key. What must always hold: every process gives a group the same
part, whatever else is in the batch, so that a group's changes stay with one task, in order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.config import Sink
from cdc.decoding.columns import offsets_of
from cdc.decoding.joins import joined

_ODD = np.uint64(0x9E3779B97F4A7C15)
_BY_ROW = frozenset(("insert", "update", "delete"))


def splits_by_group(consumer: Sink) -> bool:
    """Whether several tasks may deliver to it at once.

    Its destination must ask for no more than order within a group, and all that it takes must be
    of a row: a truncate, for one, has its place among the changes of many groups.
    """
    return consumer.destination.ordering == "group" and _BY_ROW.issuperset(consumer.actions)


def in_part(changes: pa.RecordBatch, part: int, parts: int) -> pa.BooleanArray:
    """For each row whether its group belongs to ``part`` of ``parts``."""
    return pa.array(group_hashes(changes) % np.uint64(parts) == part)


def group_hashes(changes: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """A number for each row that all rows of its group share."""
    keys = joined(
        changes.column("table_schema"),
        "\n",
        changes.column("table_name"),
        "\n",
        changes.column("record_pks"),
    )
    offsets = offsets_of(keys).astype(np.int64)
    if len(offsets) < 2:
        return np.empty(0, dtype=np.uint64)
    bounds, text = offsets - offsets[0], np.frombuffer(keys.buffers()[2], dtype=np.uint8)
    text = text[offsets[0] : offsets[-1]]
    lengths = np.diff(bounds)
    # A polynomial over the bytes of each key, all keys at once; no key is empty.
    places = np.arange(len(text)) - np.repeat(bounds[:-1], lengths)
    weights = np.cumprod(np.full(int(lengths.max()), _ODD, dtype=np.uint64))
    sums = np.add.reduceat(text.astype(np.uint64) * weights[places], bounds[:-1])
    # The low bits of such a sum are weak; the high ones decide.
    return (sums * _ODD) >> np.uint64(32)
