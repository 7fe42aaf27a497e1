"""Notifications of what operators do: the functions of schema walbrook notify the channel.

A notification only hastens: what is missed, as while a connection is lost, is seen by the look at
the consumers' rows that is taken each second.
"""

from __future__ import annotations

import json

from cdc.connection import Connection

_LISTEN = "LISTEN walbrook"
_HEARD_MAX = 1_000  # in one go; what is left is heard the next time


def listen(connection: Connection) -> Connection:
    """The same connection, which hears from now on."""
    connection.execute(_LISTEN)
    return connection


def heard(connection: Connection, source: str) -> bool:
    """Whether somebody has done something to a consumer of this source; does not wait."""
    notes = [note.payload for note in connection.notifies(timeout=0, stop_after=_HEARD_MAX)]
    return any(_concerns(payload, source) for payload in notes)


def _concerns(payload: str, source: str) -> bool:
    """Anybody may notify; what cannot be read may concern us."""
    try:
        note = json.loads(payload)
    except ValueError:
        return True
    return not isinstance(note, dict) or note.get("source", source) == source
