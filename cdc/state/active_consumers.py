"""Who may be served now: the active consumers of a source that no operator holds back.

Invariant: a paused consumer is served by no worker, and counts in everything else: it holds the
restart cursor and keeps its place. A consumer's cursor, the name of its ledger and its generation
are read together: a rewind changes them together, so that no worker delivers from the new place
under the old name or to the old generation, and leaves out what is to be sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of
from cdc.generation import Generation

_READ = """
SELECT c.name, c.cursor_lsn::text, c.cursor_idx, c.ledger::text, c.generation, c.truncation,
       c.paused_at IS NOT NULL,
       EXISTS (SELECT FROM walbrook.gaps g
                WHERE g.source = c.source AND g.consumer = c.name AND g.reported_at IS NULL)
  FROM walbrook.consumers c WHERE c.source = %s AND c.active
"""


@dataclass(frozen=True)
class ActiveConsumers:
    """The active consumers of a source with their cursors, at one moment."""

    served: dict[str, Cursor]
    paused: dict[str, Cursor]
    unreported: frozenset[str] = frozenset()  # whose sinks have still to get a gap message
    ledgers: dict[str, str] = field(default_factory=dict)  # the name of each one's ledger
    generations: dict[str, Generation] = field(default_factory=dict)

    @property
    def cursors(self) -> dict[str, Cursor]:
        """Where all of them stand."""
        return self.served | self.paused


def read_active_consumers(connection: Connection, source: str) -> ActiveConsumers:
    """Who is to be served, in one look."""
    found = ActiveConsumers({}, {})
    unreported: set[str] = set()
    rows = connection.execute(_READ, (source,)).fetchall()
    for name, lsn, idx, ledger, generation, truncation, paused, owes in rows:
        kept = found.paused if paused else found.served
        kept[str(name)] = cursor_of(lsn, idx)
        found.ledgers[str(name)] = str(ledger)
        found.generations[str(name)] = Generation(int(str(generation)), int(str(truncation)))
        if owes:
            unreported.add(str(name))
    return replace(found, unreported=frozenset(unreported))
