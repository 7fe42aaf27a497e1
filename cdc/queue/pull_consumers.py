"""The rows of pull consumers: their settings, and where the storing of their messages stands.

Invariant: settings in ``walbrook.pull_settings`` are those of the configuration that was last
started, and a consumer's place in ``walbrook.pull_positions`` outlives every start.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import orjson

from cdc.change import synthetic_rows
from cdc.config import PullDestination, SinkConfig
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.decoding.format import ValueFormat
from cdc.decoding.shapes import Context, shape_for

_SETTINGS = """
INSERT INTO walbrook.pull_settings
       (consumer, visibility_s, max_in_flight, max_deliveries, retry_first_ms, retry_max_ms,
        max_messages, max_bytes, ttl_s, max_waiting, gap_message)
SELECT c.id, %(visibility_s)s, %(max_in_flight)s, %(max_deliveries)s, %(first_ms)s, %(max_ms)s,
       %(max_messages)s, %(max_bytes)s, %(ttl_s)s, %(max_waiting)s, %(gap_message)s
  FROM walbrook.consumers c WHERE c.source = %(source)s AND c.name = %(name)s
    ON CONFLICT (consumer) DO UPDATE
   SET visibility_s = excluded.visibility_s, max_in_flight = excluded.max_in_flight,
       max_deliveries = excluded.max_deliveries, retry_first_ms = excluded.retry_first_ms,
       retry_max_ms = excluded.retry_max_ms, max_messages = excluded.max_messages,
       max_bytes = excluded.max_bytes, ttl_s = excluded.ttl_s,
       max_waiting = excluded.max_waiting, gap_message = excluded.gap_message
"""
_PLACE = """
INSERT INTO walbrook.pull_positions (consumer, commit_lsn, commit_idx)
SELECT c.id, '0/0', -1 FROM walbrook.consumers c WHERE c.source = %s AND c.name = %s
    ON CONFLICT (consumer) DO NOTHING
"""
_LOCK = """
SELECT FROM walbrook.pull_positions s JOIN walbrook.consumers c ON c.id = s.consumer
 WHERE c.source = %s AND c.name = %s FOR UPDATE OF s
"""
# What is stored counts from the start: a cap may have been set that was not there before.
_COUNT = """
UPDATE walbrook.pull_positions s SET messages_most = n.messages, bytes_most = n.bytes
  FROM walbrook.consumers c,
       LATERAL (SELECT count(*) AS messages, coalesce(sum(r.bytes), 0) AS bytes
                  FROM walbrook.pull_messages r WHERE r.consumer = c.id) n
 WHERE s.consumer = c.id AND c.source = %s AND c.name = %s
"""

# Marks that walbrook.gap_message finds again; no name or host has these in it.
_LSN, _IDX = 7_777_777_777_777_777_777, 666_666_666_666
_NOON = datetime(2001, 2, 3, 4, 5, 6, 789_012, tzinfo=UTC)
_NOON_NS = 981_173_106_789_012_000


def register_pulls(
    connection: Connection,
    source: str,
    consumers: Iterable[SinkConfig],
    *,
    hostname: str,
    database: str,
) -> None:
    """Make or renew the rows of a source's pull consumers, once those of all consumers are there.

    ``hostname`` and ``database`` are what messages say of where they come from.
    """
    for consumer in consumers:
        destination = consumer.destination
        if not isinstance(destination, PullDestination):
            continue
        with connection.transaction():
            # Stored before pulls, as everyone locks them.
            connection.execute(_PLACE, (source, consumer.name))
            connection.execute(_LOCK, (source, consumer.name))
            connection.execute(
                _SETTINGS,
                {
                    "source": source,
                    "name": consumer.name,
                    **destination.model_dump(exclude={"type"}),
                    "max_deliveries": consumer.max_deliveries,
                    "first_ms": consumer.retry.first_ms,
                    "max_ms": consumer.retry.max_ms,
                    "gap_message": gap_template(consumer, source, hostname, database),
                },
            )
            if destination.max_messages or destination.max_bytes:
                connection.execute(_COUNT, (source, consumer.name))


def gap_template(consumer: SinkConfig, source: str, hostname: str, database: str) -> str:
    """A gap in the consumer's shape, with marks for what ``walbrook.gap_message`` fills in."""
    record = {"from": "walbrook:from", "to": "walbrook:to", "reason": "walbrook:reason"}
    text = orjson.dumps(record).decode()
    changes = synthetic_rows("gap", [text], _NOON, cursor=Cursor(_LSN, _IDX))
    context = Context(
        consumer=consumer.name,
        database_name=source,
        hostname=hostname,
        database=database,
        now_ns=_NOON_NS,
        format=ValueFormat(consumer.timestamp_format, consumer.number_format),
    )
    shape = shape_for(consumer.shape, context)
    return str(shape.messages(shape.rows(changes))[0].as_py())
