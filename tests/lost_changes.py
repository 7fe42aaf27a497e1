"""A source whose reader has said that changes are lost, as ``walbrook.accept_gap`` requires it."""

from __future__ import annotations

from cdc.connection import Connection

_LOST = """
UPDATE walbrook.sources SET state = 'stopped', head_lsn = %(end)s::pg_lsn WHERE name = %(source)s
"""
_EVENT = """
INSERT INTO walbrook.health_events (source, kind, severity, what)
VALUES (%(source)s, 'slot_ahead', 'error', 'the slot stands beyond what is needed')
"""


def note_lost_changes(state: Connection, source: str, *, end: str) -> None:
    """Note what a reader that misses changes notes; ``end`` is the end of the source's WAL."""
    for statement in (_LOST, _EVENT):
        state.execute(statement, {"source": source, "end": end})
