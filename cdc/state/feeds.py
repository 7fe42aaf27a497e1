"""The feed of a source as a row of ``walbrook.feeds``.

Invariant: only the latest process of the latest start of the service settles. ``run`` counts those
processes; a settlement that carries an earlier run is refused. The rest of the row only informs.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn
from cdc.error_text import public_text
from cdc.errors import TransientError
from cdc.state.fence import FENCE, fenced

_OPEN = """
INSERT INTO walbrook.feeds AS f (source) VALUES (%s)
    ON CONFLICT (source) DO UPDATE
   SET run = f.run + 1, attempts = f.attempts + 1, ranges = 0, bytes = 0, last_error = NULL,
       started_at = clock_timestamp()
RETURNING run, attempts
"""
_BEGIN_CONSUMERS = """
UPDATE walbrook.consumers SET attempts = attempts + 1
 WHERE source = %s AND active AND name = ANY (%s::text[])
RETURNING name, attempts
"""
# A run that has settled rows of a range that it decoded is past what may have ended others.
_SETTLED = """
UPDATE walbrook.feeds
   SET attempts = CASE WHEN %(rows)s > 0 THEN 0 ELSE attempts END, last_error = NULL,
       cursor_lsn = %(lsn)s::pg_lsn, cursor_idx = %(idx)s,
       plan = coalesce(%(plan)s, plan), rows = %(rows)s, decode_ms = %(decode_ms)s,
       ranges = %(ranges)s, bytes = %(bytes)s, settle_ms = %(settle_ms)s,
       settled_at = clock_timestamp()
 WHERE source = %(source)s AND run = %(run)s
"""
_IS_LATEST = "SELECT 1 FROM walbrook.feeds WHERE source = %s AND run = %s"
_ERROR = """
UPDATE walbrook.feeds f SET last_error = %(error)s FROM walbrook.sources s
 WHERE f.source = %(source)s AND s.name = f.source AND s.term = %(term)s
"""


@dataclass(frozen=True)
class FeedRun:
    """One process that serves a source; ``attempts`` count those in a row that settled nothing."""

    run: int
    attempts: int
    consumers: dict[str, int]
    """The attempts of each consumer."""


@dataclass(frozen=True)
class FeedFigures:
    """What SQL is to say of the feed."""

    read_to: Cursor
    plan: str | None = None
    rows: int = 0
    decode_ms: float | None = None
    ranges: int = 0
    bytes: int = 0
    settle_ms: float | None = None


def open_feed(connection: Connection, source: str, term: int, consumers: list[str]) -> FeedRun:
    """Begin a run; from now on no earlier one settles."""
    with connection.transaction():
        if connection.execute(FENCE, (source, term)).fetchone() is None:
            raise fenced(source)
        row = connection.execute(_OPEN, (source,)).fetchone()
        assert row is not None
        begun = connection.execute(_BEGIN_CONSUMERS, (source, consumers)).fetchall()
    counts = {str(name): int(str(attempts)) for name, attempts in begun}
    return FeedRun(int(str(row[0])), int(str(row[1])), counts)


def show_feed(
    connection: Connection, source: str, run: int, figures: FeedFigures | None
) -> psycopg.Cursor[tuple[object, ...]]:
    """Write the figures inside a settling transaction, or only look if the run is the latest.

    The answer may still be on its way; it must be looked at with ``require_latest``.
    """
    if figures is None:
        return connection.execute(_IS_LATEST, (source, run))
    return connection.execute(
        _SETTLED,
        {
            "source": source,
            "run": run,
            "lsn": format_lsn(figures.read_to.lsn),
            "idx": figures.read_to.idx,
            "plan": figures.plan,
            "rows": figures.rows,
            "decode_ms": figures.decode_ms,
            "ranges": figures.ranges,
            "bytes": figures.bytes,
            "settle_ms": figures.settle_ms,
        },
    )


def require_latest(source: str, run: int, shown: psycopg.Cursor[tuple[object, ...]]) -> None:
    """Refuse to settle for a process that another one has replaced."""
    if shown.rowcount != 1:
        raise TransientError(
            f"run {run} of source {source} is not the latest: another process serves it now",
            kind="fenced",
        )


def report_feed(connection: Connection, source: str, term: int, error: Exception) -> None:
    """Note what keeps the feed from moving; the next settlement takes it away."""
    connection.execute(_ERROR, {"error": public_text(error), "source": source, "term": term})
