"""Repairs as rows: what a source's slot had lost, and how each consumer gets over it.

Invariant: consumers move over what was lost in the one transaction that records their gaps and the
backfills that bridge these. A repair that ends before it has changed nothing here, and can be begun
again; one that ends after it goes on as backfills do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import orjson
from psycopg.rows import dict_row

from cdc.backfill.newer_rows import XIDS_MAX, written_since
from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn, parse_lsn
from cdc.state.fence import DURABLY
from cdc.state.horizons import horizon_at
from cdc.state.operators import State

Deletes = Literal["find", "skip"]

TABLES_NAMED_MAX: Final = 100
"""Most tables that a gap message names; ``walbrook.repaired_tables`` has all."""

_LOCK = "SELECT 1 FROM walbrook.sources WHERE name = %s FOR UPDATE"
_CONSUMERS = """
SELECT c.name, c.cursor_lsn::text, c.cursor_idx,
       EXISTS (SELECT FROM walbrook.event_time e WHERE e.consumer = c.name)
  FROM walbrook.consumers c
 WHERE c.source = %s AND c.active AND (c.cursor_lsn, c.cursor_idx) < (%s::pg_lsn, 0)
 ORDER BY c.name FOR NO KEY UPDATE OF c
"""
_ADD = """
INSERT INTO walbrook.repairs (source, found, deletes, to_lsn) VALUES (%s, %s, %s, %s::pg_lsn)
RETURNING id
"""
_ADD_BACKFILL = """
INSERT INTO walbrook.backfills
       (source, consumer, table_schema, table_name, where_sql, repair, since_xid, whole_reason,
        find_deletes, kept_reason)
VALUES (%(source)s, %(consumer)s, %(schema)s, %(table)s, %(where)s, %(repair)s, %(since)s,
        %(whole)s, %(find)s, %(kept)s)
"""
_ADD_GAP = """
INSERT INTO walbrook.gaps AS g
       (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason, repair, bridged)
VALUES (%(source)s, %(consumer)s, %(from)s::pg_lsn, %(idx)s, %(to)s::pg_lsn, 0, 'repaired',
        %(repair)s, %(bridged)s::jsonb)
    ON CONFLICT ON CONSTRAINT gaps_source_consumer_from_lsn_from_idx_key
    DO UPDATE SET to_lsn = excluded.to_lsn, to_idx = excluded.to_idx, reason = excluded.reason,
                  repair = excluded.repair, bridged = excluded.bridged,
                  noted_at = clock_timestamp(), reported_at = NULL
"""
_MOVE_CONSUMER = """
UPDATE walbrook.consumers SET cursor_lsn = %s::pg_lsn, cursor_idx = 0, moved_at = clock_timestamp()
 WHERE source = %s AND name = %s
"""
# What the log has no changes of, newer than these snapshots, must not be delivered from them.
_READ_AGAIN = """
UPDATE walbrook.backfill_chunks k
   SET state = 'planned', snapshot = NULL, read_lsn = NULL, look_lsn = NULL, file = NULL,
       rows = NULL, bytes = NULL, delivered = 0, piece_rows = NULL, place_lsn = NULL,
       place_idx = NULL
  FROM walbrook.backfills b
 WHERE b.id = k.backfill AND b.source = %s AND k.state IN ('read', 'delivering')
"""
# What changes left out below the new slot cannot be searched for any more: the repair reads whole
# tables where a backfill under way would have to.
_SEARCH_FROM = """
UPDATE walbrook.backfills SET looked_lsn = %s::pg_lsn
 WHERE source = %s AND consumer = %s AND table_schema = %s AND table_name = %s
   AND looked_lsn IS NOT NULL AND state IN ('waiting', 'running', 'paused', 'failed')
"""
# As after an accepted gap: the log begins again, and so does what is known of the publication.
_MOVE_SOURCE = """
UPDATE walbrook.sources
   SET restart_lsn = %s::pg_lsn, restart_idx = 0, restart_at = clock_timestamp(),
       publication_oid = NULL, last_error = 'a repair has begun; start the service'
 WHERE name = %s
"""
_LOST = """
SELECT kind FROM walbrook.health WHERE source = %s AND consumer IS NULL AND kind = ANY (%s)
 ORDER BY since DESC LIMIT 1
"""
_REACHED = """
SELECT greatest(log_lsn, restart_lsn,
                (SELECT max(c.cursor_lsn) FROM walbrook.consumers c WHERE c.source = s.name))::text
  FROM walbrook.sources s WHERE s.name = %s
"""
_PROGRESS = """
SELECT id, source, found, deletes, to_lsn::text AS to_lsn, state, tables, tables_done, tables_whole,
       rows, deleted, begun_at, finished_at
  FROM walbrook.repair_progress WHERE %(source)s::text IS NULL OR source = %(source)s
 ORDER BY id DESC LIMIT %(most)s
"""
_TABLES = """
SELECT consumer, table_schema, table_name, backfill, state, rows_read, since_xid, whole_reason,
       deletes, kept_reason, rows, deleted, reason, error
  FROM walbrook.repaired_tables WHERE repair = %s ORDER BY consumer, table_schema, table_name
"""
_WITHOUT_ROWS = """
SELECT consumer, bridged ->> 'why_none' AS reason FROM walbrook.gaps
 WHERE repair = %s AND bridged ->> 'why_none' IS NOT NULL ORDER BY consumer
"""

LISTED_MAX: Final = 1_000
"""Most repairs that are listed at once, the latest first."""


@dataclass(frozen=True)
class TableRepair:
    """What is known of one table of a consumer before its cursor is looked at."""

    table: TableName
    whole_reason: str | None = None  # why all rows are read; None: only those written since
    kept_reason: str | None = None  # why deleted rows are not found; None: they are


def begin_repair(
    connection: Connection,
    source: str,
    *,
    found: str,
    deletes: Deletes,
    lsn: int,
    next_xid: int,
    tables: Mapping[str, Sequence[TableRepair]],
) -> int:
    """Move every active consumer to ``lsn``, where the new slot begins. Returns the repair's id.

    ``tables`` are those that each consumer takes; ``next_xid`` is the number that the source's next
    transaction gets.
    """
    with connection.transaction():
        connection.execute(DURABLY)
        connection.execute(_LOCK, (source,))
        place = format_lsn(lsn)
        row = connection.execute(_ADD, (source, found, deletes, place)).fetchone()
        assert row is not None
        repair = int(str(row[0]))
        for name, at, idx, in_event_time in connection.execute(
            _CONSUMERS, (source, place)
        ).fetchall():
            consumer, start = str(name), cursor_of(at, idx)
            why_none = _none(in_event_time=bool(in_event_time), configured=consumer in tables)
            planned = () if why_none else tables[consumer]
            since = horizon_at(connection, source, start)
            reason = _unknown(since.xid if since else None, next_xid)
            named = []
            for each in planned:
                searching = (place, source, consumer, each.table.schema, each.table.table)
                under_way = connection.execute(_SEARCH_FROM, searching).rowcount
                whole = each.whole_reason or reason
                if under_way:
                    whole = whole or "a backfill of it was under way"
                columns = {
                    "source": source, "consumer": consumer, "schema": each.table.schema,
                    "table": each.table.table, "repair": repair, "whole": whole,
                    "since": None if whole or since is None else since.xid,
                    "where": None if whole or since is None else written_since(since.xid),
                    "find": each.kept_reason is None, "kept": each.kept_reason,
                }  # fmt: skip
                connection.execute(_ADD_BACKFILL, columns)
                named.append(_how(each, whole))
            bridged = _bridged(repair, named, why_none)
            given = {
                "source": source, "consumer": consumer, "from": format_lsn(start.lsn),
                "idx": start.idx, "to": place, "repair": repair, "bridged": bridged,
            }  # fmt: skip
            connection.execute(_ADD_GAP, given)
            connection.execute(_MOVE_CONSUMER, (place, source, consumer))
        connection.execute(_READ_AGAIN, (source,))
        connection.execute(_MOVE_SOURCE, (place, source))
    return repair


def _unknown(since: int | None, next_xid: int) -> str | None:
    """Why it is not known which rows are newer than what a consumer had."""
    if since is None:
        return "no horizon was noted at or below the consumer's cursor"
    if next_xid - since >= XIDS_MAX:
        return (
            f"{next_xid - since} transactions have begun since; xmin has 32 bits and would not "
            "tell old rows from new ones"
        )
    return None


def _none(*, in_event_time: bool, configured: bool) -> str | None:
    """Why a consumer gets no rows; None: it gets them."""
    if not configured:
        return "no active sink of this name is in the configuration"
    if in_event_time:
        return "existing rows have no place in event-time or processing-time order"
    return None


def _how(table: TableRepair, whole: str | None) -> dict[str, str]:
    """How a table is repaired, as the gap message has it."""
    how = {"table": str(table.table), "rows": "xmin" if whole is None else "whole"}
    if whole is not None:
        how["why_whole"] = whole
    how["deletes"] = "compared" if table.kept_reason is None else "not found"
    if table.kept_reason is not None:
        how["why_not_found"] = table.kept_reason
    return how


def _bridged(repair: int, tables: list[dict[str, str]], why_none: str | None) -> str:
    bridged: dict[str, object] = {"repair": repair, "tables": tables[:TABLES_NAMED_MAX]}
    if len(tables) > TABLES_NAMED_MAX:
        bridged["tables_more"] = len(tables) - TABLES_NAMED_MAX
    if why_none is not None:
        bridged["why_none"] = why_none
    return orjson.dumps(bridged).decode()


def lost_changes(connection: Connection, source: str, kinds: Sequence[str]) -> str | None:
    """The kind of the open health event that says that a source has lost changes, if any."""
    row = connection.execute(_LOST, (source, list(kinds))).fetchone()
    return None if row is None else str(row[0])


def read_up_to(connection: Connection, source: str) -> Cursor:
    """Up to where the source was read or settled; nothing of it may be read again."""
    row = connection.execute(_REACHED, (source,)).fetchone()
    assert row is not None
    return Cursor(parse_lsn(str(row[0])), 0)


def repairs(connection: Connection, source: str | None = None) -> list[State]:
    """How far repairs are, the latest first."""
    given = {"source": source, "most": LISTED_MAX}
    return connection.cursor(row_factory=dict_row).execute(_PROGRESS, given).fetchall()


def repaired_tables(connection: Connection, repair: int) -> list[State]:
    """What a repair does for each consumer and table."""
    return connection.cursor(row_factory=dict_row).execute(_TABLES, (repair,)).fetchall()


def consumers_without_rows(connection: Connection, repair: int) -> list[State]:
    """The consumers that a repair moves over their gap without rows, each with the reason."""
    return connection.cursor(row_factory=dict_row).execute(_WITHOUT_ROWS, (repair,)).fetchall()
