"""What the service is doing, as rows: for ``walbrook sources`` and so on, and for the HTTP API.

Invariant: no row value is in any of them; what waits is named by table and cursor.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from psycopg.rows import dict_row

from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.state.operators import State, refusals

LISTED_MAX: Final = 1_000
"""Most rows of a listing."""


class Listing(StrEnum):
    """What can be listed."""

    SOURCES = "sources"
    SINKS = "sinks"
    LAG = "lag"
    QUEUE = "queue"
    AUDIT = "audit"


_SOURCES = """
SELECT s.name AS source, s.state, s.state_since, s.slot, s.publication, v.cursor, v.lag_bytes,
       v.lag_seconds, s.log_bytes, s.slot_wal_status, s.slot_safe_bytes, s.last_error
  FROM walbrook.sources s
  JOIN walbrook.cursors v ON v.source = s.name AND v.consumer IS NULL
 WHERE %(named)s::text IS NULL OR s.name = %(named)s
 ORDER BY s.name LIMIT %(most)s
"""
_SINKS = """
SELECT c.source, c.name AS consumer, c.destination, c.active, c.state, c.state_reason, c.priority,
       c.cursor_lsn || ':' || c.cursor_idx AS cursor, c.delivered, c.absorbed,
       walbrook.dead_ever(c) AS dead, c.paused_at, c.generation, c.last_error
  FROM walbrook.consumers c
 WHERE %(named)s::text IS NULL OR c.name = %(named)s OR c.source || '/' || c.name = %(named)s
 ORDER BY c.source, c.name LIMIT %(most)s
"""
_LAG = """
SELECT v.source, v.consumer, v.cursor, v.lag_bytes, v.lag_seconds, v.moved_at
  FROM walbrook.cursors v
 WHERE %(named)s::text IS NULL OR v.consumer = %(named)s
    OR v.source || '/' || v.consumer = %(named)s
 ORDER BY v.lag_seconds DESC NULLS LAST, v.source, v.consumer LIMIT %(most)s
"""
# Not the texts of errors, which may quote rows.
_QUEUE = """
SELECT walbrook.called(c.source, c.name) AS consumer,
       w.commit_lsn || ':' || w.commit_idx AS cursor, w.table_schema, w.table_name, w.action,
       w.deliveries, w.due_at, w.lease_until, w.holder
  FROM walbrook.consumers c
 CROSS JOIN LATERAL (
       (SELECT e.commit_lsn, e.commit_idx, e.table_schema, e.table_name, e.action, e.deliveries,
               e.due_at, e.lease_until, e.holder
          FROM walbrook.events e WHERE e.consumer = c.id
         ORDER BY e.commit_lsn, e.commit_idx LIMIT %(most)s)
        UNION ALL
       (SELECT r.commit_lsn, r.commit_idx, r.table_schema, r.table_name, r.action,
               coalesce(f.deliveries, 0), f.due_at, f.lease_until, f.holder
          FROM walbrook.pull_messages r
          LEFT JOIN walbrook.pull_in_flight f
            ON f.consumer = r.consumer AND f.commit_lsn = r.commit_lsn
           AND f.commit_idx = r.commit_idx
         WHERE r.consumer = c.id ORDER BY r.commit_lsn, r.commit_idx LIMIT %(most)s)) w
 WHERE %(named)s::text IS NULL OR c.name = %(named)s OR c.source || '/' || c.name = %(named)s
 ORDER BY w.commit_lsn, w.commit_idx, consumer LIMIT %(most)s
"""
_AUDIT = """
SELECT id, at, channel, actor, database_role, action, arguments, result
  FROM walbrook.audit
 WHERE %(named)s::text IS NULL OR action = %(named)s
 ORDER BY id DESC LIMIT %(most)s
"""
_HEALTH = """
SELECT source, consumer, kind, severity, what, fix, since FROM walbrook.health LIMIT %(most)s
"""
_KNOWN = """
SELECT FROM walbrook.consumers WHERE name = %(named)s OR source || '/' || name = %(named)s
"""
_STATEMENTS: Final = {
    Listing.SOURCES: _SOURCES,
    Listing.SINKS: _SINKS,
    Listing.LAG: _LAG,
    Listing.QUEUE: _QUEUE,
    Listing.AUDIT: _AUDIT,
}


def listed(
    connection: Connection, listing: Listing, named: str | None = None, most: int = LISTED_MAX
) -> list[State]:
    """The rows of a listing, of one name if it is given."""
    with refusals():
        rows = connection.cursor(row_factory=dict_row)
        given = {"named": named, "most": most}
        found = rows.execute(_STATEMENTS[listing], given).fetchall()
        if found or named is None or listing in (Listing.AUDIT, Listing.SOURCES):
            return found
        if connection.execute(_KNOWN, given).fetchone() is None:
            raise OperatorError(
                f"there is no consumer {named}", fix="walbrook sinks lists them", kind="unknown"
            )
        return []


def health(connection: Connection) -> list[State]:
    """What is wrong now, the newest first."""
    with refusals():
        rows = connection.cursor(row_factory=dict_row)
        return rows.execute(_HEALTH, {"most": LISTED_MAX}).fetchall()
