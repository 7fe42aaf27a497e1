"""What operators do with backfills, from Python: the SQL functions, their refusals as errors."""

from __future__ import annotations

from typing import Final, Literal

from psycopg.rows import dict_row

from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.state.operators import State, refusals

Act = Literal["pause", "resume", "cancel", "retry", "skip"]
ACTS: Final[tuple[Act, ...]] = ("pause", "resume", "cancel", "retry", "skip")

_START = """
SELECT * FROM walbrook.start_backfill(
    %(consumer)s, %(table)s, where_sql => %(where)s, sort_column => %(sort_column)s,
    start_position => %(start_position)s, chunk_bytes => %(chunk_bytes)s,
    rows_per_second => %(rows_per_second)s, connections => %(connections)s,
    reload => %(reload)s)
"""
_ACTS: Final = {
    "pause": "SELECT * FROM walbrook.pause_backfill(%s)",
    "resume": "SELECT * FROM walbrook.resume_backfill(%s)",
    "cancel": "SELECT * FROM walbrook.cancel_backfill(%s)",
    "retry": "SELECT * FROM walbrook.retry_backfill(%s)",
    "skip": "SELECT * FROM walbrook.skip_backfill(%s)",
}
_PROGRESS = """
SELECT id, source, consumer, table_schema, table_name, reload, state, reason, waits_for,
       waits_since,
       error, chunks, chunks_done,
       rows, dropped, merged, bytes, estimated_rows, estimated_bytes, fraction::float8 AS fraction,
       rows_per_second::float8 AS rows_per_second, seconds_left::float8 AS seconds_left,
       oldest_snapshot, requested_at, started_at, finished_at, request
  FROM walbrook.backfill_progress
 WHERE (%(named)s::text IS NULL OR consumer = %(named)s OR source || '/' || consumer = %(named)s)
   AND (%(request)s::bigint IS NULL OR request = %(request)s)
 ORDER BY id DESC LIMIT %(most)s
"""

LISTED_MAX: Final = 1_000
"""Most backfills that are listed at once, the latest first; of one request all are."""


def start_backfill(
    connection: Connection,
    consumer: str,
    table: str,
    *,
    where: str | None = None,
    sort_column: str | None = None,
    start_position: str | None = None,
    chunk_bytes: int | None = None,
    rows_per_second: int | None = None,
    connections: int | None = None,
    reload: bool = False,
) -> State:
    """Deliver the existing rows of a table to a consumer. Returns the row of the backfill."""
    given = {
        "consumer": consumer,
        "table": table,
        "where": where,
        "sort_column": sort_column,
        "start_position": start_position,
        "chunk_bytes": chunk_bytes,
        "rows_per_second": rows_per_second,
        "connections": connections,
        "reload": reload,
    }
    with refusals():
        row = connection.cursor(row_factory=dict_row).execute(_START, given).fetchone()
    assert row is not None
    return row


def change_backfill(connection: Connection, act: Act, backfill: int) -> State:
    """Pause, resume, cancel, retry or skip a backfill. Returns its row."""
    with refusals():
        found = connection.cursor(row_factory=dict_row)
        row = found.execute(_ACTS[act], (backfill,)).fetchone()
    assert row is not None
    return row


def backfills(
    connection: Connection, consumer: str | None = None, request: int | None = None
) -> list[State]:
    """How far backfills are, of one consumer, of one request, or all, the latest first."""
    with refusals():
        most = LISTED_MAX if request is None else None
        given = {"named": consumer, "request": request, "most": most}
        return connection.cursor(row_factory=dict_row).execute(_PROGRESS, given).fetchall()


def known_act(act: str) -> Act:
    for known in ACTS:
        if act == known:
            return known
    raise OperatorError(
        f"there is no act {act} on a backfill", fix=f"use one of {', '.join(ACTS)}", kind="unknown"
    )
