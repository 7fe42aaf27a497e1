"""The partitions of consumers in event-time order, as rows: what SQL shows, what is taken up again.

Invariants: the largest event time of a table, and how many of its changes came late, are
those of all that was read when the consumer was last settled; everything else is there to be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from cdc.connection import Connection

_SHOW = """
INSERT INTO walbrook.event_partitions AS p
       (consumer, table_name, seen_to, watermark, idle_since, buffered)
SELECT %(id)s, n.* FROM unnest(%(table)s::text[], %(seen_to)s::bigint[], %(watermark)s::bigint[],
                               %(idle_since)s::timestamptz[], %(buffered)s::bigint[]) n
    ON CONFLICT (consumer, table_name) DO UPDATE
   SET seen_to = excluded.seen_to, watermark = excluded.watermark,
       idle_since = excluded.idle_since, buffered = excluded.buffered, shown_at = clock_timestamp()
"""
_KEEP_EVENTS = """
INSERT INTO walbrook.event_partitions AS p (consumer, table_name, last_event, late)
SELECT %(id)s, n.* FROM unnest(%(table)s::text[], %(last_event)s::bigint[], %(late)s::bigint[]) n
    ON CONFLICT (consumer, table_name) DO UPDATE
   SET last_event = excluded.last_event, late = excluded.late
"""
_FORGET_EVENTS = "UPDATE walbrook.event_partitions SET last_event = NULL WHERE consumer = %s"
_FORGET_PARTITIONS = """
DELETE FROM walbrook.event_partitions WHERE consumer = %s AND NOT table_name = ANY (%s::text[])
"""
_READ_PARTITIONS = """
SELECT table_name, last_event, late FROM walbrook.event_partitions WHERE consumer = %s
"""
_TABLES = """
SELECT p.table_name FROM walbrook.event_partitions p JOIN walbrook.consumers c ON c.id = p.consumer
 WHERE c.name = %s AND c.source = %s
"""


@dataclass(frozen=True)
class PartitionRow:
    """What SQL shows of a partition."""

    table: str
    seen_to: int | None
    watermark: int | None
    idle_since: datetime | None
    buffered: int


@dataclass(frozen=True)
class Seen:
    """What was seen of a table, by all that was read of it."""

    last_event: int
    late: int


def keep_seen(connection: Connection, consumer: int, seen: Mapping[str, Seen]) -> None:
    """Store it with what was released, inside the settling transaction.

    Nothing that was read later may be in it, or what is read again would be late by itself.
    """
    if seen:
        columns = {
            "table": list(seen),
            "last_event": [each.last_event for each in seen.values()],
            "late": [each.late for each in seen.values()],
        }
        connection.execute(_KEEP_EVENTS, {"id": consumer, **columns})


def forget_events(connection: Connection, consumer: int) -> None:
    """All of a database comes again, so its watermarks begin again; what came late stays
    counted."""
    connection.execute(_FORGET_EVENTS, (consumer,))


def show_partitions(connection: Connection, consumer: int, rows: list[PartitionRow]) -> None:
    """Let SQL say what each partition of a consumer in one database is at."""
    with connection.transaction():
        connection.execute(_FORGET_PARTITIONS, (consumer, [row.table for row in rows]))
        if rows:
            names = ("table", "seen_to", "watermark", "idle_since", "buffered")
            columns = {name: [getattr(row, name) for row in rows] for name in names}
            connection.execute(_SHOW, {"id": consumer, **columns})


def read_partitions(connection: Connection, consumer: int) -> dict[str, tuple[int | None, int]]:
    """Of each partition the largest event time that was seen, and how many came late."""
    rows = connection.execute(_READ_PARTITIONS, (consumer,)).fetchall()
    return {str(table): (_number(last), int(str(late))) for table, last, late in rows}


def known_tables(connection: Connection, consumer: str, source: str) -> dict[str, str]:
    """The partitions of a consumer in one database, as tables of their own."""
    rows = connection.execute(_TABLES, (consumer, source)).fetchall()
    return {str(table): str(table) for (table,) in rows}


def _number(value: object) -> int | None:
    return None if value is None else int(str(value))
