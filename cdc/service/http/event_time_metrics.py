"""What ``/metrics`` says of consumers in event-time order, from ``walbrook.watermarks``' tables.

Invariants: the number of series is bounded. Every consumer has its sums; tables have
series of their own only while all consumers together have at most ``TABLES_MAX`` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Rows = list[dict[str, object]]

TABLES_MAX: Final = 500

# Seconds from the stored number, not through a time: it is exact, and there for every year.
_CONSUMERS = """
SELECT e.consumer, e.watermark::float8 / 1e6 AS watermark,
       count(p.table_name) AS tables,
       count(*) FILTER (WHERE num_nonnulls(p.idle_since, s.finished_at) > 0 OR p.marked_idle)
           AS idle,
       coalesce(sum(p.buffered), 0) AS buffered, coalesce(sum(p.late), 0) AS late
  FROM walbrook.event_time e
  JOIN walbrook.consumers c ON c.name = e.consumer AND c.active
  LEFT JOIN walbrook.event_sources s ON s.consumer = c.id
  LEFT JOIN walbrook.event_partitions p ON p.consumer = c.id
 GROUP BY e.consumer ORDER BY e.consumer
"""
_TABLES = """
SELECT c.name AS consumer, c.source, p.table_name AS "table",
       p.watermark::float8 / 1e6 AS watermark,
       (num_nonnulls(p.idle_since, s.finished_at) > 0 OR p.marked_idle)::int AS idle,
       p.buffered, p.late
  FROM walbrook.event_partitions p
  JOIN walbrook.consumers c ON c.id = p.consumer
  LEFT JOIN walbrook.event_sources s ON s.consumer = c.id
 WHERE c.active ORDER BY 1, 2, 3 LIMIT %s
"""


@dataclass(frozen=True)
class EventTimes:
    """What the state database says of event time at one moment; ``tables`` is empty if too many."""

    consumers: Rows
    tables: Rows


def read_event_times(rows: psycopg.Cursor[dict[str, object]]) -> EventTimes:
    consumers = rows.execute(_CONSUMERS).fetchall()
    tables = rows.execute(_TABLES, (TABLES_MAX + 1,)).fetchall()
    return EventTimes(consumers, tables if len(tables) <= TABLES_MAX else [])


def event_time_metrics(seen: EventTimes) -> Iterator[Metric]:
    """A family each; without consumers in event-time order they have no series."""
    of_all, of_table = ("consumer",), ("consumer", "source", "table")
    yield _gauge(
        "watermark_timestamp_seconds",
        "The consumer's own watermark.",
        seen.consumers, of_all, "watermark",
    )  # fmt: skip
    yield _gauge("tables", "Tables that have a watermark.", seen.consumers, of_all, "tables")
    yield _gauge("idle_tables", "Those that hold nobody back.", seen.consumers, of_all, "idle")
    yield _gauge("buffered", "Changes held back.", seen.consumers, of_all, "buffered")
    yield _late("late", "Changes that came late.", seen.consumers, of_all)
    yield _gauge(
        "table_watermark_timestamp_seconds",
        "The table's watermark; absent before its first event.",
        seen.tables, of_table, "watermark",
    )  # fmt: skip
    yield _gauge("table_idle", "1 while it holds nobody back.", seen.tables, of_table, "idle")
    yield _gauge("table_buffered", "Its changes held back.", seen.tables, of_table, "buffered")
    yield _late("table_late", "Its changes that came late.", seen.tables, of_table)


def _gauge(name: str, text: str, rows: Rows, labels: tuple[str, ...], column: str) -> Metric:
    family = GaugeMetricFamily(f"walbrook_event_time_{name}", text, labels=labels)
    for row in rows:
        if row[column] is not None:
            family.add_metric([str(row[label]) for label in labels], float(str(row[column])))
    return family


def _late(name: str, text: str, rows: Rows, labels: tuple[str, ...]) -> Metric:
    family = CounterMetricFamily(f"walbrook_event_time_{name}", text, labels=labels)
    for row in rows:
        family.add_metric([str(row[label]) for label in labels], float(str(row["late"])))
    return family
