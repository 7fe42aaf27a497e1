"""A queue in the state database, which consumers fetch from.

A batch is one transaction: the messages go into the consumer's partition of
``walbrook.pull_messages`` by COPY, and with them the cursor of the last one, so what comes again is
known by it. Invariant: a writer holds the consumer's row of ``walbrook.pull_positions`` until the
commit, so that messages become visible in cursor order, which claims rely on.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Self

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.change import MessageBatch
from cdc.config import SinkConfig
from cdc.connection import Connection
from cdc.connection_pool import ConnectionPool
from cdc.cursor import Cursor, cursor_of, format_lsn
from cdc.cursor_columns import prefix_at_or_below
from cdc.decoding.copy_text import copied_text, lsn_texts
from cdc.decoding.joins import joined
from cdc.error_text import public_text
from cdc.errors import OperatorError, PoisonError, TransientError, WalbrookError
from cdc.queue.groups import Grouping, groups_of
from cdc.queue.retry import TOO_LARGE
from sinks.base import Delivery
from sinks.columns import text_bytes

_MESSAGE_BYTES_MAX = 64 << 20
_CHANNEL = "walbrook_pull"

_LOCK = """
SELECT s.consumer, s.commit_lsn::text, s.commit_idx, clock_timestamp()::text,
       p.max_messages IS NOT NULL OR p.max_bytes IS NOT NULL OR p.ttl_s IS NOT NULL
  FROM walbrook.pull_positions s
  JOIN walbrook.consumers c ON c.id = s.consumer
  LEFT JOIN walbrook.pull_settings p ON p.consumer = s.consumer
 WHERE c.source = %s AND c.name = %s FOR UPDATE OF s
"""
_SETTLED = """
SELECT cursor_lsn::text, cursor_idx FROM walbrook.consumers WHERE source = %s AND name = %s
"""
_COPY = """
COPY walbrook.{} (consumer, commit_lsn, commit_idx, group_id, whole_table, bytes, commit_timestamp,
                  stored_at, table_schema, table_name, action, message) FROM STDIN
"""
_MOVE = """
WITH moved AS (UPDATE walbrook.pull_positions SET commit_lsn = %(lsn)s::pg_lsn, commit_idx = %(idx)s
                WHERE consumer = %(id)s)
SELECT pg_notify(%(channel)s, %(id)s::text)
"""
_PROBE = "SELECT has_table_privilege(to_regclass('walbrook.pull_messages'), 'INSERT')"
_KEEP_BOUNDS = "SELECT walbrook.keep_bounds(%s, %s, %s)"

# As in CONTEXT of an error: COPY pull_messages_1, line 5, column message: "..."
_LINE = re.compile(r"^COPY pull_messages_\d+, line (\d+)", re.MULTILINE)

_pools: dict[str, ConnectionPool] = {}
_pools_lock = threading.Lock()


def _pool(dsn: str) -> ConnectionPool:
    """The connections of this process to a state database."""
    with _pools_lock:
        return _pools.setdefault(dsn, ConnectionPool(dsn, name="pull"))


@dataclass(frozen=True)
class Queue:
    """Where a pull consumer's messages are stored, and how."""

    dsn: str = field(repr=False)
    source: str
    grouping: Grouping
    message_bytes_max: int = _MESSAGE_BYTES_MAX

    @classmethod
    def of(cls, consumer: SinkConfig, source: str, dsn: str) -> Queue:
        """As the consumer's configuration says."""
        most = consumer.max_message_bytes or _MESSAGE_BYTES_MAX
        return cls(dsn, source, Grouping.of(consumer), min(most, _MESSAGE_BYTES_MAX))


class PullSink:
    """Stores messages over connections that all pull consumers of the process share."""

    def __init__(self, queue: Queue, *, consumer: str) -> None:
        self._queue = queue
        self._consumer = consumer
        self._connections = _pool(queue.dsn)
        self._settled_cursor: Cursor | None = None

    def settled_at(self, cursor: Cursor | None) -> Self:
        """The same for the messages of a consumer that stood there when they were taken.

        If it was moved since, nothing is stored: behind a rewind it would make everything
        before it look stored.
        """
        self._settled_cursor = cursor
        return self

    def probe(self) -> str:
        """Whether the state database has the queue and lets the role write to it."""
        try:
            with self._connections.connection() as connection:
                row = connection.execute(_PROBE).fetchone()
        except psycopg.Error as error:
            raise _refusal(error) from error
        assert row is not None
        if row[0] is None:
            return "the state database answers; the queue is made by the first start"
        if not row[0]:
            raise OperatorError(
                "the role may not write to walbrook.pull_messages in the state database",
                fix="connect as the role that ran walbrook migrate",
            )
        return "the state database answers, and the role may write to walbrook.pull_messages"

    def deliver(self, batch: MessageBatch) -> Delivery:
        try:
            return self._deliver(batch)
        except psycopg.DataError as error:
            return self._without(batch, error)
        except psycopg.Error as error:
            return Delivery(0, error=_refusal(error))

    def close(self) -> None:
        self._connections.close()

    def _deliver(self, batch: MessageBatch) -> Delivery:
        with self._connections.connection() as connection, connection.transaction():
            row = connection.execute(_LOCK, (self._queue.source, self._consumer)).fetchone()
            if row is None:
                return Delivery(0, error=self._unknown())
            if self._was_moved(connection):
                return Delivery(0, error=_moved(self._consumer))
            stored = cursor_of(row[1], row[2])
            absorbed = prefix_at_or_below(batch.rows, stored)
            rest = batch.slice(absorbed)
            texts = rest.messages()
            sizes = pc.binary_length(texts)
            fits = _first_above(sizes, self._queue.message_bytes_max)
            if fits:
                rows = rest.slice(0, fits)
                number = int(str(row[0]))
                lines = self._lines(rows, texts.slice(0, fits), sizes.slice(0, fits), row)
                self._copy(connection, number, lines)
                last = rows.cursor(-1)
                connection.execute(
                    _MOVE,
                    {
                        "lsn": format_lsn(last.lsn),
                        "idx": last.idx,
                        "id": number,
                        "channel": _CHANNEL,
                    },
                )
                if row[4]:
                    size = pc.sum(sizes.slice(0, fits)).as_py()
                    connection.execute(_KEEP_BOUNDS, (number, fits, size))
        if fits == len(rest):
            return Delivery(len(batch), absorbed)
        too_large = self._too_large(rest, fits, sizes[fits].as_py())
        return Delivery(absorbed + fits, absorbed, too_large)

    def _was_moved(self, connection: Connection) -> bool:
        """Called with the lock held that a move of the cursor takes first."""
        if self._settled_cursor is None:
            return False
        row = connection.execute(_SETTLED, (self._queue.source, self._consumer)).fetchone()
        return row is None or cursor_of(row[0], row[1]) != self._settled_cursor

    def _copy(self, connection: Connection, number: int, lines: pa.StringArray) -> None:
        into = sql.SQL(_COPY).format(sql.Identifier(f"pull_messages_{number}"))
        with connection.cursor() as cursor, cursor.copy(into) as copy:
            copy.write(memoryview(text_bytes(lines)))

    def _lines(
        self,
        batch: MessageBatch,
        texts: pa.StringArray,
        sizes: pa.Int32Array,
        row: tuple[object, ...],
    ) -> pa.StringArray:
        """The batch as COPY reads it, one line per message."""
        rows = batch.rows
        groups = groups_of(rows, self._queue.grouping)
        times = rows.column("commit_timestamp").cast(pa.timestamp("us")).cast(pa.string())
        return joined(
            f"{row[0]}\t",
            lsn_texts(rows.column("commit_lsn")),
            "\t",
            rows.column("commit_idx").cast(pa.string()),
            "\t",
            pc.fill_null(groups.ids.cast(pa.string()), "\\N"),
            "\t",
            pc.if_else(groups.whole_table, "t", "f"),
            "\t",
            sizes.cast(pa.string()),
            "\t",
            times,
            # As a column: a constant of a join is kept for the next one; this is never the same.
            pa.repeat(f"+00\t{row[3]}\t", len(batch)),
            copied_text(rows.column("table_schema")),
            "\t",
            copied_text(rows.column("table_name")),
            "\t",
            rows.column("action"),
            "\t",
            copied_text(texts),
            "\n",
        )

    def _without(self, batch: MessageBatch, error: psycopg.DataError) -> Delivery:
        """A message that the server cannot store: those before it are stored, it is named."""
        line = _LINE.search(error.diag.context or "")
        detail = error.diag.message_primary or str(error).strip()
        if line is None:
            what = f"the state database refuses to store messages: {public_text(error)}"
            return Delivery(0, error=OperatorError(what, detail=detail))
        # The line counts from what was not there yet; that has not changed since.
        before = self._stored_of(batch) + int(line[1]) - 1
        done = self.deliver(batch.slice(0, before)) if before else Delivery(0)
        if done.error is not None:
            return done
        refused = PoisonError(
            f"the state database cannot store the message at {batch.cursor(before)}",
            fix="take it out by a filter, or change what it is made of by a transform",
            detail=detail,
        )
        return Delivery(before, done.absorbed, refused)

    def _stored_of(self, batch: MessageBatch) -> int:
        """How many of the batch are stored already."""
        try:
            with self._connections.connection() as connection:
                row = connection.execute(_LOCK, (self._queue.source, self._consumer)).fetchone()
        except psycopg.Error:
            row = None
        if row is None:
            return 0
        return prefix_at_or_below(batch.rows, cursor_of(row[1], row[2]))

    def _too_large(self, rest: MessageBatch, at: int, size: int) -> PoisonError:
        return PoisonError(
            f"the message at {rest.cursor(at)} takes {size} bytes, more than the "
            f"{self._queue.message_bytes_max} that a message of {self._consumer} may take",
            fix="raise max_message_bytes of the sink, or leave columns out by a transform",
            kind=TOO_LARGE,
        )

    def _unknown(self) -> OperatorError:
        return OperatorError(
            f"consumer {self._consumer} of source {self._queue.source} has no row in "
            "walbrook.pull_positions",
            fix="start the service again: it makes it",
        )


def _moved(consumer: str) -> TransientError:
    return TransientError(
        f"the cursor of {consumer} was moved; it is served again from where it is now"
    )


def _first_above(sizes: pa.Int32Array, most: int) -> int:
    """How many come before the first that is larger; all, if none is."""
    found = int(pc.index(pc.greater(sizes, most), True).as_py())
    return len(sizes) if found < 0 else found


def _refusal(error: psycopg.Error) -> WalbrookError:
    """What an error of the state database means for delivery."""
    code = error.sqlstate or ""
    reason = public_text(error)
    if code.startswith(("28", "42", "3D", "3F")):
        return OperatorError(
            f"the state database refuses to store messages: {reason}",
            fix="let the role of state.url write in schema walbrook; walbrook migrate brings it "
            "up to date",
        )
    return TransientError(
        f"messages cannot be stored in the state database: {reason}",
        fix="it is retried; check that the database runs and has room",
    )
