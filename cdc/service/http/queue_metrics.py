"""What ``/metrics`` says of what waits for each consumer, in its queue and in the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import psycopg
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Rows = list[dict[str, object]]

_QUEUES: Final = """
SELECT c.source, c.name AS consumer, b.bytes AS backlog_bytes,
       extract(epoch FROM clock_timestamp() - q.oldest)::float8 AS oldest_waiting_seconds,
       CASE WHEN c.destination = 'pull' THEN walbrook.waiting(c) END AS queue_depth,
       c.deliver_ms / 1000 AS last_delivery_seconds
  FROM walbrook.consumers c
  JOIN walbrook.backlogs b ON b.source = c.source AND b.consumer = c.name
 CROSS JOIN LATERAL
       (SELECT min(e.queued_at) AS oldest FROM walbrook.events e WHERE e.consumer = c.id) q
 WHERE %(sources)s::text[] IS NULL OR c.source = ANY (%(sources)s)
 ORDER BY 1, 2
"""
_FIGURES: Final = (
    ("backlog_bytes", "The log before the consumer, in whole segments."),
    ("oldest_waiting_seconds", "Age of the oldest message in its queue; absent without any."),
    ("queue_depth", "Messages in the queue of a pull consumer; 10000 stands for more, too."),
    ("last_delivery_seconds", "How long its last delivery took."),
)


def read_queues(rows: psycopg.Cursor[dict[str, object]], sources: list[str] | None) -> Rows:
    return rows.execute(_QUEUES, {"sources": sources}).fetchall()


def queue_metrics(seen: Rows) -> Iterator[Metric]:
    for name, text in _FIGURES:
        family = GaugeMetricFamily(f"walbrook_consumer_{name}", text, labels=["source", "consumer"])
        for row in seen:
            if row[name] is not None:
                labels = [str(row["source"]), str(row["consumer"])]
                family.add_metric(labels, float(str(row[name])))
        yield family
