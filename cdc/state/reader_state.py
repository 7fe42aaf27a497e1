"""What a reader tells about itself: its state, what it sees of the source, and its log.

Invariants: only the latest start of the service (its term) writes; an earlier one that
wakes learns here that it was replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn
from cdc.state.fence import DURABLY, FENCE, fenced
from cdc.state.horizons import Horizon

ReaderState = Literal["stopped", "connecting", "streaming", "paused", "disconnected"]
Tier = Literal["active", "hot", "cold"]

_REPORT = """
UPDATE walbrook.sources
   SET state_since = CASE WHEN state = %(state)s THEN state_since ELSE clock_timestamp() END,
       state = %(state)s,
       last_error = %(error)s,
       head_lsn = greatest(head_lsn, %(head)s::pg_lsn),
       log_lsn = %(log_lsn)s::pg_lsn, log_idx = %(log_idx)s,
       durable_lsn = %(durable_lsn)s::pg_lsn, durable_idx = %(durable_idx)s,
       earliest_lsn = %(earliest_lsn)s::pg_lsn, earliest_idx = %(earliest_idx)s,
       evicted_lsn = %(evicted_lsn)s::pg_lsn, evicted_idx = %(evicted_idx)s,
       log_bytes = %(log_bytes)s,
       timeline = coalesce(%(timeline)s, timeline),
       heartbeat_at = coalesce(%(heartbeat_at)s, heartbeat_at),
       heartbeat_lag_s = coalesce(%(heartbeat_lag_s)s, heartbeat_lag_s),
       heartbeat_state = %(heartbeat_state)s,
       slot_wal_status = coalesce(%(wal_status)s, slot_wal_status),
       slot_safe_bytes = CASE WHEN %(wal_status)s::text IS NULL THEN slot_safe_bytes
                              ELSE %(safe_bytes)s END,
       current_at = coalesce(%(current_at)s, current_at),
       seen_at = clock_timestamp()
 WHERE name = %(source)s AND term = %(term)s
"""
_RECORD_IDENTITY = """
UPDATE walbrook.sources SET timeline = %s, publication_oid = %s WHERE name = %s AND term = %s
"""
_FAILED_START = """
UPDATE walbrook.sources SET state = 'stopped', state_since = clock_timestamp(), last_error = %s,
       seen_at = clock_timestamp()
 WHERE name = %s AND term = %s
"""
_PUT_SEGMENTS = """
INSERT INTO walbrook.log_segments AS s
       (source, first_batch, batches, rows, bytes, first_lsn, first_idx, high_lsn, high_idx,
        commit_from, commit_to, sealed_at, tier, location)
SELECT %(source)s, *
  FROM unnest(%(first_batch)s::bigint[], %(batches)s::bigint[], %(rows)s::bigint[],
              %(bytes)s::bigint[], %(first_lsn)s::pg_lsn[], %(first_idx)s::bigint[],
              %(high_lsn)s::pg_lsn[], %(high_idx)s::bigint[], %(commit_from)s::timestamptz[],
              %(commit_to)s::timestamptz[], %(sealed_at)s::timestamptz[], %(tier)s::text[],
              %(location)s::text[])
    ON CONFLICT (source, first_batch) DO UPDATE
   SET batches = excluded.batches, rows = excluded.rows, bytes = excluded.bytes,
       first_lsn = excluded.first_lsn, first_idx = excluded.first_idx,
       high_lsn = excluded.high_lsn, high_idx = excluded.high_idx,
       commit_from = excluded.commit_from, commit_to = excluded.commit_to,
       sealed_at = excluded.sealed_at, tier = excluded.tier, location = excluded.location
 WHERE s IS DISTINCT FROM excluded
"""
_KEEP_SEGMENTS = """
DELETE FROM walbrook.log_segments WHERE source = %s AND first_batch <> ALL (%s::bigint[])
"""
_DROP_SEGMENTS = """
DELETE FROM walbrook.log_segments WHERE source = %s AND first_batch = ANY (%s::bigint[])
"""


class HeartbeatState(StrEnum):
    """How the heartbeats of a source are doing, as ``walbrook.sources`` shows it."""

    OFF = "off"
    OK = "ok"
    NONE_RECENT = "none_recent"
    """None could be written for a while."""
    STALE = "stale"
    """One is on its way for too long."""
    LSN_ADVANCED = "lsn_advanced"
    """The stream went past one without giving it."""
    NOTHING_RECEIVED = "nothing_received"
    """None has come back to this reader yet."""


@dataclass(frozen=True)
class SourceObservation:
    """What the watch over the source last saw; nothing where it has not seen it yet."""

    heartbeat_at: datetime | None = None
    heartbeat_lag_s: float | None = None
    slot_wal_status: str | None = None
    slot_safe_bytes: int | None = None
    heartbeat_state: HeartbeatState | None = None
    server_lsn: int = 0  # the end of the server's WAL
    behind_since: datetime | None = None  # the oldest heartbeat that should have come back
    horizon: Horizon | None = None


@dataclass(frozen=True)
class ReaderReport:
    """All that a reader says of itself in one row."""

    state: ReaderState
    error: str | None
    head_lsn: int
    log_end: Cursor
    durable_end: Cursor
    earliest: Cursor
    evicted: Cursor
    log_bytes: int
    timeline: int | None = None
    sight: SourceObservation = SourceObservation()
    # Everything committed before was read; nothing while it does not read.
    current_at: datetime | None = None


@dataclass(frozen=True)
class SegmentRow:
    """A segment as ``walbrook.log_segments`` shows it; times are 0 where there is none."""

    first_batch: int
    batches: int
    rows: int
    bytes: int
    first: Cursor
    high: Cursor
    commit_from_us: int
    commit_to_us: int
    sealed_at: float
    tier: Tier
    location: str


def report_reader(connection: Connection, source: str, term: int, report: ReaderReport) -> None:
    """Write the reader's row in one statement; raises the fenced error if it is not ours."""
    written = connection.execute(
        _REPORT,
        {
            "source": source,
            "term": term,
            "state": report.state,
            "error": report.error,
            "head": format_lsn(report.head_lsn),
            **_cursor("log", report.log_end),
            **_cursor("durable", report.durable_end),
            **_cursor("earliest", report.earliest),
            **_cursor("evicted", report.evicted),
            "log_bytes": report.log_bytes,
            "timeline": report.timeline,
            "heartbeat_at": report.sight.heartbeat_at,
            "heartbeat_lag_s": report.sight.heartbeat_lag_s,
            "heartbeat_state": report.sight.heartbeat_state,
            "wal_status": report.sight.slot_wal_status,
            "safe_bytes": report.sight.slot_safe_bytes,
            "current_at": report.current_at,
        },
    )
    if written.rowcount != 1:
        raise fenced(source)


def report_failed_start(connection: Connection, source: str, term: int, error: str) -> None:
    """A reader that did not come up says why; of its log it knows nothing."""
    if connection.execute(_FAILED_START, (error, source, term)).rowcount != 1:
        raise fenced(source)


def record_identity(
    connection: Connection, source: str, term: int, *, timeline: int, publication_oid: int
) -> None:
    """Note whose history and which publication is read, before anything of it is.

    Were it noted later, a crash in between would leave a log that seems to lie beyond the fork.
    """
    place = (timeline, publication_oid, source, term)
    with connection.transaction():
        connection.execute(DURABLY)
        if connection.execute(_RECORD_IDENTITY, place).rowcount != 1:
            raise fenced(source)


def report_segments(
    connection: Connection,
    source: str,
    term: int,
    rows: Sequence[SegmentRow],
    before: Sequence[SegmentRow] | None = None,
) -> None:
    """Make ``walbrook.log_segments`` equal to ``rows``.

    ``before`` is what the last call of this same term wrote: only the difference is then sent.
    """
    known = frozenset(before or ())
    changed = [row for row in rows if row not in known]
    numbers = [row.first_batch for row in rows]
    gone = sorted({row.first_batch for row in known}.difference(numbers))
    if before is not None and not changed and not gone:
        return
    with connection.transaction():
        if connection.execute(FENCE, (source, term)).fetchone() is None:
            raise fenced(source)
        if before is None:
            connection.execute(_KEEP_SEGMENTS, (source, numbers))
        elif gone:
            connection.execute(_DROP_SEGMENTS, (source, gone))
        if changed:
            connection.execute(_PUT_SEGMENTS, {"source": source, **_columns(changed)})


def _columns(rows: Sequence[SegmentRow]) -> dict[str, object]:
    return {
        **{
            name: [getattr(row, name) for row in rows]
            for name in ("first_batch", "batches", "rows", "bytes", "tier", "location")
        },
        "first_lsn": [format_lsn(row.first.lsn) for row in rows],
        "first_idx": [row.first.idx for row in rows],
        "high_lsn": [format_lsn(row.high.lsn) for row in rows],
        "high_idx": [row.high.idx for row in rows],
        "commit_from": [_time(row.commit_from_us / 1e6) for row in rows],
        "commit_to": [_time(row.commit_to_us / 1e6) for row in rows],
        "sealed_at": [_time(row.sealed_at) for row in rows],
    }


def _cursor(name: str, cursor: Cursor) -> dict[str, object]:
    return {f"{name}_lsn": format_lsn(cursor.lsn), f"{name}_idx": cursor.idx}


def _time(unix_s: float) -> datetime | None:
    return datetime.fromtimestamp(unix_s, UTC) if unix_s else None
