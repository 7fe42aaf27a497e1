"""Notifications of what operators do (pause, resume, rewind, redeliver, …) to a running stage.
stage.

The functions of schema walbrook notify the channel; the stage then nudges its workers.

A notification only hastens: what is missed, as while a connection is lost, is seen by the look at
the consumers' rows that is taken each second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from cdc.connection import Connection

_LISTEN = "LISTEN walbrook"
_HEARD_MAX = 1_000  # in one go; what is left is heard the next time


def listen(connection: Connection) -> Connection:
    """The same connection, which hears from now on."""
    connection.execute(_LISTEN)
    return connection


@dataclass(frozen=True)
class Heard:
    """An operator has done something; ``resumed`` are the consumers that are to go on at once."""

    resumed: frozenset[str]


def heard(connection: Connection, source: str) -> Heard | None:
    """Returns what operators did to consumers of this source, None for nothing; does not wait."""
    notes = [note.payload for note in connection.notifies(timeout=0, stop_after=_HEARD_MAX)]
    notes_of_source = [note for note in map(_read, notes) if note.get("source", source) == source]
    if not notes_of_source:
        return None
    resumed = (note.get("consumer") for note in notes_of_source if note.get("action") == "resume")
    return Heard(frozenset(name for name in resumed if isinstance(name, str)))


def _read(payload: str) -> dict[str, object]:
    """Any client may notify; what cannot be read says nothing, and may concern us."""
    try:
        note = json.loads(payload)
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}
