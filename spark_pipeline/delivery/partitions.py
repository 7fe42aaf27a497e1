"""Delivering one consumer's changes side by side: groups are spread over concurrent deliveries.

The changes of each batch are cut at those that are ordered against their whole table; between two
cuts they are spread over up to ``partition_count`` parts, each with a thread and a sink of its own.
Invariants: the next run of changes begins only when every part of the last one has come to its end;
what is settled is what all parts have settled. A part that fails stops the others within a bounded
number of messages; what they delivered beyond it comes again, and the ledger absorbs it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.queue.groups import Grouping
from spark_pipeline.delivery.group_parts import Run, runs_between_barriers, spread
from spark_pipeline.delivery.outcome import GOES_ON, Outcome, combined, is_below
from spark_pipeline.delivery.sender import (
    ASIDE_BYTES_MAX,
    ASIDE_ROWS_MAX,
    REFUSES_ALL,
    Sender,
    Strikes,
)

if TYPE_CHECKING:
    from spark_pipeline.delivery.deliver import Share

_TAKEN_AT_ONCE = 1_000
"""Messages of a part, or one request, after which it looks whether another part has failed."""


class OpenDesk(Protocol):
    """Where a share is delivered; each purpose has a sink of its own."""

    def __call__(
        self, share: Share, purpose: str = "", *, strikes: Strikes | None = None
    ) -> Sender: ...


def deliver_in_parts(
    share: Share, batches: Iterable[pa.RecordBatch], open_desk: OpenDesk
) -> Outcome:
    """Deliver batches of changes, in cursor order but for that of different groups."""
    grouping = Grouping.of(share.consumer)
    done = Outcome(share.consumer.name, share.start, strikes=share.strikes)
    for rows in batches:
        for run in runs_between_barriers(rows, grouping):
            rest = replace(share.behind(done), start=done.cursor)
            done = _deliver_run(rest, run, open_desk).after(done)
            if done.error is not None:
                return done
            if _is_full(done.aside):
                more = TransientError("many messages wait; what follows comes next", kind=GOES_ON)
                return replace(done, error=more)
    return replace(done, cursor=max(done.cursor, share.end))


def _deliver_run(share: Share, run: Run, open_desk: OpenDesk) -> Outcome:
    """One run of changes, in as many parts as it has requests for."""
    consumer = share.consumer
    requests = -(-run.rows.num_rows // consumer.effective_batch_size)
    count = min(consumer.effective_partition_count, requests)
    parts = [run.rows] if run.in_order or count < 2 else spread(run, count)
    if len(parts) == 1:
        return _in_order(share, run.rows, open_desk)
    strikes = Strikes(share.strikes)
    # The first part goes over the connection that changes in order go over.
    desks = [
        open_desk(share, f"part {at}" if at else "", strikes=strikes) for at in range(len(parts))
    ]
    end = _behind_last(run.rows)
    outcomes = _side_by_side(desks, parts, end, consumer.effective_batch_size)
    done = replace(combined(outcomes), strikes=strikes.count)
    if not _is_unfair(done):
        return done
    done = replace(done, error=None, strikes=0)
    rest = run.rows.filter(pa.array(~is_below(run.rows, done.cursor)))
    return _in_order(replace(share.behind(done), start=done.cursor), rest, open_desk).after(done)


def _in_order(share: Share, rows: pa.RecordBatch, open_desk: OpenDesk) -> Outcome:
    desk = open_desk(share, strikes=Strikes(share.strikes))
    return desk.finish(_behind_last(rows)) if desk.take(rows) else desk.outcome


def _is_unfair(done: Outcome) -> bool:
    """Whether one part was refused all while others were accepted: that is not the destination's
    fault, and refusals in a row mean something again if the changes go out in order."""
    refused = done.error is not None and done.error.kind == REFUSES_ALL
    return refused and bool(done.delivered or done.absorbed)


def _side_by_side(
    desks: Sequence[Sender], parts: Sequence[pa.RecordBatch], end: Cursor, batch_size: int
) -> list[Outcome]:
    """Each part in a thread of its own; returns, or raises, when all have come to their end."""
    failed = threading.Event()
    at_once = max(batch_size, _TAKEN_AT_ONCE)

    def deliver(desk: Sender, rows: pa.RecordBatch) -> Outcome:
        try:
            for start in range(0, rows.num_rows, at_once):
                if failed.is_set():
                    return replace(desk.outcome, error=TransientError(_STOPPED, kind=GOES_ON))
                if not desk.take(rows.slice(start, at_once)):
                    failed.set()
                    return desk.outcome
            return desk.finish(end)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(len(parts), thread_name_prefix="part") as pool:
        running = [
            pool.submit(deliver, desk, rows) for desk, rows in zip(desks, parts, strict=True)
        ]
    return [each.result() for each in running]


_STOPPED = "another part of the delivery has failed; what follows comes next"


def _is_full(aside: pa.RecordBatch | None) -> bool:
    """Whether enough is put aside: it is kept in memory until it is settled."""
    if aside is None:
        return False
    return bool(aside.num_rows >= ASIDE_ROWS_MAX or aside.nbytes >= ASIDE_BYTES_MAX)


def _behind_last(rows: pa.RecordBatch) -> Cursor:
    last = rows.num_rows - 1
    return Cursor(
        rows.column("commit_lsn")[last].as_py(), rows.column("commit_idx")[last].as_py() + 1
    )
