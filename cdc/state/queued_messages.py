"""Messages of push consumers that wait, as rows of ``walbrook.events``.

Rows are added in the settling transaction that moves a cursor over them, and leave when they are
delivered or dead. Invariants: a row that waits for no earlier one, of its group or its table, has a
time at which it is due, so nothing waits without end; a transaction that lets rows be due, or takes
them, holds the consumer's row in ``walbrook.consumers`` meanwhile, so that none is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.change import MESSAGE_SCHEMA
from cdc.connection import Connection, allow_time_for
from cdc.cursor import format_lsn
from cdc.state.blocked_groups import BlockedGroups
from cdc.state.queue_copy import copy_rows

QUEUE_MAX: Final = 100_000
"""How many messages may wait for a consumer before it takes no new ones."""

EVENT_SCHEMA: Final = pa.schema(
    [
        *MESSAGE_SCHEMA,
        pa.field("before", pa.string()),
        pa.field("message", pa.string()),
        pa.field("route", pa.string()),
        pa.field("group_id", pa.int64()),
        pa.field("whole_table", pa.bool_(), nullable=False),
        pa.field("deliveries", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("error_kind", pa.string()),
        # What its destination answered, without anything of the row; null if it was not sent.
        pa.field("answer", pa.string()),
        # How long from now on until it is tried again; null for one that waits for another.
        pa.field("pause_s", pa.float64()),
        pa.field("dead", pa.bool_(), nullable=False),
    ]
)
"""Queued messages: what is kept of each, and what becomes of it."""

ATTEMPTS_KEPT: Final = 10
"""Of how many attempts, the latest, a message that waits keeps time and answer."""

_COPIED: Final = tuple(
    name for name in EVENT_SCHEMA.names if name not in ("answer", "pause_s", "dead")
)

_NUMBER = "SELECT id FROM walbrook.consumers WHERE source = %s AND name = %s"
_LOCK = f"{_NUMBER} FOR NO KEY UPDATE"
_THERE = """
SELECT w.place
  FROM unnest(%(lsn)s::pg_lsn[], %(idx)s::bigint[]) WITH ORDINALITY AS w (lsn, idx, place)
  JOIN walbrook.events e
    ON e.consumer = %(consumer)s AND e.commit_lsn = w.lsn AND e.commit_idx = w.idx
"""
_TRIED = """
UPDATE walbrook.events e
   -- One that an operator put back before it in its group goes first.
   SET due_at = CASE WHEN NOT EXISTS (
           SELECT FROM walbrook.events f
            WHERE f.consumer = e.consumer AND f.group_id = e.group_id
              AND (f.commit_lsn, f.commit_idx) < (e.commit_lsn, e.commit_idx))
           THEN clock_timestamp() + make_interval(secs => t.pause_s) END,
       tried_at = clock_timestamp(),
       deliveries = t.deliveries, error = t.error, error_kind = t.error_kind,
       attempts = CASE WHEN t.answer IS NULL THEN e.attempts
                       WHEN jsonb_array_length(e.attempts) >= %(kept)s THEN e.attempts - 0
                       ELSE coalesce(e.attempts, '[]') END
                  || CASE WHEN t.answer IS NULL THEN '[]'::jsonb
                          ELSE jsonb_build_array(jsonb_build_object(
                               'at', clock_timestamp(), 'deliveries', t.deliveries,
                               'kind', t.error_kind, 'answer', t.answer)) END,
       lease_id = NULL, holder = NULL, lease_until = NULL
  FROM unnest(%(lsn)s::pg_lsn[], %(idx)s::bigint[], %(pause_s)s::float8[], %(deliveries)s::int[],
              %(error)s::text[], %(error_kind)s::text[], %(answer)s::text[])
       AS t (lsn, idx, pause_s, deliveries, error, error_kind, answer)
 WHERE e.consumer = %(consumer)s AND e.commit_lsn = t.lsn AND e.commit_idx = t.idx
"""
_BURY = "SELECT walbrook.bury(%(consumer)s, %(lsn)s::pg_lsn[], %(idx)s::bigint[])"
_DELIVERED = """
DELETE FROM walbrook.events e
 USING unnest(%(lsn)s::pg_lsn[], %(idx)s::bigint[]) AS d (lsn, idx)
 WHERE e.consumer = %(consumer)s AND e.commit_lsn = d.lsn AND e.commit_idx = d.idx
"""
_PROMOTE = "SELECT walbrook.promote(%(consumer)s, %(groups)s::bigint[])"
_WAITING = """
SELECT e.group_id, e.table_schema || '.' || e.table_name, bool_or(e.whole_table), count(*)
  FROM walbrook.consumers c JOIN walbrook.events e ON e.consumer = c.id
 WHERE c.source = %s AND c.name = %s GROUP BY 1, 2
"""


def lock_consumer(connection: Connection, source: str, consumer: str) -> int:
    """The consumer's number, 0 if it is gone; until the end no one else adds or takes rows."""
    row = connection.execute(_LOCK, (source, consumer)).fetchone()
    return int(str(row[0])) if row else 0


def enqueue(connection: Connection, source: str, consumer: str, rows: pa.RecordBatch) -> None:
    """Add rows of EVENT_SCHEMA, inside the settling transaction."""
    let_wait(connection, source, consumer, store(connection, source, consumer, rows))


def store(
    connection: Connection, source: str, consumer: str, rows: pa.RecordBatch
) -> pa.RecordBatch:
    """Write rows of EVENT_SCHEMA before anything is locked; returns those that were not there.

    Many take seconds. They are not visible before the transaction ends, and what makes them due is
    ``let_wait``. One that waits already, because its consumer's cursor was moved back, stays as it
    is.
    """
    row = connection.execute(_NUMBER, (source, consumer)).fetchone()
    if row is None:
        return rows.slice(0, 0)  # its row is gone, so its cursor cannot be settled either
    number = int(str(row[0]))
    places = connection.execute(_THERE, {"consumer": number, **_cursors(rows)}).fetchall()
    there = {int(str(place)) - 1 for (place,) in places}
    if there:
        rows = rows.take(pa.array(sorted(set(range(rows.num_rows)) - there), pa.int64()))
    allow_time_for(connection, rows.nbytes)
    copy_rows(connection, "events", number, {name: rows.column(name) for name in _COPIED})
    return rows


def let_wait(connection: Connection, source: str, consumer: str, rows: pa.RecordBatch) -> None:
    """Say when rows that were stored in the same transaction are due, and bury the dead ones."""
    number = lock_consumer(connection, source, consumer)
    if number:
        mark_tried(connection, number, rows)


def mark_tried(connection: Connection, consumer: int, rows: pa.RecordBatch) -> None:
    """Say when these rows, which are there, are due again, and bury the dead ones."""
    tried = rows.filter(rows.column("pause_s").is_valid())
    if tried.num_rows:
        texts = {
            name: tried.column(name).to_pylist()
            for name in ("pause_s", "deliveries", "error", "error_kind", "answer")
        }
        connection.execute(
            _TRIED, {"consumer": consumer, "kept": ATTEMPTS_KEPT, **_cursors(tried), **texts}
        )
    dead = rows.filter(rows.column("dead"))
    if dead.num_rows:
        connection.execute(_BURY, {"consumer": consumer, **_cursors(dead)})
    promote(connection, consumer, rows)


def delivered(connection: Connection, consumer: int, rows: pa.RecordBatch) -> None:
    """Take rows away; what waited for them is due."""
    connection.execute(_DELIVERED, {"consumer": consumer, **_cursors(rows)})
    promote(connection, consumer, rows)


def promote(connection: Connection, consumer: int, rows: pa.RecordBatch) -> None:
    """Let the first rows of the groups of these be due, if they are not.

    Behind one that had its place among all of its table, any group may wait.
    """
    any_group = bool(rows.column("whole_table").true_count)
    groups = None if any_group else rows.column("group_id").drop_null().unique().to_pylist()
    connection.execute(_PROMOTE, {"consumer": consumer, "groups": groups})


def waiting_for(connection: Connection, source: str, consumer: str) -> BlockedGroups:
    """What waits in a consumer's queue."""
    rows = connection.execute(_WAITING, (source, consumer)).fetchall()
    groups = np.array(sorted({int(str(row[0])) for row in rows if row[0] is not None}), np.int64)
    return BlockedGroups(
        groups,
        frozenset(str(row[1]) for row in rows),
        frozenset(str(row[1]) for row in rows if row[2]),
        sum(int(str(row[3])) for row in rows),
    )


def as_changes(rows: pa.RecordBatch, beside: Sequence[str] = ()) -> pa.RecordBatch:
    """What waited, as delivery takes it: CHANGE_SCHEMA, how often it was tried, and ``beside``."""
    kept = {name: rows.column(name) for name in (*MESSAGE_SCHEMA.names, "deliveries", *beside)}
    return pa.RecordBatch.from_pydict({**kept, "error": pa.nulls(rows.num_rows, pa.string())})


def _cursors(rows: pa.RecordBatch) -> dict[str, object]:
    return {
        "lsn": [format_lsn(lsn) for lsn in rows.column("commit_lsn").to_pylist()],
        "idx": rows.column("commit_idx").to_pylist(),
    }
