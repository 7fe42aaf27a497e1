"""Delivering one consumer's changes side by side: groups are spread over concurrent deliveries.

The changes of each batch are cut at those that are ordered against their whole table; between two
cuts they are spread over up to ``partition_count`` parts, which the sink sends side by side.
Invariants: the next run of changes begins only when every part of the last one has come to its end;
what is settled is what all parts have settled. Where the destination as a whole fails, the sink
ends every part; what was delivered beyond the first failure comes again, and the ledger absorbs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at
from cdc.queue.groups import Grouping
from sinks.base import Delivery, SideBySideSink
from spark_pipeline.delivery.group_parts import GroupRun, runs_between_barriers, spread
from spark_pipeline.delivery.outcome import Outcome, combined, is_below
from spark_pipeline.delivery.sender import (
    QUEUED_BYTES_MAX,
    QUEUED_ROWS_MAX,
    REFUSES_ALL,
    ConsecutiveRefusals,
    Sender,
)

if TYPE_CHECKING:
    from spark_pipeline.delivery.deliver import Share


class OpenSender(Protocol):
    """Where a share is delivered."""

    def __call__(self, share: Share, *, refusals: ConsecutiveRefusals) -> Sender: ...


def deliver_in_parts(
    share: Share, batches: Iterable[pa.RecordBatch], open_sender: OpenSender
) -> Outcome:
    """Deliver batches of changes, in cursor order but for that of different groups."""
    grouping = Grouping.of(share.consumer)
    done = Outcome(share.consumer.name, share.start, refusals=share.refusals)
    for rows in batches:
        for run in runs_between_barriers(rows, grouping):
            rest = replace(share.behind(done), start=done.cursor)
            done = _deliver_run(rest, run, open_sender).after(done)
            if not done.is_whole:
                return done
            if _is_full(done.queued):
                return replace(done, more=True)
    return replace(done, cursor=max(done.cursor, share.end))


def _deliver_run(share: Share, run: GroupRun, open_sender: OpenSender) -> Outcome:
    """One run of changes, in as many parts as it has requests for."""
    consumer = share.consumer
    requests = -(-run.rows.num_rows // consumer.effective_batch_size)
    count = min(consumer.effective_partition_count, requests)
    rows = [run.rows] if run.in_order or count < 2 else spread(run, count)
    if len(rows) == 1:
        return _in_order(share, run.rows, open_sender)
    refusals = ConsecutiveRefusals(share.refusals)
    end = _behind_last(run.rows)
    parts = [_PartDelivery(open_sender(share, refusals=refusals), each, end) for each in rows]
    _deliver_side_by_side(parts)
    done = replace(combined([part.outcome for part in parts]), refusals=refusals.count)
    if not _is_unfair(done):
        return done
    done = replace(done, error=None, refusals=0)
    rest = run.rows.filter(pa.array(~is_below(run.rows, done.cursor)))
    return _in_order(replace(share.behind(done), start=done.cursor), rest, open_sender).after(done)


def _in_order(share: Share, rows: pa.RecordBatch, open_sender: OpenSender) -> Outcome:
    sender = open_sender(share, refusals=ConsecutiveRefusals(share.refusals))
    return sender.finish(_behind_last(rows)) if sender.take(rows) else sender.outcome


def _is_unfair(done: Outcome) -> bool:
    """Whether one part was refused all while others were accepted: that is not the destination's
    fault, and refusals in a row mean something again if the changes go out in order."""
    refused = done.error is not None and done.error.kind == REFUSES_ALL
    return refused and bool(done.delivered or done.absorbed)


class _PartDelivery:
    """One part of a run: what is to be delivered of it next, and what it came to."""

    def __init__(self, sender: Sender, rows: pa.RecordBatch, end: Cursor) -> None:
        self.sink = sender.sink
        self._sender = sender
        self._steps = sender.steps(rows)
        self._end = end
        self.batch: MessageBatch | None = None
        self.stopped = False
        self._go_on(lambda: next(self._steps))

    def delivered(self, result: Delivery) -> None:
        """What became of the batch."""
        self._go_on(lambda: self._steps.send(result))

    @property
    def outcome(self) -> Outcome:
        """What it came to, or has come to if another part stopped it."""
        outcome = self._sender.outcome
        if self.batch is None:
            return outcome
        return replace(outcome, error=None, more=True)

    def _go_on(self, step: Callable[[], MessageBatch]) -> None:
        try:
            self.batch = step()
        except StopIteration as end:
            self.batch = None
            self.stopped = not end.value
            if end.value:
                self._sender.finish(self._end)


def _deliver_side_by_side(parts: Sequence[_PartDelivery]) -> None:
    """Round after round, until all parts have come to their end or one of them stops all.

    A part ends a round early where a message is refused.
    """
    sink = parts[0].sink
    assert isinstance(sink, SideBySideSink)
    while not any(part.stopped for part in parts):
        going = [(part, part.batch) for part in parts if part.batch is not None]
        if not going:
            return
        results = sink.deliver_parts([batch for _, batch in going])
        for (part, _), result in zip(going, results, strict=True):
            part.delivered(result)


def _is_full(queued: pa.RecordBatch | None) -> bool:
    """Whether enough is queued: it is kept in memory until it is settled."""
    if queued is None:
        return False
    return bool(queued.num_rows >= QUEUED_ROWS_MAX or queued.nbytes >= QUEUED_BYTES_MAX)


def _behind_last(rows: pa.RecordBatch) -> Cursor:
    last = cursor_at(rows, -1)
    return Cursor(last.lsn, last.idx + 1)
