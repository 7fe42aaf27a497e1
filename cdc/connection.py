"""Ordinary connections to Postgres on which every wait has a bound.

A statement is ended by the server after its bound; a server that is gone without a word is noticed
by TCP, in about half a minute, not after the kernel's quarter of an hour. The server notices a
client that is gone in the same way, in about eleven seconds: until then it keeps its locks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

Connection = psycopg.Connection[tuple[object, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[object, ...]]

LIVENESS: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    # Whatever the database's own encoding is, and whatever PGCLIENTENCODING says.
    "client_encoding": "UTF8",
}
"""Parameters for any connection, replication included."""

_OF_THE_SERVER = {
    # A connection that holds a lock may be idle for months; the server must not end it for that.
    "idle_session_timeout": "0",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
}
"""How the server treats any connection of ours, replication included."""


_STATEMENT_S = 30
_LARGE_BYTES = 8 << 20
_BYTES_PER_S = 1 << 20  # what even a slow server and a slow network manage
_ALLOW = """
SELECT set_config('statement_timeout', %s, true),
       set_config('idle_in_transaction_session_timeout', %s, true)
"""


def connect(dsn: str, *, name: str, statement_s: int = _STATEMENT_S) -> Connection:
    """An autocommit connection; ``name`` is what ``pg_stat_activity`` shows after ``walbrook``."""
    return psycopg.connect(dsn, autocommit=True, **_parameters(dsn, name, statement_s))


def allow_time_for(connection: Connection, size: int) -> None:
    """Let the statements of this transaction take as long as ``size`` bytes may need.

    The server counts what it waits for within one large message as idle time.
    """
    if size > _LARGE_BYTES:
        allowed = f"{_STATEMENT_S + size // _BYTES_PER_S}s"
        connection.execute(_ALLOW, (allowed, allowed))


async def connect_async(dsn: str, *, name: str, statement_s: int = _STATEMENT_S) -> AsyncConnection:
    """The same for an event loop."""
    return await psycopg.AsyncConnection.connect(
        dsn, autocommit=True, **_parameters(dsn, name, statement_s)
    )


def _parameters(dsn: str, name: str, statement_s: int) -> dict[str, Any]:
    settings = {
        "statement_timeout": f"{statement_s}s",
        # A process that is frozen in a transaction must not hold up its successor.
        "idle_in_transaction_session_timeout": "60s",
    }
    return {
        "application_name": f"walbrook:{name}",
        "options": with_options(dsn, settings),
        **LIVENESS,
    }


def with_options(dsn: str, settings: Mapping[str, str]) -> str:
    """The options of a connection: those its owner gave, and ours behind them."""
    given = conninfo_to_dict(dsn).get("options")
    ours = {**_OF_THE_SERVER, **settings}
    spelled = [f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in ours.items()]
    return " ".join([str(given), *spelled] if given else spelled)
