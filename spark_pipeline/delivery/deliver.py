"""Delivering one consumer's share of a micro-batch, in the process that runs the task.

Sinks stay open between micro-batches: Spark reuses its Python workers, and each keeps the sinks it
has opened. A consumer's messages go out in cursor order, one batch after another; what the sender
does with those that are refused is its own affair. What was settled before a failure stays settled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROUTE, MessageBatch
from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at, prefix_below
from cdc.decoding.format import PLAIN, TEXTS, Wanted
from cdc.decoding.shapes import Context, RecordShape, RowTextShape, Shape, shape_for
from cdc.errors import ProtocolError, TransientError, WalbrookError
from cdc.generation import FIRST, Generation
from cdc.queue.groups import Grouping
from cdc.queue.ledger.base import Ledger
from cdc.queue.ledger.open import LedgerAddress, open_ledger
from cdc.state.blocked_groups import NOTHING, BlockedGroups
from sinks import ClaimPlace, FollowsRewinds, Queue, Sink, open_sink
from sinks.base import Delivery, Reloads, RequestSink
from sinks.ledgered import LedgeredSink, LedgerPlace
from sinks.pull import PullSink
from spark_pipeline.delivery.matching import Match
from spark_pipeline.delivery.merged_shape import MergedShape
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.delivery.partitions import deliver_in_parts
from spark_pipeline.delivery.sender import REFUSALS_MAX, ConsecutiveRefusals, Sender
from spark_pipeline.delivery.value_formats import (
    form_of,
    holds_tables,
    shows_schemas,
    takes_texts,
    view_of,
)
from spark_pipeline.delivery.verdicts import judged, sorted_verdicts
from spark_pipeline.slices.exchange import SliceMarker, pick_up, whole

_DELIVERY_ROWS = 10_000
_DELIVERY_BYTES = 32 << 20


@dataclass(frozen=True)
class Origin:
    """What a message says of the database it comes from."""

    name: str
    hostname: str
    database: str


@dataclass(frozen=True)
class Share:
    """What one task delivers: of the slices of a micro-batch, in order, what one consumer lacks."""

    consumer: SinkConfig
    origin: Origin
    run: str  # of the stage, as ``new_run`` makes it: sinks of an earlier one are not reused
    start: Cursor  # below it everything is settled for this consumer
    end: Cursor  # where the share ends, exclusive: most often the micro-batch's high watermark
    slices: list[SliceMarker]
    wanted: Wanted = PLAIN  # what decode was asked for when it made the slices
    match: Match | None = None  # of the consumer, if it was made already
    verdicts: str | None = None  # where those of the consumer's expressions lie, VERDICT_SCHEMA
    failed: int = 0  # how many of them say that an expression failed
    stop_reason: WalbrookError | None = (
        None  # why it ends where it does, if its consumer cannot go on
    )
    waiting: BlockedGroups = NOTHING  # what its consumer's queue held when the micro-batch began
    refusals: int = 0  # refusals in a row before it
    refusals_max: int = REFUSALS_MAX  # how many its destination is allowed
    ledger: LedgerPlace | None = None  # where what was delivered is noted, if its sink needs it
    state_dsn: str = field(default="", repr=False)  # where pull consumers' messages are stored
    settled_cursor: Cursor | None = None  # the consumer's cursor in Postgres when it was begun
    origins: tuple[Origin, ...] = ()  # of messages of several sources: by the number of the source
    generation: Generation = FIRST  # of the consumer's destination
    epoch: str = ""  # another one whenever the consumer's cursor was moved back
    reload: int | None = None  # the reload that its rows were read for, if they were for any

    def behind(self, done: Outcome) -> Share:
        """The share behind an earlier delivery, whose queued messages wait already."""
        if done.queued is None:
            return self if not done.delivered else replace(self, refusals=0)
        queued = done.queued.filter(pc.invert(done.queued.column("dead")))
        return replace(self, waiting=self.waiting.with_these(queued), refusals=done.refusals)


_open_sinks: dict[tuple[str, str, str], tuple[str, Generation, Sink]] = {}
"""By source, consumer and purpose; with the run that opened it, and the generation it is of."""
_open_ledgers: dict[tuple[str, LedgerAddress], Ledger] = {}
_ended: dict[tuple[str, str], int] = {}
"""By process and source: the last stage that has ended."""
_opening = threading.Lock()


def deliver(share: Share) -> Outcome:
    """Send a consumer everything of its share that it does not have yet."""
    return deliver_changes(share, pick_up(share.slices))


def deliver_changes(share: Share, changes: Iterable[pa.RecordBatch]) -> Outcome:
    """The same of changes from anywhere: as decode wrote them, in cursor order."""
    if share.consumer.effective_partition_count > 1:
        return deliver_in_parts(share, _batches(share, changes), sender_for)
    sender = sender_for(share)
    for rows in _batches(share, changes):
        if not sender.take(rows):
            return sender.outcome
    return sender.finish(share.end)


def sender_for(
    share: Share,
    purpose: str = "",
    around: Callable[[Sink], Sink] | None = None,
    refusals: ConsecutiveRefusals | None = None,
) -> Sender:
    """Where a share is delivered; each purpose has a sink of its own."""
    sink = sink_of(share, purpose)
    return Sender(
        share.consumer,
        sink if around is None else around(sink),
        partial(_shaped, share),
        share.start,
        share.waiting,
        refusals=share.refusals if refusals is None else refusals,
        refusals_max=share.refusals_max,
    )


def send(share: Share, changes: pa.RecordBatch) -> Delivery:
    """Send a consumer these changes, whatever it asks for."""
    return sink_of(share).deliver(_shaped(share, changes))


def _batches(share: Share, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The consumer's changes in order, in batches of a size worth sending."""
    rows_max, bytes_max = _bounds(share.consumer)
    pending: list[pa.RecordBatch] = []
    for messages in in_order(share, changes):
        for start in range(0, messages.num_rows, rows_max):
            piece = messages.slice(start, rows_max)
            if pending and not _fit([*pending, piece], rows_max, bytes_max):
                yield pa.concat_batches(pending) if len(pending) > 1 else pending[0]
                pending = []
            pending.append(piece)
    if pending:
        yield pa.concat_batches(pending) if len(pending) > 1 else pending[0]


def _bounds(consumer: SinkConfig) -> tuple[int, int]:
    """Most rows and bytes of a batch; to a sink that holds tables each batch is a commit."""
    if not holds_tables(consumer):
        return _DELIVERY_ROWS, _DELIVERY_BYTES
    return consumer.destination.delivery_rows, consumer.destination.delivery_bytes


def _fit(together: Sequence[pa.RecordBatch], rows_max: int, bytes_max: int) -> bool:
    if sum(int(each.num_rows) for each in together) > rows_max:
        return False
    return sum(int(each.nbytes) for each in together) <= bytes_max


def in_order(share: Share, decoded: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The consumer's changes, as its expressions have judged them, in cursor order."""
    verdicts = verdicts_of(share)
    for changes in decoded:
        messages = _decoded(mine(share, view_of(changes, share.wanted, share.consumer)))
        if verdicts is not None:
            messages = judged(messages, verdicts, share.consumer)
        yield messages


def verdicts_of(share: Share) -> pa.RecordBatch | None:
    """What the consumer's expressions said of the share's changes; None if it has none."""
    if not share.consumer.expressions:
        return None
    if share.verdicts is None:
        raise ProtocolError(
            f"a share of consumer {share.consumer.name} came without the verdicts of its "
            "expressions",
            fix="it is tried again; if it stays, report it with this text",
        )
    return sorted_verdicts(whole(share.verdicts))


def mine(share: Share, changes: pa.RecordBatch) -> pa.RecordBatch:
    """The rows that the share's consumer takes and has not settled, in their order."""
    match = share.match or Match.of(share.consumer)
    return match.select(_within(changes, share.start, share.end))


def cursors_in(share: Share, decoded: Iterable[pa.RecordBatch]) -> list[Cursor]:
    """Where the messages of a share stand, in order."""
    found: list[Cursor] = []
    for changes in decoded:
        rows = mine(share, view_of(changes, share.wanted, share.consumer))
        columns = (rows.column(name).to_pylist() for name in ("commit_lsn", "commit_idx"))
        found += map(Cursor, *columns)
    return found


def _decoded(changes: pa.RecordBatch) -> pa.RecordBatch:
    """Without the rows that could not be decoded: they become dead letters when settling."""
    errors = changes.column("error")
    return changes if errors.null_count == len(errors) else changes.filter(errors.is_null())


def _within(changes: pa.RecordBatch, start: Cursor, end: Cursor) -> pa.RecordBatch:
    """The rows from ``start`` up to ``end``; most often all of them."""
    if not changes.num_rows or (start <= cursor_at(changes, 0) and cursor_at(changes, -1) < end):
        return changes
    below = prefix_below(changes, end)
    first = prefix_below(changes, start)
    return changes.slice(first, max(0, below - first))


def shape_of(consumer: SinkConfig, origin: Origin) -> Shape:
    """How a consumer sees the changes of a database."""
    context = Context(
        consumer=consumer.name,
        database_name=origin.name,
        hostname=origin.hostname,
        database=origin.database,
        now_ns=time.time_ns(),
        format=form_of(consumer),
        of_many=len(consumer.sources) > 1,
    )
    transformed = "transform" in consumer.expressions
    schemas = shows_schemas(consumer)
    if holds_tables(consumer):  # it needs nothing of what a shape adds
        return RowTextShape(context) if takes_texts(consumer) else RecordShape(context)
    return shape_for(consumer.shape, context, transformed=transformed, schemas=schemas)


def _shaped(share: Share, changes: pa.RecordBatch) -> MessageBatch:
    shape = shape_of(share.consumer, share.origin)
    if len(share.origins) > 1:
        shape = MergedShape([shape_of(share.consumer, origin) for origin in share.origins])
    rows = shape.rows(changes)
    names = changes.schema.names
    for name in (ROUTE, *TEXTS):
        if name in names:
            rows = rows.append_column(name, changes.column(name))
    return MessageBatch(rows, shape)


def sink_of(share: Share, purpose: str = "") -> Sink:
    """The consumer's sink in this process, opened when it is first needed.

    TransientError for a share of a stage that has ended: its successor delivers. What stands in its
    place is closed before, and no other consumer waits for that: a sink of files may take long.
    """
    while True:
        with _opening:
            stale = _stale_sinks(share, purpose)
            if not stale:
                return _opened_sink(share, purpose)
        for sink in stale:
            sink.close()


def _stale_sinks(share: Share, purpose: str) -> list[Sink]:
    """Take out what has to be closed before the share's sink may be opened."""
    key = (share.origin.name, share.consumer.name, purpose)
    run, generation, _ = _open_sinks.get(key, ("", FIRST, None))
    if key in _open_sinks and run == share.run and generation == share.generation:
        return []
    _refuse_ended(share, run)
    process = process_of(share.run)
    return _take_sinks(lambda known, by: known == key or process_of(by) != process)


def _opened_sink(share: Share, purpose: str) -> Sink:
    key = (share.origin.name, share.consumer.name, purpose)
    if key not in _open_sinks:
        sink = open_sink(
            share.consumer.destination,
            consumer=share.consumer.name,
            batch_size=share.consumer.effective_batch_size,
            source=share.origin.name,
            grouping=Grouping.of(share.consumer),
            queue=Queue.of(share.consumer, share.origin.name, share.state_dsn),
            generation=share.generation,
            claims=ClaimPlace.of(share.consumer, share.state_dsn),
            state_dsn=share.state_dsn,
        )
        _open_sinks[key] = share.run, share.generation, sink
    _, _, sink = _open_sinks[key]
    place = share.ledger
    if _follows_rewinds(type(sink)):
        cast("FollowsRewinds", sink).follow(share.epoch)
    if _reloads(type(sink)):
        cast("Reloads", sink).loading(share.reload)
    if isinstance(sink, PullSink):
        return sink.settled_at(share.settled_cursor)
    if place is None:
        return sink
    return LedgeredSink(cast("RequestSink", sink), _ledger(share.run, place.address), place)


@cache
def _follows_rewinds(kind: type[Sink]) -> bool:
    """Asked once per class: Python goes through all names of a protocol each time."""
    return issubclass(kind, FollowsRewinds)


@cache
def _reloads(kind: type[Sink]) -> bool:
    return issubclass(kind, Reloads)


def ledger_of(share: Share) -> Ledger | None:
    """The ledger of the share's consumer in this process, if it has one."""
    with _opening:
        return None if share.ledger is None else _ledger(share.run, share.ledger.address)


def end_run(source: str, run: str) -> None:
    """Close the sinks of a stage of this process; nothing more is delivered for it.

    A delivery that is under way sends no other request.
    """
    with _opening:
        _ended[process_of(run), source] = stage_of(run)
        stale = _take_sinks(lambda known, by: known[0] == source and by == run)
    for sink in stale:
        sink.close()


def close_sinks(source: str, consumer: str) -> None:
    """Close what this process has open for a consumer that is not served any more."""
    with _opening:
        stale = _take_sinks(lambda known, _by: known[:2] == (source, consumer))
    for sink in stale:
        sink.close()


def process_of(run: str) -> str:
    """The process of a run, which may have run several stages of a source."""
    return run.partition(":")[0]


def stage_of(run: str) -> int:
    """The number of the stage within its process; 0 for a run that has none."""
    return int(run.partition(":")[2] or 0)


def _refuse_ended(share: Share, opened_by: str) -> None:
    """A later stage may have been here before: then this one has ended as well."""
    process, stage = process_of(share.run), stage_of(share.run)
    later = stage_of(opened_by) - 1 if process_of(opened_by) == process else 0
    if 0 < stage <= max(later, _ended.get((process, share.origin.name), 0)):
        raise TransientError(
            f"the stage that delivered to {share.consumer.name} has ended, and another one serves "
            "it now",
            kind="fenced",
        )


def _take_sinks(is_stale: Callable[[tuple[str, str, str], str], bool]) -> list[Sink]:
    """Take out sinks, for the caller to close outside the lock."""
    stale = [key for key, (run, _, _) in _open_sinks.items() if is_stale(key, run)]
    return [_open_sinks.pop(key)[2] for key in stale]


def _ledger(run: str, address: LedgerAddress) -> Ledger:
    """One for all consumers: a read or a write takes a fraction of a millisecond."""
    process = process_of(run)
    if (process, address) not in _open_ledgers:
        for old in [known for known in _open_ledgers if known[0] != process]:
            _open_ledgers.pop(old).close()
        _open_ledgers[process, address] = open_ledger(address)
    return _open_ledgers[process, address]
