"""What a reader tells about itself: its state, what it sees of the source, the end of its log."""

from __future__ import annotations

from typing import Literal

import psycopg

from cdc.cursor import Cursor, format_lsn

ReaderState = Literal["stopped", "connecting", "streaming", "paused", "disconnected"]

_REPORT = """
UPDATE walbrook.sources
   SET state_since = CASE WHEN state = %(state)s THEN state_since ELSE clock_timestamp() END,
       state = %(state)s,
       last_error = %(error)s,
       head_lsn = greatest(head_lsn, %(head)s::pg_lsn),
       log_lsn = %(log_lsn)s::pg_lsn,
       log_idx = %(log_idx)s,
       seen_at = clock_timestamp()
 WHERE name = %(source)s
"""


def report_reader(
    connection: psycopg.Connection[tuple[object, ...]],
    source: str,
    *,
    state: ReaderState,
    error: str | None,
    head_lsn: int,
    log_end: Cursor,
) -> None:
    """Write the reader's row; one statement, outside any transaction of ours."""
    connection.execute(
        _REPORT,
        {
            "source": source,
            "state": state,
            "error": error,
            "head": format_lsn(head_lsn),
            "log_lsn": format_lsn(log_end.lsn),
            "log_idx": log_end.idx,
        },
    )
