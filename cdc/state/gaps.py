"""Gaps: what a consumer will never get, as rows in ``walbrook.gaps``.

What must always hold: a cursor moves over a gap only in the transaction that records it, and a gap
is told to the consumer's sink before anything that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn, parse_lsn
from cdc.state.fence import FENCE_TO_MOVE, fenced
from cdc.state.positions import move_restart

_NOTE = """
INSERT INTO walbrook.gaps AS g (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason)
SELECT source, name, cursor_lsn, cursor_idx, %(lsn)s::pg_lsn, %(idx)s, 'evicted'
  FROM walbrook.consumers
 WHERE source = %(source)s AND active
   AND (cursor_lsn, cursor_idx) < (%(lsn)s::pg_lsn, %(idx)s)
    ON CONFLICT (source, consumer, from_lsn, from_idx)
    DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx, reason = excluded.reason,
                  noted_at = excluded.noted_at, told_at = NULL
     WHERE (g.to_lsn, g.to_idx) < (excluded.to_lsn, excluded.to_idx)
"""
_SKIP = """
UPDATE walbrook.consumers SET cursor_lsn = %(lsn)s::pg_lsn, cursor_idx = %(idx)s,
       moved_at = clock_timestamp()
 WHERE source = %(source)s AND active
   AND (cursor_lsn, cursor_idx) < (%(lsn)s::pg_lsn, %(idx)s)
"""
_UNTOLD = """
SELECT id, consumer, from_lsn::text, from_idx, to_lsn::text, to_idx, reason, noted_at
  FROM walbrook.gaps g WHERE source = %s AND told_at IS NULL
   AND NOT EXISTS (SELECT FROM walbrook.consumers c
                    WHERE c.source = g.source AND c.name = g.consumer AND c.paused_at IS NOT NULL)
 ORDER BY to_lsn, to_idx, id
"""
_TOLD = """
UPDATE walbrook.gaps g SET told_at = clock_timestamp() FROM walbrook.sources s
 WHERE g.id = %s AND s.name = g.source AND s.term = %s
"""


@dataclass(frozen=True)
class Gap:
    """Everything of one consumer from ``start`` up to ``end``, exclusive."""

    id: int
    consumer: str
    start: Cursor
    end: Cursor
    reason: str
    noted_at: datetime

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
    place = {"source": source, "lsn": format_lsn(evicted.lsn), "idx": evicted.idx}
    with connection.transaction():
        if connection.execute(FENCE_TO_MOVE, (source, term)).fetchone() is None:
            raise fenced(source)
        connection.execute(_NOTE, place)
        if connection.execute(_SKIP, place).rowcount:
            move_restart(connection, source, evicted)


def untold_gaps(connection: Connection, source: str) -> list[Gap]:
    """The gaps that the consumers' sinks have not heard of, in order; who is paused is not told."""
    rows = connection.execute(_UNTOLD, (source,)).fetchall()
    return [
        Gap(
            int(str(number)),
            str(consumer),
            Cursor(parse_lsn(str(from_lsn)), int(str(from_idx))),
            Cursor(parse_lsn(str(to_lsn)), int(str(to_idx))),
            str(reason),
            datetime.fromisoformat(str(noted_at)),
        )
        for number, consumer, from_lsn, from_idx, to_lsn, to_idx, reason, noted_at in rows
    ]


def gap_told(connection: Connection, gap: Gap, term: int) -> None:
    """The consumer's sink has it."""
    connection.execute(_TOLD, (gap.id, term))
