"""Ledgers as the state database knows them: their names, and trimming them.

What must always hold: a consumer's cursor and the name of its ledger are read together. The name
changes when the cursor is moved back, so that nobody delivers from the new place under the old
name, and leaves out what is to be sent again.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdc.connection import Connection
from cdc.cursor import Cursor, parse_lsn

_STANDING = """
SELECT name, cursor_lsn::text, cursor_idx, ledger::text
  FROM walbrook.consumers WHERE source = %s AND active
"""
TRIM = """
DELETE FROM walbrook.ledger
 WHERE ledger = %(ledger)s::uuid AND NOT queued
   AND (high_lsn, high_idx) < (%(lsn)s::pg_lsn, %(idx)s)
"""
"""What is below a consumer's cursor cannot come again."""

# What was noted in the moment in which a cursor was moved back, or left its queue in another way.
_SWEEP = """
DELETE FROM walbrook.ledger l
 WHERE NOT EXISTS (
       SELECT FROM walbrook.consumers c
        WHERE c.ledger = l.ledger
          AND (NOT l.queued OR EXISTS (
               SELECT FROM walbrook.events e
                WHERE e.consumer = c.id AND e.commit_lsn = l.high_lsn
                  AND e.commit_idx = l.high_idx)))
"""


@dataclass(frozen=True)
class Standing:
    """Where a consumer stands, and what its ledger is known by there."""

    cursor: Cursor
    ledger: str


def standing_consumers(connection: Connection, source: str) -> dict[str, Standing]:
    """Each active consumer of a source."""
    rows = connection.execute(_STANDING, (source,)).fetchall()
    return {
        str(name): Standing(Cursor(parse_lsn(str(lsn)), int(str(idx))), str(ledger))
        for name, lsn, idx, ledger in rows
    }


def sweep_ledgers(connection: Connection) -> None:
    """Forget what belongs to no consumer any more, and to no message of its queue."""
    connection.execute(_SWEEP)
