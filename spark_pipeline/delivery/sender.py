"""Delivers a consumer's messages in order, and collects for its retry queue those that must wait.

A message that its destination refuses, where the destination lets others pass it, is queued with
its group: later messages of the group follow it into the queue, all others go on. Invariants:
nothing goes out whose group waits; everything below the outcome's cursor is delivered,
queued or dead; and when a destination refuses one message after another and takes none, it is taken
to be at fault as a whole, and nothing it refused since is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import MessageBatch
from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at
from cdc.error_text import one_line
from cdc.errors import PoisonError, TransientError, WalbrookError
from cdc.queue.groups import Grouping, groups_of
from cdc.queue.ledger.base import together as all_uses
from cdc.queue.retry import TOO_LARGE, kind_of, pause_s
from cdc.state.blocked_groups import GROUP, WHOLE_TABLE, BlockedGroups
from cdc.state.queued_messages import EVENT_SCHEMA
from sinks import Sink
from sinks.base import Delivery
from sinks.columns import bytes_bound, message_bytes
from spark_pipeline.delivery.outcome import Outcome, Poison, below, together

REFUSALS_MAX = 5
"""Refusals in a row, with nothing accepted between them, after which a destination is at fault."""

REFUSES_ALL = "refuses_all"
"""The kind of the error that says so."""

_EPOCH = datetime.fromtimestamp(0, UTC)
QUEUED_ROWS_MAX = 20_000
QUEUED_BYTES_MAX = 32 << 20

Shape = Callable[[pa.RecordBatch], MessageBatch]

Steps = Generator[MessageBatch, Delivery, bool]
"""Yields what is to be delivered next, is sent what became of it; returns whether more may follow.
"""


class ConsecutiveRefusals:
    """Refusals in a row, with nothing accepted between them, by all that is sent side by side."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._series = 0  # grows when a series of refusals has ended

    def accepted(self) -> None:
        self._series += self.count > 0
        self.count = 0

    def refused(self) -> tuple[int, int]:
        """How many there are now, and in which series."""
        self.count += 1
        return self.count, self._series


class Sender:
    """Takes the messages of one share, batch after batch."""

    def __init__(
        self,
        consumer: SinkConfig,
        sink: Sink,
        shape: Shape,
        start: Cursor,
        waiting: BlockedGroups,
        *,
        refusals: int | ConsecutiveRefusals = 0,
        refusals_max: int = REFUSALS_MAX,
    ) -> None:
        self._consumer = consumer
        self.sink = sink
        self._shape = shape
        self._start = start
        self._waiting = waiting
        self._refusals_max = refusals_max
        self._defers = consumer.destination.defers
        # What is larger becomes a dead letter; with a claim check the sink makes it smaller.
        self._largest = consumer.effective_max_message_bytes if consumer.claims is None else None
        self._refusals = (
            refusals if isinstance(refusals, ConsecutiveRefusals) else ConsecutiveRefusals(refusals)
        )
        self._first_refusal: tuple[int, Cursor] | None = None  # of which series, and where
        self._queued: list[pa.RecordBatch] = []
        self._queued_rows = self._queued_bytes = 0
        self._done = Outcome(consumer.name, start)

    @property
    def outcome(self) -> Outcome:
        queued, refusals = together(self._queued), self._refusals.count
        if queued is None and refusals == self._done.refusals:
            return self._done
        return replace(self._done, queued=queued, refusals=refusals)

    def take(self, rows: pa.RecordBatch) -> bool:
        """Deliver these rows, in order; returns True if more may follow."""
        steps = self.steps(rows)
        result = None
        while True:
            try:
                batch = next(steps) if result is None else steps.send(result)
            except StopIteration as end:
                return bool(end.value)
            result = self.sink.deliver(batch)

    def steps(self, rows: pa.RecordBatch) -> Steps:
        """The same for one who delivers: it yields what is to be delivered next, in order, and is
        sent what became of it."""
        left = self._let_through(rows)
        while left.num_rows:
            batch = self._shape(left)
            result, large = yield from self._deliver(batch)
            self._count(batch, result)
            at = result.settled
            if at == len(batch):
                break
            row = left.slice(at, 1)
            if result.error is None:
                assert large is not None
                goes_on = self._bury(row, self._too_large(row, large))
            elif result.error.kind == TOO_LARGE or self._is_lost(result.error):
                goes_on = self._bury(row, result.error.full_text)
            elif not self._defers or kind_of(result.error) is None:
                goes_on = self._stop(cursor_at(row, 0), result.error)
            else:
                goes_on = self._refused(row, result.error)
            if not goes_on:
                return False
            left = self._let_through(left.slice(at + 1))
        self._reach(_behind(rows, rows.num_rows - 1))
        return self._has_room()

    def finish(self, end: Cursor) -> Outcome:
        """All of the share was taken: it is settled up to its end."""
        self._reach(end)
        return self.outcome

    def _is_lost(self, error: WalbrookError) -> bool:
        """Whether a message was refused for good by a destination that cannot take it later."""
        return not self._defers and isinstance(error, PoisonError)

    def _deliver(
        self, batch: MessageBatch
    ) -> Generator[MessageBatch, Delivery, tuple[Delivery, int | None]]:
        """Up to the first message that is too large; its size, if that is where it ended."""
        parts = batch.shape.message_parts
        if self._largest is None or bytes_bound(batch.rows, parts) <= self._largest:
            return (yield batch), None
        sizes = message_bytes(batch.rows, parts)
        large = np.flatnonzero(sizes > self._largest)
        if not len(large):
            return (yield batch), None
        fits = int(large[0])
        result = (yield batch.slice(0, fits)) if fits else Delivery(0)
        return result, int(sizes[fits]) if result.settled == fits else None

    def _count(self, batch: MessageBatch, result: Delivery) -> None:
        done = self._done
        use = all_uses((done.ledger, result.ledger))
        top_before = done.top_before or result.top
        stopped = done.stopped if result.stopped is None else result.stopped
        if not result.settled:
            self._done = replace(done, ledger=use, top_before=top_before, stopped=stopped)
            return
        self._refusals.accepted()
        self._first_refusal = None
        last = batch.cursor(result.settled - 1)
        self._done = replace(
            done,
            cursor=max(done.cursor, _after(last)),
            delivered=done.delivered + result.settled - result.absorbed,
            absorbed=done.absorbed + result.absorbed,
            last_commit=_time_of(batch.rows, result.settled - 1),
            ledger=use,
            top_before=top_before,
            # A delivery that names no top went to places that keep none.
            top=done.top if result.top is None else last,
            stopped=stopped,
        )

    def _let_through(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Queue the messages that must wait; the rest may go out."""
        if not self._waiting or not rows.num_rows:
            return rows
        grouped = self._grouped(rows)
        held = self._waiting.holds(grouped)
        if not held.any():
            return rows
        self._queue(_events(grouped.filter(pa.array(held))))
        return rows.filter(pa.array(~held))

    def _refused(self, row: pa.RecordBatch, error: WalbrookError) -> bool:
        """The destination refused one message; returns True if the others may go on."""
        cursor = cursor_at(row, 0)
        count, series = self._refusals.refused()
        if self._first_refusal is None or self._first_refusal[0] != series:
            self._first_refusal = (series, cursor)
        if count > self._refusals_max:
            what = f"it refused {count} messages in a row and took none: {error.what}"
            return self._stop(
                self._first_refusal[1],
                TransientError(what, fix=error.fix, kind=REFUSES_ALL, detail=error.detail),
            )
        self._queue(refused(self._consumer, self._grouped(row), error))
        return True

    def _too_large(self, row: pa.RecordBatch, size: int) -> str:
        return (
            f"the message at {cursor_at(row, 0)} has {size} bytes, more than the {self._largest} "
            f"that {self._consumer.name} takes. To fix it: raise max_message_bytes, if its "
            "destination can take more, and redeliver it"
        )

    def _bury(self, row: pa.RecordBatch, why: str) -> bool:
        """Go on without a message that nothing can deliver; its group is not held up by it."""
        if not self._defers:
            # Nothing may be sent past it before it is settled as dead: a destination that goes by
            # the last message it has would take it for delivered.
            cursor = cursor_at(row, 0)
            self._done = replace(self._done, dead=(Poison(cursor, why),))
            return self._stop(_after(cursor))
        deliveries = _number(row, "deliveries") + 1
        self._note(
            _events(
                self._grouped(row),
                deliveries=deliveries,
                error=why,
                error_kind="poison",
                pause_s=0.0,
                dead=True,
            )
        )
        return True

    def _queue(self, events: pa.RecordBatch) -> None:
        self._note(events)
        self._waiting = self._waiting.with_these(events.filter(pc.invert(events.column("dead"))))

    def _note(self, events: pa.RecordBatch) -> None:
        self._queued.append(events)
        self._queued_rows += events.num_rows
        self._queued_bytes += events.nbytes

    def _has_room(self) -> bool:
        """Bounded: what is queued is kept in memory until it is settled."""
        if self._queued_rows < QUEUED_ROWS_MAX and self._queued_bytes < QUEUED_BYTES_MAX:
            return True
        return self._stop(self._done.cursor)

    def _stop(self, at: Cursor, error: WalbrookError | None = None) -> bool:
        """Nothing from a cursor on is settled; what was queued there comes again.

        Without an error nothing failed: what follows comes next.
        """
        self._queued = [below(rows, at) for rows in self._queued]
        cursor = max(self._start, at)
        self._done = replace(self._done, cursor=cursor, error=error, more=error is None)
        return False

    def _reach(self, cursor: Cursor) -> None:
        if cursor > self._done.cursor:
            self._done = replace(self._done, cursor=cursor)

    def _grouped(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        groups = groups_of(rows, Grouping.of(self._consumer))
        for name, column in ((GROUP, groups.ids), (WHOLE_TABLE, groups.whole_table)):
            at = rows.schema.get_field_index(name)
            rows = rows.append_column(name, column) if at < 0 else rows.set_column(at, name, column)
        return rows


def refused(consumer: SinkConfig, row: pa.RecordBatch, error: WalbrookError) -> pa.RecordBatch:
    """A message that its destination refused, as the queue keeps it; ``row`` has its group."""
    kind = kind_of(error)
    assert kind is not None
    deliveries = _number(row, "deliveries") + 1
    dead = deliveries >= consumer.max_deliveries
    return _events(
        row,
        deliveries=deliveries,
        error=error.full_what if dead else error.full_text,  # a dead letter is not retried
        error_kind=kind,
        answer=one_line(error.what),
        pause_s=pause_s(consumer.retry, deliveries, kind),
        dead=dead,
    )


def given_up(rows: pa.RecordBatch, why: str, kind: str = "poison") -> pa.RecordBatch:
    """Rows of the queue, or such as would stand there, as dead letters."""
    return _events(rows, error=why, error_kind=kind, pause_s=0.0, dead=True)


def _events(
    rows: pa.RecordBatch,
    *,
    deliveries: int | None = None,
    error: str | None = None,
    error_kind: str | None = None,
    answer: str | None = None,
    pause_s: float | None = None,
    dead: bool = False,
) -> pa.RecordBatch:
    """Rows as the queue keeps them; those that only wait keep what is known of them."""
    count = rows.num_rows
    given: dict[str, object] = {
        "deliveries": deliveries, "error": error, "error_kind": error_kind, "answer": answer,
        "pause_s": pause_s, "dead": dead,
    }  # fmt: skip
    columns = []
    for field in EVENT_SCHEMA:
        if given.get(field.name) is not None:
            columns.append(pa.repeat(pa.scalar(given[field.name], field.type), count))
        elif field.name in rows.schema.names and field.name not in ("pause_s", "dead"):
            columns.append(rows.column(field.name).cast(field.type))
        elif field.name == "deliveries":
            columns.append(pa.repeat(pa.scalar(0, field.type), count))
        else:
            columns.append(pa.nulls(count, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=EVENT_SCHEMA)


def _number(row: pa.RecordBatch, column: str) -> int:
    return int(row.column(column)[0].as_py()) if column in row.schema.names else 0


def _time_of(rows: pa.RecordBatch, at: int) -> datetime:
    """When a row was committed. Arrow would look for the time zone's package each time."""
    return _EPOCH + timedelta(microseconds=rows.column("commit_timestamp")[at].value)


def _after(cursor: Cursor) -> Cursor:
    return Cursor(cursor.lsn, cursor.idx + 1)


def _behind(rows: pa.RecordBatch, at: int) -> Cursor:
    return _after(cursor_at(rows, at))
