"""How far the service is, as anyone can read it in SQL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

_IS_THERE: Final = "SELECT to_regclass('walbrook.cursors') IS NOT NULL"
_STREAMING: Final = "SELECT FROM walbrook.sources WHERE state = 'streaming'"
_CONSUMERS: Final = """
SELECT c.name, c.delivered + c.absorbed - (
           SELECT coalesce(sum(b.rows - b.dropped), 0)::bigint FROM walbrook.backfill_progress b
            WHERE b.source = c.source AND b.consumer = c.name), v.lag_bytes, v.lag_seconds
  FROM walbrook.consumers c
  JOIN walbrook.cursors v ON v.source = c.source AND v.consumer = c.name
 ORDER BY c.name
"""
_LIVE: Final = "SELECT bool_and(state = 'live') FROM walbrook.consumers"
_BACKFILLED: Final = """
SELECT bool_and(c.initial_backfill IS NULL) AND NOT EXISTS (
       SELECT FROM walbrook.backfills WHERE state <> 'done') FROM walbrook.consumers c
"""


@dataclass(frozen=True)
class ConsumerProgress:
    """One consumer: how many changes it says it delivered, and how far it is behind."""

    name: str
    delivered: int
    lag_bytes: int
    lag_s: float


def is_streaming(connection: Connection) -> bool:
    """Whether a reader has begun to read the slot."""
    row = connection.execute(_IS_THERE).fetchone()
    return bool(row and row[0]) and connection.execute(_STREAMING).fetchone() is not None


def consumers(connection: Connection) -> list[ConsumerProgress]:
    """Every active consumer."""
    return [
        ConsumerProgress(name, delivered, lag_bytes or 0, lag_s)
        for name, delivered, lag_bytes, lag_s in connection.execute(_CONSUMERS)
    ]


def slowest(connection: Connection) -> int:
    """What the consumer that is farthest behind has delivered."""
    return min((consumer.delivered for consumer in consumers(connection)), default=0)


def is_live(connection: Connection) -> bool:
    """Whether every consumer takes its changes from the feed, so Spark has started."""
    row = connection.execute(_LIVE).fetchone()
    return bool(row and row[0])


def is_backfilled(connection: Connection) -> bool:
    """Whether every consumer has the rows that existed before."""
    row = connection.execute(_BACKFILLED).fetchone()
    return bool(row and row[0])
