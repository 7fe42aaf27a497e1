"""What processes have measured themselves, as Prometheus asks for it.

Invariant: each family of the catalogue is there, with or without series, and each series once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from cdc.metrics.catalogue import ALL
from cdc.metrics.cells import Count, Distribution, Level
from cdc.metrics.families import Family
from cdc.metrics.snapshot import MetricsSnapshot, Value, read_snapshots

AnyFamily = Family[Count] | Family[Level] | Family[Distribution]


def live_metrics(directory: Path | None) -> Iterator[Metric]:
    """From the folder in which processes leave their snapshots."""
    snapshots = [] if directory is None else read_snapshots(directory)
    for family in ALL:
        name, text, labels = f"walbrook_{family.name}", family.text, list(family.labels)
        if family.bounds:
            histogram = HistogramMetricFamily(name, text, labels=labels)
            for of_series, value in _series(family, snapshots):
                if isinstance(value, list):
                    *counts, total = value
                    histogram.add_metric(of_series, _buckets(family.bounds, counts), total)
            yield histogram
            continue
        metric = (
            CounterMetricFamily(name, text, labels=labels)
            if family.make is Count
            else GaugeMetricFamily(name, text, labels=labels)
        )
        for of_series, value in _series(family, snapshots):
            if not isinstance(value, list):
                metric.add_metric(of_series, value)
        yield metric


def _series(
    family: AnyFamily, snapshots: Sequence[MetricsSnapshot]
) -> Iterator[tuple[tuple[str, ...], Value]]:
    seen: set[tuple[str, ...]] = set()
    for snapshot in snapshots:
        if snapshot.is_old and family.make is Level:
            continue
        for labels, value in snapshot.series.get(family.name, ()):
            if labels not in seen:
                seen.add(labels)
                yield labels, value


def _buckets(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Cumulated, as Prometheus has them."""
    edges = [*(repr(bound) for bound in bounds), "+Inf"]
    return list(zip(edges, accumulate(counts), strict=True))
