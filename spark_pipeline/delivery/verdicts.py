"""What expressions said of changes, and how it is laid over a consumer's messages. Pure.

Invariant: every insert, update and delete that a consumer takes has a verdict before it
goes out; one without is an error of ours and stops the consumer, for it might be one that its
filter keeps back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.change import READ
from cdc.config import SinkConfig
from cdc.cursor_columns import cursor_at, in_cursor_order
from cdc.errors import ProtocolError
from spark_pipeline.slices.exchange import leave

VERDICT_SCHEMA: Final = pa.schema(
    [
        pa.field("commit_lsn", pa.int64(), nullable=False),
        pa.field("commit_idx", pa.int64(), nullable=False),
        pa.field("keep", pa.bool_(), nullable=False),
        # The JSON of the message; null without a transform, and where the row is not kept.
        pa.field("message", pa.string()),
        # Where it goes; null for the sink's own place.
        pa.field("route", pa.string()),
        # Why an expression gave no answer; null for all others.
        pa.field("error", pa.string()),
    ]
)
"""One row for each insert, update and delete, in cursor order."""

_CURSOR = ("commit_lsn", "commit_idx")

JUDGED: Final = ("insert", "update", "delete", READ)
"""The actions that expressions see."""


def sorted_verdicts(verdicts: pa.Table) -> pa.RecordBatch:
    """The verdicts as one batch, sorted by cursor."""
    whole = verdicts.combine_chunks()
    batch = (
        pa.RecordBatch.from_arrays(
            [column.combine_chunks() for column in whole.columns], schema=VERDICT_SCHEMA
        )
        if whole.num_rows
        else empty()
    )
    return in_cursor_order(batch)


def leave_verdicts(directory: Path, verdicts: pa.RecordBatch) -> tuple[str, int]:
    """Leave them in an exchange for a share; returns their path and how many are errors."""
    path = leave(directory, iter([verdicts]), VERDICT_SCHEMA)
    return str(path), verdicts.num_rows - verdicts.column("error").null_count


def empty() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=VERDICT_SCHEMA)


def added_columns(consumer: SinkConfig) -> tuple[str, ...]:
    """What the messages of a consumer have beside their own columns."""
    said = consumer.expressions
    keys = (("transform", "message"), ("routing", "route"))
    return tuple(column for key, column in keys if key in said)


def judged(
    messages: pa.RecordBatch, verdicts: pa.RecordBatch, consumer: SinkConfig
) -> pa.RecordBatch:
    """The messages that pass, with what a transform or a routing says of them behind their columns.

    ``verdicts`` are in cursor order and may be of more rows than the messages.
    """
    at, missing = _places(messages, verdicts)
    if missing.any():
        first = int(np.argmax(missing))
        raise ProtocolError(
            f"the change at {cursor_at(messages, first)} came to a sink without a verdict of its "
            "consumer's expressions",
            fix="it is tried again; if it stays, report it with this text",
        )
    said = verdicts.take(pa.array(at, pa.int64(), mask=at < 0))
    passes = pc.and_(pc.fill_null(said.column("keep"), True), said.column("error").is_null())
    for name in added_columns(consumer):
        messages = messages.append_column(name, said.column(name))
    return messages if passes.true_count == len(passes) else messages.filter(passes)


def _places(
    messages: pa.RecordBatch, verdicts: pa.RecordBatch
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each message's verdict stands, -1 if it has none; and which ought to have one."""
    lsn, idx = (verdicts.column(name).to_numpy() for name in _CURSOR)
    asked_lsn, asked_idx = (messages.column(name).to_numpy() for name in _CURSOR)
    at = np.full(len(asked_lsn), -1, np.int64)
    if len(lsn):
        # A cursor as one number: transactions are counted, so that two 64-bit numbers fit.
        transactions = np.unique(lsn)
        width = int(max(idx.max(), asked_idx.max(initial=0))) + 1
        known = np.searchsorted(transactions, lsn) * width + idx
        which = np.minimum(np.searchsorted(transactions, asked_lsn), len(transactions) - 1)
        asked = which * width + asked_idx
        place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        at = np.where((transactions[which] == asked_lsn) & (known[place] == asked), place, -1)
    needs = pc.is_in(messages.column("action"), pa.array(JUDGED)).to_numpy(zero_copy_only=False)
    return np.where(needs, at, -1), needs & (at < 0)
