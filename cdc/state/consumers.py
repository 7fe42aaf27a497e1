"""The rows of consumers: made, described and deactivated as the configuration says.

Invariants: a consumer that has a row keeps its cursor. One that the configuration no longer names
keeps its row and holds nothing back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from cdc.connection import Connection
from cdc.cursor import format_lsn
from cdc.state.health import resolve_inactive

# One that comes back goes on at its cursor, a new one begins where its configuration says.
_ADD_CONSUMERS = """
INSERT INTO walbrook.consumers
       (source, name, initial_backfill, cursor_lsn, cursor_idx, begun_lsn, begun_idx)
SELECT source, name, backfill, lsn, idx, lsn, idx
  FROM (
    SELECT s.name AS source, n.name,
           (SELECT array_agg(t) FROM jsonb_array_elements_text(%(backfills)s::jsonb -> n.name) AS t)
           AS backfill,
           CASE n.start WHEN 'restart' THEN s.restart_lsn
                        WHEN 'earliest' THEN coalesce(s.earliest_lsn, s.restart_lsn)
                        WHEN 'latest' THEN greatest(s.log_lsn, s.restart_lsn, e.lsn)
                        ELSE split_part(n.start, ':', 1)::pg_lsn END AS lsn,
           CASE n.start WHEN 'restart' THEN s.restart_idx
                        WHEN 'earliest' THEN coalesce(s.earliest_idx, s.restart_idx)
                        WHEN 'latest' THEN CASE greatest(s.log_lsn, s.restart_lsn, e.lsn)
                                                WHEN s.log_lsn THEN s.log_idx
                                                WHEN s.restart_lsn THEN s.restart_idx
                                                ELSE 0 END
                        ELSE split_part(n.start, ':', 2)::bigint END AS idx
      FROM walbrook.sources s, (SELECT %(wal_end)s::pg_lsn AS lsn) e,
           unnest(%(names)s::text[], %(starts)s::text[]) AS n (name, start)
     WHERE s.name = %(source)s) AS starts
    ON CONFLICT (source, name) DO NOTHING
"""
_DESCRIBE = """
UPDATE walbrook.consumers c
   SET destination = n.destination, priority = n.priority, backlog_max = n.backlog_max,
       backlog_on_full = n.on_full, place = n.place,
       rewind_ways = string_to_array(n.rewind_ways, ' '),
       reload_refusal = nullif(n.reload_refusal, ''),
       takes = n.takes::jsonb, repeats_by_key = n.repeats_by_key,
       -- Another destination lacks nothing of what this one was sent.
       top_lsn = CASE WHEN c.place = n.place THEN c.top_lsn END,
       top_idx = CASE WHEN c.place = n.place THEN c.top_idx END,
       lost_at = CASE WHEN c.place = n.place THEN c.lost_at END
  FROM unnest(%s::text[], %s::text[], %s::int[], %s::bigint[], %s::text[], %s::text[],
              %s::text[], %s::text[], %s::text[], %s::bool[])
         AS n (name, destination, priority, backlog_max, on_full, place, rewind_ways,
               reload_refusal, takes, repeats_by_key)
 WHERE c.source = %s AND c.name = n.name
"""
_MAKE_QUEUES = "SELECT walbrook.make_queue(id) FROM walbrook.consumers WHERE source = %s AND active"
_SET_ACTIVE = """
UPDATE walbrook.consumers
   SET active = NOT active,
       -- What a worker said of itself ends with it.
       state = NULL, state_reason = CASE WHEN active THEN 'it is not active' END, retry_at = NULL,
       breaker = 'closed', last_error = NULL, error_at = NULL
 WHERE source = %s AND active <> (name = ANY (%s::text[]))
"""


_LOCK_SOURCE = """
SELECT system_identifier <> '' FROM walbrook.sources WHERE name = %s FOR UPDATE
"""


@dataclass(frozen=True)
class Described:
    """What SQL is to know of a consumer from its configuration."""

    destination: str = ""
    priority: int = 5
    backlog_max: int | None = None
    backlog_on_full: str | None = None
    place: str = ""  # where its destination is, if that keeps a position
    rewind_ways: tuple[str, ...] = ()  # what a rewind can do with what its destination holds
    reload_refusal: str | None = None  # why its tables cannot be reloaded; None: they can
    takes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by key of its source
    repeats_by_key: bool = False  # whether it cannot repeat changes of a table without a key


def register_consumers(
    connection: Connection,
    source: str,
    consumers: Iterable[str],
    *,
    starts: Mapping[str, str] | None = None,
    wal_end_lsn: int | None = None,
    described: Mapping[str, Described] | None = None,
    backfills: Mapping[str, list[str]] | None = None,
) -> None:
    """Make the consumers of a source these; the caller's transaction has locked its source.

    ``described`` are those whose description may have changed. The rest is as in
    ``register_source``.
    """
    names = list(consumers)
    connection.execute(_SET_ACTIVE, (source, names))
    begin = [(starts or {}).get(consumer, "restart") for consumer in names]
    connection.execute(
        _ADD_CONSUMERS,
        {
            "names": names,
            "starts": begin,
            "backfills": orjson.dumps(backfills or {}).decode(),
            "source": source,
            "wal_end": None if wal_end_lsn is None else format_lsn(wal_end_lsn),
        },
    )
    told = {consumer: (described or {}).get(consumer, Described()) for consumer in names}
    connection.execute(
        _DESCRIBE,
        (
            names,
            [each.destination for each in told.values()],
            [each.priority for each in told.values()],
            [each.backlog_max for each in told.values()],
            [each.backlog_on_full for each in told.values()],
            [each.place for each in told.values()],
            [" ".join(each.rewind_ways) for each in told.values()],
            [each.reload_refusal or "" for each in told.values()],
            [orjson.dumps(dict(each.takes)).decode() for each in told.values()],
            [each.repeats_by_key for each in told.values()],
            source,
        ),
    )
    connection.execute(_MAKE_QUEUES, (source,))
    resolve_inactive(connection, source)


def lock_source(connection: Connection, source: str) -> bool:
    """Hold its row for this transaction; returns whether the source has ever been ready."""
    row = connection.execute(_LOCK_SOURCE, (source,)).fetchone()
    return row is not None and bool(row[0])
