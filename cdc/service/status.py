"""What ``walbrook status`` shows: sources, consumers, cursors, lag, straight from SQL."""

from __future__ import annotations

from datetime import datetime

import psycopg
from rich.console import Group
from rich.table import Table

_SOURCES = """
SELECT name, state, date_trunc('second', clock_timestamp() - state_since)::text, slot,
       restart_lsn || ':' || restart_idx, coalesce(lane_error, last_error, '')
  FROM walbrook.sources ORDER BY name
"""
_CURSORS = """
SELECT v.source, v.consumer, v.cursor, v.lag_bytes, v.lag_seconds, v.moved_at,
       c.delivered, c.absorbed, coalesce(c.last_error, '')
  FROM walbrook.cursors v
  JOIN walbrook.consumers c ON c.source = v.source AND c.name = v.consumer
 ORDER BY 1, 2
"""


def status_tables(connection: psycopg.Connection[tuple[object, ...]]) -> Group:
    """Two tables: the sources and their readers; the consumers and their cursors."""
    sources = Table(title="Sources", title_justify="left")
    for heading in ("source", "reader", "for", "slot", "restart cursor", "error"):
        sources.add_column(heading, overflow="fold")
    for row in connection.execute(_SOURCES):
        sources.add_row(*(str(value) for value in row))
    consumers = Table(title="Consumers", title_justify="left")
    for heading in ("source", "consumer", "cursor"):
        consumers.add_column(heading, overflow="fold")
    for heading in ("lag", "lag s", "delivered", "absorbed"):
        consumers.add_column(heading, justify="right")
    consumers.add_column("moved")
    consumers.add_column("error", overflow="fold")
    for (
        source,
        consumer,
        cursor,
        lag,
        lag_s,
        moved,
        delivered,
        absorbed,
        error,
    ) in connection.execute(_CURSORS):
        consumers.add_row(
            str(source),
            str(consumer),
            str(cursor),
            _bytes(lag),
            f"{float(str(lag_s)):.1f}",
            f"{delivered:,}",
            f"{absorbed:,}",
            moved.strftime("%H:%M:%S") if isinstance(moved, datetime) else "",
            str(error),
        )
    return Group(sources, consumers)


def _bytes(count: object) -> str:
    """A size for people; a source that was never read has none."""
    if not isinstance(count, int):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,} {unit}"
        count //= 1024
    return ""
