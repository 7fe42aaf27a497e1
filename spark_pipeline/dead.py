"""Finding the dead letters of a consumer's share: changes that could not be decoded.

Delivery leaves them out; here the driver looks for them again, only in slices that have any, and
takes the messages they came as from the log, a frame at a time. What must always hold: only what
lies between the consumer's old cursor and its new one is dead, so a change that a failing sink
keeps the consumer from reaching is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.log.frame import Frame
from cdc.log.view import LogReader
from cdc.state.dead_letters import DeadLetter
from sinks.columns import prefix_below
from spark_pipeline.delivery import Share, mine
from spark_pipeline.exchange import SliceMarker, pick_up

_PLACE = "place"  # of a row in its frame


ChangesOf = Callable[[SliceMarker, int], Iterator[pa.RecordBatch]]
"""The decoded changes of a slice, whose first row is this one of its batch."""


def left_in_exchange(piece: SliceMarker, _start: int) -> Iterator[pa.RecordBatch]:
    return pick_up([piece])


def dead_letters(
    share: Share, reached: Cursor, log: LogReader, changes_of: ChangesOf = left_in_exchange
) -> Iterator[DeadLetter]:
    """The changes of ``share`` below ``reached`` that nothing can be made of, in order."""
    for batch_idx, batch in groupby(share.slices, key=lambda piece: piece.batch_idx):
        slices = list(batch)
        if not any(piece.errors for piece in slices):
            continue
        for frame in log.frames(batch_idx, batch_idx + 1):
            yield from _of_batch(share, slices, reached, frame, changes_of)


def _of_batch(
    share: Share,
    slices: list[SliceMarker],
    reached: Cursor,
    frame: Frame,
    changes_of: ChangesOf,
) -> Iterator[DeadLetter]:
    start = 0
    for piece in slices:
        if piece.errors:
            for changes in changes_of(piece, start):
                yield from _letters(_dead(share, changes, start, reached), frame)
        start += piece.rows


def _dead(share: Share, changes: pa.RecordBatch, start: int, reached: Cursor) -> pa.RecordBatch:
    """The rows of ``changes`` that are dead now, with their place in the frame."""
    below = prefix_below(changes, reached)
    placed = changes.append_column(_PLACE, pa.array(np.arange(start, start + changes.num_rows)))
    failed = placed.slice(0, below)
    return mine(share, failed.filter(failed.column("error").is_valid()))


def _letters(dead: pa.RecordBatch, frame: Frame) -> Iterator[DeadLetter]:
    raw = frame.raw.select(["schema_id", "payload"]).take(dead.column(_PLACE))
    for change, schema_id, payload in zip(
        dead.to_pylist(), raw.column("schema_id").to_pylist(), raw.column("payload"), strict=True
    ):
        yield DeadLetter(
            cursor=Cursor(change["commit_lsn"], change["commit_idx"]),
            committed_at=change["commit_timestamp"],
            table_schema=change["table_schema"],
            table_name=change["table_name"],
            action=change["action"],
            kind="decode",
            error=change["error"],
            payload=payload.as_py(),
            schema=frame.schemas.get(schema_id),
        )
