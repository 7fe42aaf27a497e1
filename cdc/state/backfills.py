"""Backfills as rows: what is asked for, in which state it is, what it waits for.

Invariant: a start of the service that another one has replaced writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.cursor import ORIGIN, Cursor, cursor_of, format_lsn, parse_lsn
from cdc.generation import FIRST, Generation
from cdc.state.fence import FENCE, fenced
from cdc.state.health import Condition, report_conditions

_OPEN_CONSUMERS = """
SELECT consumer FROM walbrook.backfills b
 WHERE source = %(source)s AND (state IN ('waiting', 'running') OR walbrook.leaves_shadow(b))
 UNION
SELECT name FROM walbrook.consumers
 WHERE source = %(source)s AND active AND initial_backfill IS NOT NULL
"""
_OPEN = """
SELECT id, table_schema, table_name, where_sql, sort_column, start_position, chunk_bytes,
       rows_per_second, connections, planned, looked_lsn::text, attempts, find_deletes,
       reload, begun_lsn::text, state IN ('cancelled', 'skipped'),
       (SELECT ARRAY[c.generation, c.truncation] FROM walbrook.consumers c
         WHERE (c.source, c.name) = (b.source, b.consumer))
  FROM walbrook.backfills b
 WHERE source = %(source)s AND consumer = %(consumer)s AND (%(id)s::bigint IS NULL
       AND (state IN ('waiting', 'running') OR walbrook.leaves_shadow(b)) OR id = %(id)s)
 ORDER BY id
"""
_INITIAL = """
SELECT initial_backfill FROM walbrook.consumers
 WHERE source = %s AND name = %s AND initial_backfill IS NOT NULL FOR NO KEY UPDATE
"""
_ADD = """
INSERT INTO walbrook.backfills (source, consumer, table_schema, table_name)
VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
_EXPANDED = "UPDATE walbrook.consumers SET initial_backfill = NULL WHERE source = %s AND name = %s"
_ADD_PART = """
INSERT INTO walbrook.backfills
       (source, consumer, table_schema, table_name, where_sql, sort_column, start_position,
        chunk_bytes, rows_per_second, connections, repair, since_xid, whole_reason, find_deletes,
        kept_reason, reload, request)
SELECT source, consumer, %(schema)s, %(table)s, where_sql, sort_column, start_position, chunk_bytes,
       rows_per_second, connections, repair, since_xid, whole_reason, find_deletes, kept_reason,
       reload, coalesce(request, id)
  FROM walbrook.backfills WHERE id = %(id)s ON CONFLICT DO NOTHING
"""
_REMOVE = "DELETE FROM walbrook.backfills WHERE id = %s"
_FINISH = """
UPDATE walbrook.backfills
   SET state = 'done', reason = NULL, waits_for = NULL, waits_since = NULL,
       finished_at = clock_timestamp()
 WHERE id = %s AND state IN ('waiting', 'running')
"""
_FAIL = """
UPDATE walbrook.backfills
   SET state = 'failed', reason = NULL, waits_for = NULL, waits_since = NULL, error = %s
 WHERE id = %s AND state IN ('waiting', 'running')
"""
_WAIT = """
UPDATE walbrook.backfills
   SET reason = %(reason)s, waits_for = %(kind)s,
       waits_since = CASE WHEN %(kind)s::text IS NULL THEN NULL
                          WHEN waits_for = %(kind)s THEN waits_since
                          ELSE clock_timestamp() END
 WHERE id = %(id)s AND (reason, waits_for) IS DISTINCT FROM (%(reason)s, %(kind)s)
   AND state IN ('waiting', 'running')
"""
# What else a backfill waits for is more to the point.
_HELD_UP = """
UPDATE walbrook.backfills
   SET waits_for = %(kind)s, reason = %(reason)s,
       waits_since = CASE WHEN %(kind)s::text IS NOT NULL THEN clock_timestamp() END
 WHERE source = %(source)s AND consumer = %(consumer)s AND state = 'running'
   AND (waits_for IS NULL OR waits_for IN ('changes', 'sink'))
   AND waits_for IS DISTINCT FROM %(kind)s
"""
_BEGIN_SEARCH = """
UPDATE walbrook.backfills SET looked_lsn = %s::pg_lsn WHERE id = %s AND looked_lsn IS NULL
"""
_WAITED_S = """
SELECT coalesce(extract(epoch FROM clock_timestamp() - waits_since), 0)::float8
  FROM walbrook.backfills WHERE id = %s
"""
_PLACED_END = """
SELECT k.place_lsn::text, k.place_idx + k.piece_rows FROM walbrook.backfill_chunks k
  JOIN walbrook.backfills b ON b.id = k.backfill
 WHERE b.source = %s AND b.consumer = %s AND k.place_lsn <= %s::pg_lsn
 ORDER BY k.place_lsn DESC, 2 DESC LIMIT 1
"""
_TROUBLED = """
SELECT id, place, failed, why, of_kind
  FROM (SELECT id, table_schema || '.' || table_name || ' into ' || consumer AS place,
               state = 'failed' AS failed, coalesce(error, reason) AS why,
               count(*) OVER (PARTITION BY state = 'failed') AS of_kind,
               row_number() OVER (PARTITION BY state = 'failed' ORDER BY id) AS nth
          FROM walbrook.backfills
         WHERE source = %(source)s
           AND (state = 'failed' OR state IN ('waiting', 'running') AND reason IS NOT NULL
                AND CASE WHEN waits_for IN ('swap', 'changes', 'sink') THEN waits_since
                         ELSE requested_at END < clock_timestamp() - interval '1 minute')) troubled
 WHERE nth <= %(most)s ORDER BY id
"""
_NAMED_MAX = 10  # of the failed ones, and of those that wait


@dataclass(frozen=True)
class Backfill:
    """One table of one consumer."""

    id: int
    table: TableName
    where: str | None
    sort_column: str | None
    start_position: str | None
    chunk_bytes: int
    rows_per_second: int | None
    connections: int
    planned: bool
    looked_lsn: int | None
    attempts: int
    find_deletes: bool = False  # whether rows that only the destination has become deletes
    reload: bool = False  # whether rows go into a shadow, which takes the place of the table
    begun_lsn: int | None = None  # from here on the shadow gets changes
    has_ended: bool = False  # only its shadow is left
    generation: Generation = FIRST  # that its rows are read for


def consumers_with_backfills(connection: Connection, source: str) -> set[str]:
    """The consumers of a source that are to get existing rows."""
    rows = connection.execute(_OPEN_CONSUMERS, {"source": source}).fetchall()
    return {str(row[0]) for row in rows}


def initial_tables(connection: Connection, source: str, consumer: str) -> list[str] | None:
    """The tables of a new consumer that are not in ``walbrook.backfills`` yet; ``*`` for all."""
    row = connection.execute(_INITIAL, (source, consumer)).fetchone()
    return None if row is None else [str(name) for name in row[0]]  # type: ignore[attr-defined]


def add_initial(
    connection: Connection, source: str, term: int, consumer: str, tables: Iterable[TableName]
) -> None:
    with connection.transaction():
        require_latest(connection, source, term)
        for table in tables:
            connection.execute(_ADD, (source, consumer, table.schema, table.table))
        connection.execute(_EXPANDED, (source, consumer))


def split_by_parts(
    connection: Connection, source: str, term: int, backfill: Backfill, parts: Sequence[TableName]
) -> None:
    """In place of a partitioned table whose partitions are published, a backfill of each."""
    with connection.transaction():
        require_latest(connection, source, term)
        for part in parts:
            named = {"schema": part.schema, "table": part.table, "id": backfill.id}
            connection.execute(_ADD_PART, named)
        connection.execute(_REMOVE, (backfill.id,))


def open_backfills(
    connection: Connection, source: str, consumer: str, only: int | None = None
) -> list[Backfill]:
    """Those that are waiting or running, or leave a shadow; with ``only`` that one alone."""
    named = {"source": source, "consumer": consumer, "id": only}
    rows = connection.execute(_OPEN, named).fetchall()
    return [
        Backfill(
            id=int(str(row[0])),
            table=TableName(str(row[1]), str(row[2])),
            where=as_text(row[3]),
            sort_column=as_text(row[4]),
            start_position=as_text(row[5]),
            chunk_bytes=int(str(row[6])),
            rows_per_second=None if row[7] is None else int(str(row[7])),
            connections=int(str(row[8])),
            planned=bool(row[9]),
            looked_lsn=None if row[10] is None else parse_lsn(str(row[10])),
            attempts=int(str(row[11])),
            find_deletes=bool(row[12]),
            reload=bool(row[13]),
            begun_lsn=None if row[14] is None else parse_lsn(str(row[14])),
            has_ended=bool(row[15]),
            generation=Generation(*row[16]),  # type: ignore[misc]
        )
        for row in rows
    ]


def placed_end(connection: Connection, source: str, consumer: str, log_end: Cursor) -> Cursor:
    """Behind which place nothing of a backfill can be at the destination without being settled.

    Pieces of backfills that were cancelled count: some of their rows may be there. Beyond the end
    of the log none can be.
    """
    given = (source, consumer, format_lsn(log_end.lsn))
    row = connection.execute(_PLACED_END, given).fetchone()
    return ORIGIN if row is None else cursor_of(*row)


def begin_search(connection: Connection, source: str, term: int, backfill: int, lsn: int) -> None:
    """The log is to be searched for changes that leave out values from ``lsn`` on.

    Said before a chunk is read; what was said before the first one counts.
    """
    with connection.transaction():
        require_latest(connection, source, term)
        connection.execute(_BEGIN_SEARCH, (format_lsn(lsn), backfill))


def finish(connection: Connection, backfill: int) -> None:
    connection.execute(_FINISH, (backfill,))


def fail(connection: Connection, backfill: int, error: str) -> None:
    """Only an operator can go on with it, or without it; all others go on."""
    connection.execute(_FAIL, (error, backfill))


class Wait(StrEnum):
    """What a backfill waits for."""

    OPEN_TRANSACTIONS = "open_transactions"  # they were open before its first chunk
    SOURCE = "source"  # it does not answer
    RETRY = "retry"  # a chunk could not be read
    SWAP = "swap"  # a reload has all rows in its shadow
    CHANGES = "changes"  # its sink is behind with changes, which go first
    SINK = "sink"  # its sink takes nothing


def waits(connection: Connection, backfill: int, kind: Wait, reason: str) -> float:
    """Say what a backfill waits for. Returns for how long it has, in seconds."""
    connection.execute(_WAIT, {"id": backfill, "kind": str(kind), "reason": reason})
    row = connection.execute(_WAITED_S, (backfill,)).fetchone()
    return 0.0 if row is None else float(str(row[0]))


def waits_no_more(connection: Connection, backfill: int) -> None:
    connection.execute(_WAIT, {"id": backfill, "kind": None, "reason": None})


_HELD_UP_REASONS = {
    Wait.CHANGES: "its sink is behind with changes, which go before existing rows",
    Wait.SINK: "its sink takes nothing: walbrook.consumers says why",
}


def held_up(connection: Connection, source: str, consumer: str, kind: Wait | None) -> None:
    """Say why nothing of a consumer's backfills is delivered; None: it is."""
    reason = None if kind is None else _HELD_UP_REASONS[kind]
    given = {"source": source, "consumer": consumer, "kind": kind, "reason": reason}
    connection.execute(_HELD_UP, given)


def report_backfills(connection: Connection, source: str, term: int) -> None:
    """Health events of backfills that need an operator, or that have waited for a while."""
    rows = connection.execute(_TROUBLED, {"source": source, "most": _NAMED_MAX}).fetchall()
    failed = [row for row in rows if row[2]]
    waiting = [row for row in rows if not row[2]]
    conditions = []
    if failed:
        retry = "; ".join(f"walbrook backfill retry {row[0]}" for row in failed)
        conditions.append(
            Condition(
                "backfill_failed",
                "error",
                _troubled(failed, "failed", "have failed"),
                fix=f"{retry} (skip or cancel in place of retry: go on without the rest)",
            )
        )
    if waiting:
        what = _troubled(waiting, "waits", "wait")
        conditions.append(Condition("backfill_waits", "warning", what))
    report_conditions(connection, source, term, conditions, scope="backfill_")


def _troubled(rows: Sequence[Sequence[object]], one: str, several: str) -> str:
    """What ails backfills: their number, the first of them by name, and why the first does."""
    number, place, _, why, count = rows[0]
    if len(rows) == 1:
        return f"backfill {number} of {place} {one}: {why}"
    named = ", ".join(f"{row[0]} of {row[1]}" for row in rows)
    more = as_int(count) - len(rows)
    rest = f" and {more:,} more" if more else ""
    return f"{as_int(count):,} backfills {several}: {named}{rest}; backfill {number}: {why}"


def require_latest(connection: Connection, source: str, term: int) -> None:
    if connection.execute(FENCE, (source, term)).fetchone() is None:
        raise fenced(source)


def as_int(value: object) -> int:
    return int(str(value))


def as_text(value: object) -> str | None:
    return None if value is None else str(value)
