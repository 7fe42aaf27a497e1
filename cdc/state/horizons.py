"""Horizons as rows: which transactions had ended where in a source's WAL.

A horizon is a place in the WAL and a transaction number of 64 bits. Invariant: every transaction
below the number had ended when the place was read, so its commit, if there is one, stands below the
place. A consumer whose cursor has reached the place has had all of them, and a repair need not
read what they wrote. Rows of a transaction that was open at that time carry its number or one
above it, which holds for its subtransactions too.

The reader notes one about every ten seconds. Those that no consumer needs are removed, and of more
than ``_MOST`` every second one. A crash or a failover gives places and numbers of WAL that was lost
to other transactions, so a reader that attaches removes every horizon above what was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn, parse_lsn

_MOST: Final = 1_000

# Places and numbers rise together on one server: what does not fit was noted on another one.
_REMOVE_FOREIGN = """
DELETE FROM walbrook.horizons h USING walbrook.sources s
 WHERE h.source = s.name AND s.name = %(source)s AND s.term = %(term)s
   AND (h.lsn > %(lsn)s::pg_lsn OR h.xid > %(xid)s)
"""
_REMOVE_ABOVE = """
DELETE FROM walbrook.horizons h USING walbrook.sources s
 WHERE h.source = s.name AND s.name = %s AND s.term = %s AND h.lsn > %s::pg_lsn
"""
_NOTE = """
INSERT INTO walbrook.horizons (source, lsn, xid)
SELECT s.name, %(lsn)s::pg_lsn, %(xid)s FROM walbrook.sources s
 WHERE s.name = %(source)s AND s.term = %(term)s
   AND NOT EXISTS (SELECT FROM walbrook.horizons h WHERE h.source = s.name AND h.xid >= %(xid)s)
    ON CONFLICT DO NOTHING
"""
_PRUNE = """
WITH numbered AS (
    SELECT h.lsn, row_number() OVER (ORDER BY h.lsn) AS number, count(*) OVER () AS total
      FROM walbrook.horizons h JOIN walbrook.sources s ON s.name = h.source
     WHERE s.name = %(source)s AND s.term = %(term)s),
needed AS (
    SELECT max(h.lsn) AS lsn FROM walbrook.horizons h JOIN walbrook.sources s ON s.name = h.source
     WHERE s.name = %(source)s AND h.lsn <= coalesce(
           (SELECT min(c.cursor_lsn) FROM walbrook.consumers c
             WHERE c.source = s.name AND c.active AND c.disabled_at IS NULL), s.restart_lsn))
DELETE FROM walbrook.horizons h USING numbered n, needed
 WHERE h.source = %(source)s AND h.lsn = n.lsn
   AND (h.lsn < needed.lsn OR n.total > %(most)s AND n.number %% 2 = 0)
"""
_AT = """
SELECT lsn::text, xid FROM walbrook.horizons
 WHERE source = %s AND lsn <= %s::pg_lsn ORDER BY lsn DESC LIMIT 1
"""


@dataclass(frozen=True)
class Horizon:
    """Every transaction below ``xid`` had ended below ``lsn``."""

    lsn: int
    xid: int


def note_horizon(connection: Connection, source: str, term: int, horizon: Horizon) -> None:
    """Note a horizon, and remove those that are not needed; an outdated start notes nothing."""
    given = {
        "source": source,
        "term": term,
        "lsn": format_lsn(horizon.lsn),
        "xid": horizon.xid,
        "most": _MOST,
    }
    with connection.transaction(), connection.pipeline():
        connection.execute(_REMOVE_FOREIGN, given)
        connection.execute(_NOTE, given)
        connection.execute(_PRUNE, given)


def remove_horizons_above(connection: Connection, source: str, term: int, lsn: int) -> None:
    """Remove what was noted beyond all that was read; an outdated start removes nothing."""
    connection.execute(_REMOVE_ABOVE, (source, term, format_lsn(lsn)))


def horizon_at(connection: Connection, source: str, cursor: Cursor) -> Horizon | None:
    """The latest horizon that a consumer at this cursor has reached; None: none was noted."""
    row = connection.execute(_AT, (source, format_lsn(cursor.lsn))).fetchone()
    return None if row is None else Horizon(parse_lsn(str(row[0])), int(str(row[1])))
