"""What operators say of the watermarks of a consumer in event-time order, as rows.

``walbrook.advance_watermark`` and ``walbrook.set_partition_idle`` write it, the consumer's worker
reads it: when it is taken up, and each time it looks for what operators did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from cdc.connection import Connection

_PUSHED = """
SELECT NULL, e.pushed_to FROM walbrook.event_time e
 WHERE e.consumer = %(consumer)s AND e.pushed_to IS NOT NULL
UNION ALL
SELECT c.source, s.pushed_to
  FROM walbrook.event_sources s JOIN walbrook.consumers c ON c.id = s.consumer
 WHERE c.name = %(consumer)s AND c.source = ANY (%(sources)s) AND c.active
   AND s.pushed_to IS NOT NULL
"""
_MARKED = """
SELECT c.source, p.table_name, p.marked_idle, p.marked_at
  FROM walbrook.event_partitions p JOIN walbrook.consumers c ON c.id = p.consumer
 WHERE c.name = %(consumer)s AND c.source = ANY (%(sources)s) AND c.active
   AND p.marked_at IS NOT NULL
"""


@dataclass(frozen=True)
class Mark:
    """How a partition was last marked."""

    idle: bool
    at: datetime


@dataclass(frozen=True)
class Controls:
    """Watermarks that were pushed, by database and under None for all; marks by partition."""

    pushed: dict[str | None, int]
    marks: dict[tuple[str, str], Mark]


def read_controls(connection: Connection, consumer: str, sources: Iterable[str]) -> Controls:
    named = {"consumer": consumer, "sources": [*sources]}
    pushed = connection.execute(_PUSHED, named).fetchall()
    marked = connection.execute(_MARKED, named).fetchall()
    return Controls(
        {None if source is None else str(source): int(str(to)) for source, to in pushed},
        {
            (str(source), str(table)): Mark(bool(idle), at)
            for source, table, idle, at in marked
            if isinstance(at, datetime)
        },
    )
