"""What ``/metrics`` says of backfills, from ``walbrook.backfill_progress``.

Invariant: the number of series is bounded: those of a consumer, by the state of its
backfills.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Rows = list[dict[str, object]]

_BACKFILLS = """
SELECT consumer, state, count(*) AS tables, sum(rows) AS rows, sum(bytes) AS bytes
  FROM walbrook.backfill_progress GROUP BY consumer, state ORDER BY consumer, state
"""
_FIGURES = (
    ("tables", "Tables whose existing rows a consumer gets, by the state of their backfill."),
    ("rows", "Existing rows that were delivered, or dropped because a change had overtaken them."),
    ("bytes", "Bytes of existing rows that were read."),
)


def read_backfills(rows: psycopg.Cursor[dict[str, object]]) -> Rows:
    return rows.execute(_BACKFILLS).fetchall()


def backfill_metrics(seen: Rows) -> Iterator[Metric]:
    for name, text in _FIGURES:
        family = GaugeMetricFamily(f"walbrook_backfill_{name}", text, labels=["consumer", "state"])
        for row in seen:
            family.add_metric([str(row["consumer"]), str(row["state"])], float(str(row[name])))
        yield family
