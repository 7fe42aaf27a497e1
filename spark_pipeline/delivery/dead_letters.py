"""Finding the dead letters of a consumer's share: what could not be decoded, judged or delivered.

Delivery leaves them out; here the driver looks for them again, only in slices that have any, and
takes the messages they came as from the log, a frame at a time. Invariant: only what
lies between the consumer's old cursor and its new one is dead, so a change that a failing sink
keeps the consumer from reaching is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Protocol

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.cursor_columns import prefix_below
from cdc.decoding.groups import ACTIONS
from cdc.decoding.relation import parse_relation
from cdc.log.frame import Frame
from cdc.state.dead_letters import DeadLetter, Kind
from spark_pipeline.delivery.deliver import Share, mine, verdicts_of
from spark_pipeline.delivery.outcome import Poison
from spark_pipeline.slices.exchange import SliceMarker, pick_up

_EPOCH = datetime.fromtimestamp(0, UTC)
_PLACE = "place"  # of a row in its frame


class FrameSource(Protocol):
    """Where the messages of changes are: a log, or a piece of a backfill."""

    def seek(self, cursor: Cursor, /) -> int: ...

    def frames(self, start: int, end: int, /) -> Iterator[Frame]: ...


ChangesOf = Callable[[Sequence[SliceMarker]], Iterator[pa.RecordBatch]]
"""What was decoded of some slices."""


def dead_letters(
    share: Share, reached: Cursor, log: FrameSource, changes_of: ChangesOf = pick_up
) -> Iterator[DeadLetter]:
    """The changes of ``share`` below ``reached`` that nothing can be made of.

    Those that could not be decoded come first: what no expression could see either is one of them.
    """
    yield from _undecoded(share, reached, log, changes_of)
    if share.failed:
        yield from _unjudged(share, reached, log)


def _undecoded(
    share: Share, reached: Cursor, log: FrameSource, changes_of: ChangesOf
) -> Iterator[DeadLetter]:
    for batch_idx, batch in groupby(share.slices, key=lambda piece: piece.batch_idx):
        slices = list(batch)
        if not any(piece.errors for piece in slices):
            continue
        for frame in log.frames(batch_idx, batch_idx + 1):
            yield from _of_batch(share, slices, reached, frame, changes_of)


def _unjudged(share: Share, reached: Cursor, log: FrameSource) -> Iterator[DeadLetter]:
    """The changes on which the consumer's expressions failed, batch by batch."""
    verdicts = verdicts_of(share)
    assert verdicts is not None  # they were counted
    below = verdicts.slice(0, prefix_below(verdicts, reached))
    below = below.slice(prefix_below(below, share.start))
    errors = below.filter(below.column("error").is_valid())
    for batch_idx, batch in groupby(share.slices, key=lambda piece: piece.batch_idx):
        within = prefix_below(errors, list(batch)[-1].high)
        if within:
            for frame in log.frames(batch_idx, batch_idx + 1):
                for row in errors.slice(0, within).to_pylist():
                    at = Cursor(row["commit_lsn"], row["commit_idx"])
                    yield _letter(Poison(at, row["error"]), frame, "expression")
        errors = errors.slice(within)


def poisoned(
    poisons: Iterable[Poison], log: FrameSource, kind: Kind = "delivery"
) -> Iterator[DeadLetter]:
    """These changes as dead letters; most often those on which delivery broke."""
    for batch_idx, batch in groupby(poisons, key=lambda poison: log.seek(poison.cursor)):
        for frame in log.frames(batch_idx, batch_idx + 1):
            yield from (_letter(poison, frame, kind) for poison in batch)


def _letter(poison: Poison, frame: Frame, kind: Kind) -> DeadLetter:
    lsn, idx = (frame.raw.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
    (places,) = np.nonzero((lsn == poison.cursor.lsn) & (idx == poison.cursor.idx))
    row = frame.raw.slice(int(places[0]), 1).to_pylist()[0]
    schema = frame.schemas.get(row["schema_id"])
    relation = parse_relation(schema) if schema is not None else None
    return DeadLetter(
        cursor=poison.cursor,
        committed_at=_EPOCH + timedelta(microseconds=row["commit_ts"]),
        table_schema=relation.namespace if relation else "",
        table_name=relation.name if relation else "",
        action=ACTIONS[chr(row["kind"])],
        kind=kind,
        error=poison.error,
        payload=row["payload"],
        schema=schema,
    )


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
            for changes in changes_of([piece]):
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
