"""The pressure of a source as a row of ``walbrook.pressure``; it only informs.

Invariant: only the latest start of the service (its term) writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdc.connection import Connection

DEFERRED = "deferred: pressure"
"""In ``state_reason``: why a consumer waits that is held back for a while."""

_SHOW = """
INSERT INTO walbrook.pressure AS p
       (source, level, backlog_rows, backlog_bytes, latency_s, busy_ratio, widened_by, deferred,
        slots, slots_busy, waiting)
SELECT s.name, %(level)s, %(backlog_rows)s, %(backlog_bytes)s, %(latency_s)s, %(busy_ratio)s,
       %(widened_by)s, %(deferred)s::text[], %(slots)s, %(slots_busy)s, %(waiting)s
  FROM walbrook.sources s WHERE s.name = %(source)s AND s.term = %(term)s
    ON CONFLICT (source) DO UPDATE
   SET level = excluded.level,
       since = CASE WHEN p.level = excluded.level THEN p.since ELSE clock_timestamp() END,
       backlog_rows = excluded.backlog_rows, backlog_bytes = excluded.backlog_bytes,
       latency_s = excluded.latency_s, busy_ratio = excluded.busy_ratio,
       widened_by = excluded.widened_by, deferred = excluded.deferred, slots = excluded.slots,
       slots_busy = excluded.slots_busy, waiting = excluded.waiting,
       measured_at = clock_timestamp()
"""


@dataclass(frozen=True)
class PressureStatus:
    """What SQL is to say of a source's pressure; the columns say what each is."""

    level: int
    backlog_rows: int
    backlog_bytes: int
    latency_s: float
    busy_ratio: float
    widened_by: float
    deferred: tuple[str, ...]
    slots: int
    slots_busy: int
    waiting: int


def show_pressure(connection: Connection, source: str, term: int, shown: PressureStatus) -> None:
    """Let SQL say it; one whose term is over says nothing."""
    row = {**vars(shown), "deferred": list(shown.deferred)}
    connection.execute(_SHOW, {**row, "source": source, "term": term})
