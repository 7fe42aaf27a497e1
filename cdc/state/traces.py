"""What SQL knows of one change, and live traces with their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cdc.connection import Connection

SAMPLES_MAX: Final = 1_000
"""How many samples of one live trace wait to be fetched; more are left out."""

_TRACE = "SELECT consumer, step, at, what, detail FROM walbrook.trace(%s, %s)"
_START = "SELECT walbrook.start_live_trace(%s, %s, %s)::text"
_FETCH = "SELECT sample::text FROM walbrook.live_samples(%s::uuid) AS sample"
_END = "SELECT walbrook.end_live_trace(%s::uuid)"
_RUNNING = """
SELECT t.id::text, c.name, t.per_second,
       extract(epoch FROM t.ends_at - clock_timestamp())::float8
  FROM walbrook.live_traces t JOIN walbrook.consumers c ON c.id = t.consumer
 WHERE c.source = %s
"""
_ADD = """
INSERT INTO walbrook.live_samples (trace, sample)
SELECT t.id, s.sample
  FROM walbrook.live_traces t,
       unnest(%(samples)s::text[]) WITH ORDINALITY AS s (sample, position),
       (SELECT count(*) AS waiting FROM walbrook.live_samples l WHERE l.trace = %(trace)s::uuid) w
 WHERE t.id = %(trace)s::uuid AND t.ends_at > clock_timestamp()
   AND w.waiting + s.position <= %(most)s
 ORDER BY s.position
"""
_SWEEP = """
DELETE FROM walbrook.live_traces t USING walbrook.consumers c
 WHERE c.id = t.consumer AND c.source = %s
   AND t.ends_at < clock_timestamp() - make_interval(secs => %s)
"""
_KEPT_S: Final = 10.0  # for the last samples to be fetched


@dataclass(frozen=True)
class KnownStep:
    """A row of ``walbrook.trace``; without a consumer it concerns the source."""

    consumer: str | None
    step: str
    at: datetime | None
    what: str
    detail: dict[str, object]


@dataclass(frozen=True)
class LiveTrace:
    """Begin to watch a consumer for ``left_s`` seconds more."""

    id: str
    consumer: str
    per_second: int
    left_s: float


def known_steps(connection: Connection, source: str, cursor: str) -> list[KnownStep]:
    """What SQL knows of the change at a cursor."""
    rows = connection.execute(_TRACE, (source, cursor)).fetchall()
    return [
        KnownStep(
            None if consumer is None else str(consumer),
            str(step),
            at if isinstance(at, datetime) else None,
            str(what),
            detail if isinstance(detail, dict) else {},
        )
        for consumer, step, at, what, detail in rows
    ]


def start_live_trace(connection: Connection, consumer: str, seconds: int, per_second: int) -> str:
    """Returns the id by which the samples are fetched."""
    row = connection.execute(_START, (consumer, seconds, per_second)).fetchone()
    assert row is not None
    return str(row[0])


def fetch_samples(connection: Connection, trace: str) -> list[str]:
    """The samples that were not fetched yet, as JSON; they are removed."""
    return [str(sample) for (sample,) in connection.execute(_FETCH, (trace,)).fetchall()]


def end_live_trace(connection: Connection, trace: str) -> None:
    connection.execute(_END, (trace,))


def running_live_traces(connection: Connection, source: str) -> list[LiveTrace]:
    """Those of a source that have not ended; what has ended long ago is removed."""
    rows = connection.execute(_RUNNING, (source,)).fetchall()
    found = [
        LiveTrace(str(number), str(consumer), int(str(rate)), float(str(left)))
        for number, consumer, rate, left in rows
    ]
    if any(each.left_s < -_KEPT_S for each in found):
        connection.execute(_SWEEP, (source, _KEPT_S))
    return [each for each in found if each.left_s > 0]


def add_samples(connection: Connection, trace: str, samples: Sequence[str]) -> None:
    """Add samples, as JSON, unless too many wait already."""
    given = {"trace": trace, "samples": list(samples), "most": SAMPLES_MAX}
    connection.execute(_ADD, given)
