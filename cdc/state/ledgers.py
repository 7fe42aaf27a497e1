"""Trimming the ledgers that lie in the state database."""

from __future__ import annotations

from cdc.connection import Connection

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


def sweep_ledgers(connection: Connection) -> None:
    """Forget what belongs to no consumer any more, and to no message of its queue."""
    connection.execute(_SWEEP)
