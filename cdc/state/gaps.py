"""Gaps: what a consumer will never get, as rows in ``walbrook.gaps``.

Invariant: a cursor moves over a gap only in the transaction that records it, and the consumer's
sink gets a gap message before anything that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn
from cdc.state.fence import FENCE_TO_MOVE, fenced
from cdc.state.positions import move_restart

# A gap that goes on where an unreported one of the same reason ends is one gap with it.
_PASS = """
WITH behind AS (
    SELECT c.source, c.name, c.cursor_lsn, c.cursor_idx, n.lsn, n.idx, n.reason
      FROM walbrook.consumers c
      JOIN unnest(%(names)s::text[], %(lsns)s::pg_lsn[], %(idxs)s::bigint[], %(reasons)s::text[])
           AS n (name, lsn, idx, reason) ON n.name = c.name
     WHERE c.source = %(source)s AND c.active
       AND (c.cursor_lsn, c.cursor_idx) < (n.lsn, n.idx)
       FOR NO KEY UPDATE OF c),
grown AS (
    UPDATE walbrook.gaps g SET to_lsn = b.lsn, to_idx = b.idx, noted_at = clock_timestamp()
      FROM behind b
     WHERE g.source = b.source AND g.consumer = b.name AND g.reason = b.reason
       AND g.reported_at IS NULL AND (g.to_lsn, g.to_idx) = (b.cursor_lsn, b.cursor_idx)
    RETURNING g.consumer),
noted AS (
    INSERT INTO walbrook.gaps AS g (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason)
    SELECT b.source, b.name, b.cursor_lsn, b.cursor_idx, b.lsn, b.idx, b.reason FROM behind b
     WHERE b.name NOT IN (SELECT consumer FROM grown)
        ON CONFLICT (source, consumer, from_lsn, from_idx)
        DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx, reason = excluded.reason,
                      noted_at = excluded.noted_at, reported_at = NULL
         WHERE (g.to_lsn, g.to_idx) < (excluded.to_lsn, excluded.to_idx))
UPDATE walbrook.consumers c
   SET cursor_lsn = b.lsn, cursor_idx = b.idx, moved_at = clock_timestamp()
  FROM behind b WHERE c.source = b.source AND c.name = b.name
"""
_BELOW = """
SELECT name FROM walbrook.consumers
 WHERE source = %s AND active AND (cursor_lsn, cursor_idx) < (%s::pg_lsn, %s)
"""
_UNREPORTED = """
SELECT id, consumer, from_lsn::text, from_idx, to_lsn::text, to_idx, reason, noted_at, bridged
  FROM walbrook.gaps g WHERE source = %s AND reported_at IS NULL
   AND NOT EXISTS (SELECT FROM walbrook.consumers c
                    WHERE c.source = g.source AND c.name = g.consumer AND c.paused_at IS NOT NULL)
 ORDER BY to_lsn, to_idx, id
"""
_REPORTED = """
UPDATE walbrook.gaps g SET reported_at = clock_timestamp() FROM walbrook.sources s
 WHERE g.id = %(id)s AND (g.to_lsn, g.to_idx) = (%(lsn)s::pg_lsn, %(idx)s)
   AND s.name = g.source AND s.term = %(term)s
"""


class GapReason(StrEnum):
    """Why the service itself let a consumer's changes go; operators have reasons of their own."""

    EVICTED = "evicted"  # log.on_full: evict
    BACKLOG = "backlog"  # the consumer's max_backlog
    DISABLED = "disabled"  # the log let it go while the consumer was disabled


@dataclass(frozen=True)
class Loss:
    """What a consumer will not get: everything from its cursor up to ``end``, exclusive."""

    consumer: str
    end: Cursor
    reason: GapReason


@dataclass(frozen=True)
class Gap:
    """Everything of one consumer from ``start`` up to ``end``, exclusive."""

    id: int
    consumer: str
    start: Cursor
    end: Cursor
    reason: str
    noted_at: datetime
    bridged: object = None  # how a repair bridges it, as JSON

    @property
    def cursor(self) -> Cursor:
        """The place of the gap's own message: behind all that is lost, before all that follows.

        No change has it: commit LSNs are not that close to each other.
        """
        if self.end.idx:
            return Cursor(self.end.lsn, self.end.idx - 1)
        return Cursor(self.end.lsn - 1, 0)


def skip_evicted(connection: Connection, *, source: str, term: int, evicted: Cursor) -> None:
    """Move consumers that the log has left behind to what it still holds, and record the gaps."""
    with connection.transaction():
        if connection.execute(FENCE_TO_MOVE, (source, term)).fetchone() is None:
            raise fenced(source)
        below = connection.execute(
            _BELOW, (source, format_lsn(evicted.lsn), evicted.idx)
        ).fetchall()
        losses = [Loss(str(name), evicted, GapReason.EVICTED) for (name,) in below]
        if pass_over(connection, source, losses):
            move_restart(connection, source, evicted)


def pass_over(connection: Connection, source: str, losses: Sequence[Loss]) -> int:
    """Move consumers over what they lose, and record the gaps; returns how many were moved.

    The caller's transaction holds the source's row.
    """
    if not losses:
        return 0
    return connection.execute(
        _PASS,
        {
            "source": source,
            "names": [loss.consumer for loss in losses],
            "lsns": [format_lsn(loss.end.lsn) for loss in losses],
            "idxs": [loss.end.idx for loss in losses],
            "reasons": [str(loss.reason) for loss in losses],
        },
    ).rowcount


def unreported_gaps(connection: Connection, source: str) -> list[Gap]:
    """Gaps of which the sinks were sent no message yet, in order; paused consumers are left out."""
    rows = connection.execute(_UNREPORTED, (source,)).fetchall()
    return [
        Gap(
            int(str(number)),
            str(consumer),
            cursor_of(from_lsn, from_idx),
            cursor_of(to_lsn, to_idx),
            str(reason),
            datetime.fromisoformat(str(noted_at)),
            bridged,
        )
        for number, consumer, from_lsn, from_idx, to_lsn, to_idx, reason, noted_at, bridged in rows
    ]


def gap_reported(connection: Connection, gap: Gap, term: int) -> None:
    """The consumer's sink has it, unless the gap has grown meanwhile: then the message is sent
    again."""
    connection.execute(
        _REPORTED,
        {"id": gap.id, "lsn": format_lsn(gap.end.lsn), "idx": gap.end.idx, "term": term},
    )
