"""Who acts: the state database hears it, and its functions write it into ``walbrook.audit``.

Psql says nothing, and counts as its database role. The command line and the HTTP API set
``ACTOR`` and hand their connections to ``identify``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from psycopg.types.json import Jsonb

from cdc.connection import Connection


class Channel(StrEnum):
    """The way by which an act came."""

    COMMAND_LINE = "command line"
    HTTP = "http"


@dataclass(frozen=True)
class Actor:
    """The user of the command line, or the name of the HTTP token."""

    channel: Channel
    name: str


ACTOR: Final[ContextVar[Actor | None]] = ContextVar("actor", default=None)

_IDENTIFY = """
SELECT set_config('walbrook.channel', %s, false), set_config('walbrook.actor', %s, false)
"""
_NOTE = "SELECT walbrook.note_act(%s, %s)"


def identify(connection: Connection) -> None:
    """Let the acts on this connection be those of ``ACTOR``."""
    actor = ACTOR.get()
    if actor is not None:
        connection.execute(_IDENTIFY, (actor.channel.value, actor.name.replace("\0", "")))


def note_act(connection: Connection, action: str, arguments: Mapping[str, object]) -> None:
    """Add a row for an act that is no function of SQL."""
    identify(connection)
    connection.execute(_NOTE, (action, Jsonb(dict(arguments))))
