"""Ordinary connections to Postgres on which nothing waits for ever.

A statement is ended by the server after its bound; a peer that is gone without a word is noticed by
TCP, in about half a minute, not after the kernel's quarter of an hour.
"""

from __future__ import annotations

from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[object, ...]]

LIVENESS: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Parameters for any connection, replication included."""


def connect(dsn: str, *, name: str, statement_s: int = 30) -> Connection:
    """An autocommit connection; ``name`` is what ``pg_stat_activity`` shows after ``walbrook``."""
    return psycopg.connect(
        dsn,
        autocommit=True,
        application_name=f"walbrook:{name}",
        options=f"-c statement_timeout={statement_s}s",
        **LIVENESS,
    )
