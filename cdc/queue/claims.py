"""Claiming the due retries of a push consumer, and settling what became of them.

Invariants: a claim is a lease with a deadline by the database's clock; a claim takes the first
message of a group and those behind it, in order; what another process has claimed is taken over,
because only one process serves a source.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import pyarrow as pa

from cdc.connection import Connection
from cdc.cursor import parse_lsn
from cdc.queue.ledger.postgres import DROP, dropped
from cdc.state.feeds import require_latest, show_feed
from cdc.state.fence import FENCE, fenced
from cdc.state.queued_messages import EVENT_SCHEMA, delivered, lock_consumer, mark_tried

CLAIM_ROWS_MAX = 1_000
CLAIM_BYTES_MAX = 32 << 20
LEASE_S = 300.0

# Consumers for which something waits, and in how many seconds the first of it is due.
_DUE = """
SELECT c.name, c.id, greatest(extract(epoch FROM d.due_at - clock_timestamp()), 0)::float8,
       c.paused_at IS NOT NULL, c.ledger::text
  FROM walbrook.consumers c
 CROSS JOIN LATERAL (
       SELECT e.due_at FROM walbrook.events e WHERE e.consumer = c.id AND e.due_at IS NOT NULL
        ORDER BY e.due_at LIMIT 1) d
 WHERE c.source = %(source)s AND c.active AND c.name = coalesce(%(consumer)s, c.name)
"""
# Those behind a first one are taken with it, up to one that has its place among all of its table.
# Rows that a process which is gone had claimed may be what ended it: each is taken alone. A row
# counts as abandoned if that process had claimed it alone: nothing else can be to blame then. An
# earlier stage of the same process ended without it: the second part of a holder is the process.
_CLAIM = """
WITH lease AS (SELECT nextval('walbrook.lease_ids') AS id),
heads AS (
    SELECT commit_lsn, commit_idx, group_id FROM walbrook.events
     WHERE consumer = %(consumer)s AND due_at <= clock_timestamp()
       AND (holder IS DISTINCT FROM %(holder)s OR lease_until < clock_timestamp())
       AND EXISTS (SELECT FROM walbrook.consumers c JOIN walbrook.sources s ON s.name = c.source
                    WHERE c.id = %(consumer)s AND c.active AND c.paused_at IS NULL
                      AND s.term = %(term)s)
     ORDER BY due_at LIMIT %(rows)s FOR UPDATE SKIP LOCKED),
chosen AS (
    SELECT commit_lsn, commit_idx FROM heads
     UNION
    SELECT f.commit_lsn, f.commit_idx FROM heads h
     CROSS JOIN LATERAL (
           SELECT e.commit_lsn, e.commit_idx FROM walbrook.events e
            WHERE e.consumer = %(consumer)s AND e.group_id = h.group_id AND e.due_at IS NULL
              AND (e.commit_lsn, e.commit_idx) > (h.commit_lsn, h.commit_idx)
              AND NOT e.whole_table AND NOT EXISTS (
                  SELECT FROM walbrook.events w
                   WHERE w.consumer = %(consumer)s AND w.whole_table
                     AND w.table_schema = e.table_schema AND w.table_name = e.table_name
                     AND (w.commit_lsn, w.commit_idx) < (e.commit_lsn, e.commit_idx))
            ORDER BY e.commit_lsn, e.commit_idx LIMIT %(behind)s) f),
sized AS (
    SELECT c.commit_lsn, c.commit_idx, row_number() OVER place AS number,
           sum(e.bytes) OVER place AS bytes, bool_or(e.taken_over) OVER place AS taken_over
      FROM chosen c
     CROSS JOIN LATERAL (
           SELECT coalesce(e.holder <> %(holder)s, false) AS taken_over,
                  coalesce(octet_length(e.record), 0) + coalesce(octet_length(e.changes), 0)
                  + coalesce(octet_length(e.message), 0) AS bytes FROM walbrook.events e
            WHERE e.consumer = %(consumer)s AND e.commit_lsn = c.commit_lsn
              AND e.commit_idx = c.commit_idx LIMIT 1) e
    WINDOW place AS (ORDER BY c.commit_lsn, c.commit_idx))
UPDATE walbrook.events e
   SET abandoned = e.abandoned
                   + coalesce(split_part(e.holder, ':', 2) <> split_part(%(holder)s, ':', 2)
                              AND e.lease_id IS NOT NULL, false)::int,
       lease_id = lease.id, holder = %(holder)s,
       lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)
  FROM sized s, lease
 WHERE e.consumer = %(consumer)s AND e.commit_lsn = s.commit_lsn AND e.commit_idx = s.commit_idx
   AND s.number <= %(rows)s
   AND (s.number = 1 OR s.bytes <= %(bytes)s AND NOT s.taken_over)
RETURNING e.commit_lsn::text, e.commit_idx, e.commit_timestamp, e.xid, e.table_schema,
          e.table_name, e.action, e.record, e.changes, e.record_pks, e.old_record_pks, e.unchanged,
          e.annotations, e."before", e.message, e.route, e.group_id, e.whole_table, e.deliveries,
          e.abandoned
"""
# Rows that were just copied have no statistics; what is claimed is little, whatever waits.
BY_INDEX = """
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_sort', 'off', true)
"""
_TAKEN_OVER = """
SELECT EXISTS (SELECT FROM walbrook.events
                WHERE consumer = %s AND holder <> %s AND due_at <= clock_timestamp())
"""
# What such a process had claimed together is marked by a lease that is taken away: when all others
# have been taken over, the last one must not look as if it had been claimed alone.
_CLAIMED_TOGETHER = """
UPDATE walbrook.events e SET lease_id = NULL
 WHERE e.consumer = %(consumer)s AND e.holder <> %(holder)s AND e.lease_id IS NOT NULL
   AND EXISTS (SELECT FROM walbrook.events o
                WHERE o.consumer = %(consumer)s AND o.holder = e.holder AND o.lease_id = e.lease_id
                  AND (o.commit_lsn, o.commit_idx) <> (e.commit_lsn, e.commit_idx))
"""
# How many heads a claim finds, at most as many as asked.
_HEADS = """
SELECT count(*) FROM (SELECT FROM walbrook.events
                       WHERE consumer = %s AND due_at <= clock_timestamp() LIMIT %s) few
"""
_RELEASE = """
UPDATE walbrook.events SET lease_id = NULL, holder = NULL, lease_until = NULL
 WHERE consumer = %s AND holder = %s
"""
_COUNT = """
UPDATE walbrook.consumers SET delivered = delivered + %s, absorbed = absorbed + %s WHERE id = %s
"""
ABANDONED = "abandoned"
"""The column that says how often a process ended while it was delivering this row alone."""

_CLAIMED = pa.schema([
    *(each for each in EVENT_SCHEMA if each.name not in
      ("error", "error_kind", "answer", "pause_s", "dead")),
    pa.field(ABANDONED, pa.int32(), nullable=False),
])  # fmt: skip


@dataclass(frozen=True)
class Due:
    """A consumer for which something waits; ``in_s`` seconds until the first of it is due."""

    consumer: str
    id: int
    in_s: float
    paused: bool = False
    ledger: str = ""  # what its ledger is known by


def due(connection: Connection, source: str, consumer: str | None = None) -> list[Due]:
    """The active consumers of a source, or one of them, that have something waiting."""
    rows = connection.execute(_DUE, {"source": source, "consumer": consumer}).fetchall()
    return [
        Due(str(name), int(str(number)), float(str(in_s)), bool(paused), str(ledger))
        for name, number, in_s, paused, ledger in rows
    ]


def claim(
    connection: Connection, consumer: int, term: int, holder: str, most: int = CLAIM_ROWS_MAX
) -> pa.RecordBatch:
    """Lease what is due, in cursor order: EVENT_SCHEMA without failures, and ABANDONED.

    Nothing of one that is paused, and nothing for a start of the service that is not the latest.
    What an earlier claim of this holder did not settle is free again.
    """
    with connection.transaction():
        connection.execute(BY_INDEX)
        connection.execute(_RELEASE, (consumer, holder))
        most = min(most, CLAIM_ROWS_MAX)
        if connection.execute(_TAKEN_OVER, (consumer, holder)).fetchone() == (True,):
            connection.execute(_CLAIMED_TOGETHER, {"consumer": consumer, "holder": holder})
            most = 1
        heads = connection.execute(_HEADS, (consumer, most)).fetchone()
        rows = connection.execute(
            _CLAIM,
            {
                "consumer": consumer,
                "term": term,
                "holder": holder,
                "rows": most,
                # A claim reads about twice as many rows as it takes, however many wait.
                "behind": ceil(most / max(int(str(heads[0])) if heads else 0, 1)),
                "bytes": CLAIM_BYTES_MAX,
                "lease_s": LEASE_S,
            },
            prepare=False,  # a generic plan does not know the limits
        ).fetchall()
    placed = sorted((parse_lsn(str(lsn)), *rest) for lsn, *rest in rows)
    columns = list(zip(*placed, strict=True)) or [()] * len(_CLAIMED)
    arrays = [pa.array(column, each.type) for column, each in zip(columns, _CLAIMED, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_CLAIMED)


def settle_claim(
    connection: Connection,
    *,
    source: str,
    term: int,
    consumer: str,
    holder: str,
    done: pa.RecordBatch,
    absorbed: int,
    tried: pa.RecordBatch | None,
    ledger: str | None = None,
    run: int | None = None,
) -> None:
    """One transaction: what was delivered leaves, what was refused is due later or dead.

    What was claimed and is neither is free again. ``ledger`` is the name of the consumer's ledger,
    if it has one in this database: what leaves the queue need not be known there any more. ``run``
    is the run of the feed that the holder belongs to; one that is not the latest is refused.
    """
    with connection.transaction():
        if connection.execute(FENCE, (source, term)).fetchone() is None:
            raise fenced(source)
        if run is not None:
            require_latest(source, run, show_feed(connection, source, run, None))
        number = lock_consumer(connection, source, consumer)
        if done.num_rows:
            delivered(connection, number, done)
            connection.execute(_COUNT, (done.num_rows - absorbed, absorbed, number))
            if ledger is not None:
                lsn, idx = (done.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
                connection.execute(DROP, dropped(ledger, lsn, idx))
        # Behind those that left: a refused message is the first of its group then, and waits.
        if tried is not None:
            mark_tried(connection, number, tried)
        connection.execute(_RELEASE, (number, holder))
