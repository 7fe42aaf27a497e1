"""Lanes as rows: who is served where, and which micro-batch of which start of a lane is next.

What must always hold: a lane is begun only by the latest start of the service (its term), and a
micro-batch is settled only as the next one of the lane's latest start (its epoch): one that was
given up settles nothing. The rest of a row, and where a consumer is said to be served, only
informs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn, parse_lsn
from cdc.error_text import public_text
from cdc.errors import TransientError
from cdc.state.fence import FENCE, fenced

SHARED = "shared"

_OPEN = """
INSERT INTO walbrook.lanes AS l (source, name, consumers)
VALUES (%(source)s, %(name)s, %(consumers)s::text[])
    ON CONFLICT (source, name) DO UPDATE
   SET epoch = l.epoch + 1, batch = 0, attempts = l.attempts + 1, consumers = excluded.consumers,
       started_at = clock_timestamp()
RETURNING epoch, attempts, cursor_lsn::text, cursor_idx
"""
_STEP = """
UPDATE walbrook.lanes
   SET batch = batch + 1, attempts = 0, last_error = NULL, cursor_lsn = %(lsn)s::pg_lsn,
       cursor_idx = %(idx)s, rows = %(rows)s, took_ms = %(took_ms)s, moved_at = clock_timestamp()
 WHERE source = %(source)s AND name = %(name)s AND epoch = %(epoch)s AND batch = %(batch)s
"""
_CLOSE = "DELETE FROM walbrook.lanes WHERE source = %s AND name = %s"
# What a process that died in its first micro-batch leaves is kept: the next one looks out.
_CLEAR = "DELETE FROM walbrook.lanes WHERE source = %s AND name <> %s AND attempts = 0"
_ERROR = """
UPDATE walbrook.lanes l SET last_error = %(error)s FROM walbrook.sources s
 WHERE l.source = %(source)s AND l.name = %(name)s AND s.name = l.source AND s.term = %(term)s
"""
_PLACE = """
UPDATE walbrook.consumers
   SET lane = %(lane)s, lane_reason = %(reason)s, breaker = %(breaker)s,
       retry_at = clock_timestamp() + make_interval(secs => %(retry_s)s)
 WHERE source = %(source)s AND name = %(consumer)s
"""
_MEMBERS = "UPDATE walbrook.lanes SET consumers = %s::text[] WHERE source = %s AND name = %s"


@dataclass(frozen=True)
class LaneEpoch:
    """One start of a lane; ``attempts`` counts those in a row that settled nothing."""

    name: str
    epoch: int
    attempts: int
    reached: Cursor | None = None  # by an earlier epoch


@dataclass(frozen=True)
class Step:
    """One micro-batch of a lane: number ``batch`` of its epoch, counted from 0."""

    lane: LaneEpoch
    batch: int
    rows: int
    took_ms: float


@dataclass(frozen=True)
class Standing:
    """Where a consumer is served, why not with the others, and for how long not at all."""

    lane: str | None
    reason: str | None = None
    retry_s: float | None = None
    failing: bool = False
    paused: bool = False

    @property
    def breaker(self) -> str:
        """As a circuit breaker of its sink: open while nothing is sent, half open while tried."""
        if not self.failing:
            return "closed"
        return "open" if self.lane is None else "half_open"


def open_lane(
    connection: Connection, source: str, term: int, name: str, consumers: Sequence[str]
) -> LaneEpoch:
    """Begin an epoch of a lane."""
    with connection.transaction():
        if connection.execute(FENCE, (source, term)).fetchone() is None:
            raise fenced(source)
        row = connection.execute(
            _OPEN, {"source": source, "name": name, "consumers": list(consumers)}
        ).fetchone()
        assert row is not None
    reached = None if row[2] is None else Cursor(parse_lsn(str(row[2])), int(str(row[3])))
    return LaneEpoch(name, int(str(row[0])), int(str(row[1])), reached)


def take_step(
    connection: Connection, source: str, step: Step, reached: Cursor
) -> psycopg.Cursor[tuple[object, ...]]:
    """Count a micro-batch as settled, inside the settling transaction.

    The answer may still be on its way; it must be looked at with ``require_counted``.
    """
    return connection.execute(
        _STEP,
        {
            "source": source,
            "name": step.lane.name,
            "epoch": step.lane.epoch,
            "batch": step.batch,
            "lsn": format_lsn(reached.lsn),
            "idx": reached.idx,
            "rows": step.rows,
            "took_ms": step.took_ms,
        },
    )


def require_counted(step: Step, counted: psycopg.Cursor[tuple[object, ...]]) -> None:
    """Refuse to settle a micro-batch that is not the next one of its lane's latest start."""
    if counted.rowcount != 1:
        raise TransientError(
            f"micro-batch {step.batch} of epoch {step.lane.epoch} of lane {step.lane.name} is not "
            "the next to be settled: the lane was started again, or it was settled before",
            kind="fenced",
        )


def close_lane(connection: Connection, source: str, name: str) -> None:
    """A lane that caught up, or was given up, is no more."""
    connection.execute(_CLOSE, (source, name))


def clear_lanes(connection: Connection, source: str) -> None:
    """Forget what an earlier start of the service left; the shared lane keeps its counts."""
    connection.execute(_CLEAR, (source, SHARED))


def report_lane(
    connection: Connection, source: str, term: int, error: Exception, name: str = SHARED
) -> None:
    """Note what keeps a lane from moving; its next settlement takes it away."""
    connection.execute(
        _ERROR, {"error": public_text(error), "source": source, "term": term, "name": name}
    )


def show_standing(connection: Connection, source: str, consumer: str, standing: Standing) -> None:
    """Let SQL say where a consumer is served."""
    connection.execute(
        _PLACE,
        {
            "source": source,
            "consumer": consumer,
            "lane": standing.lane,
            "reason": standing.reason,
            "retry_s": standing.retry_s,
            "breaker": standing.breaker,
        },
    )


def show_members(connection: Connection, source: str, lane: str, members: Sequence[str]) -> None:
    """Let SQL say whom a lane serves."""
    connection.execute(_MEMBERS, (list(members), source, lane))
