"""The reader's ordinary connection to the source: the lock on the slot, and what the catalog says.

The lock is a session advisory lock, so that of two readers of one slot the second waits and says
why.
"""

from __future__ import annotations

import psycopg

from cdc.connection import connect
from cdc.cursor import Cursor, format_lsn, parse_lsn
from cdc.decode.relation import Relation
from cdc.errors import GapError, SourceError, TransientError

_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('walbrook.slot.' || %s, 0))"
_SLOT = """
SELECT confirmed_flush_lsn::text, wal_status, plugin FROM pg_replication_slots WHERE slot_name = %s
"""
_END_OF_WAL = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_flush_lsn() END::text, pg_is_in_recovery()
"""


# The index that identifies a row: the one named as replica identity, or else the primary key.
_KEY = """
SELECT a.attname
  FROM pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_attribute a ON a.attnum = k.attnum
 WHERE i.indrelid = %(oid)s::oid AND a.attrelid = i.indrelid AND k.place <= i.indnkeyatts
   AND CASE WHEN %(identity)s = 'i' THEN i.indisreplident ELSE i.indisprimary END
 ORDER BY k.place
"""


class SlotControl:
    """The ordinary connection to the source: lock first, then look at the slot."""

    def __init__(self, dsn: str, slot: str) -> None:
        self._slot = slot
        try:
            self._connection = connect(dsn, name=f"{slot}:lock", statement_s=10)
            row = self._connection.execute(_LOCK, (slot,)).fetchone()
        except psycopg.OperationalError as error:
            raise TransientError(f"the source does not answer: {error}".strip()) from error
        if row is None or not row[0]:
            self._connection.close()
            raise TransientError(
                f"another service reads slot {slot}",
                fix="stop the other one; this one goes on by itself once the slot is free",
            )

    def check(self, resume: Cursor) -> None:
        """Refuse a slot that is gone, lost, or further than what we hold; and another history."""
        try:
            row = self._connection.execute(_SLOT, (self._slot,)).fetchone()
            end = self._connection.execute(_END_OF_WAL).fetchone()
        except psycopg.OperationalError as error:
            raise TransientError(f"the source does not answer: {error}".strip()) from error
        if row is None:
            raise SourceError(
                f"replication slot {self._slot} no longer exists, and with it every change since "
                f"{format_lsn(resume.lsn)}",
                fix="create the slot again and accept the gap: set restart_lsn in "
                "walbrook.sources and cursor_lsn in walbrook.consumers to its confirmed_flush_lsn",
            )
        if end is not None and parse_lsn(str(end[0])) < resume.lsn:
            if end[1]:
                raise TransientError(f"the standby has replayed to {end[0]}, not yet to {resume}")
            raise GapError(
                f"the source's WAL ends at {end[0]}, before {resume}, up to which it was read: "
                "this is an older state of the database (a restore, or a standby that was behind), "
                "and what it writes now under the same positions would be taken for known",
                fix="start anew: empty log.directory, delete the source's row in walbrook.sources, "
                "recreate the slot, and give the sinks empty destinations",
            )
        confirmed, wal_status, plugin = row
        if wal_status == "lost":
            raise SourceError(
                f"replication slot {self._slot} was invalidated: the server removed WAL it needed",
                fix="drop it, create it again, and accept the gap as docs/operations.md says",
            )
        if plugin != "pgoutput":
            raise SourceError(
                f"replication slot {self._slot} uses the plugin {plugin}",
                fix="configure a slot that was created with pgoutput",
            )
        if parse_lsn(str(confirmed)) > resume.lsn:
            raise GapError(
                f"slot {self._slot} stands at {confirmed}, beyond {resume}, the first change we "
                "still need: the changes between are gone from the source",
                fix="if that is accepted, set restart_lsn in walbrook.sources and cursor_lsn in "
                f"walbrook.consumers to {confirmed} and restart_idx, cursor_idx to 0",
            )

    def key_of(self, relation: Relation) -> list[str]:
        """The columns of a table's key in key order, as the catalog has it now."""
        try:
            rows = self._connection.execute(
                _KEY, {"oid": relation.oid, "identity": relation.replica_identity}
            ).fetchall()
        except psycopg.OperationalError as error:
            raise TransientError(f"the source does not answer: {error}".strip()) from error
        return [str(name) for (name,) in rows]

    def close(self) -> None:
        self._connection.close()
