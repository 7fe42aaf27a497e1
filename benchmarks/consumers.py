"""How the cost of catching up grows with the number of consumers.

The service with 1, 5 and 20 sinks, each a Parquet folder of its own, catches up on the same number
of rows in the same way as in ``pipeline``. The end is when the last consumer has the last row.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.catch_up import (
    CaughtUp,
    catch_up,
    make_warm,
    parquet_target,
    require_whole,
    service_of,
)
from benchmarks.processes import cpu_s
from benchmarks.service import OWN_ROLES
from benchmarks.sizes import Sizes, progress
from benchmarks.source import BenchmarkSource, open_source

_COUNTS = (1, 5, 20)


@dataclass(frozen=True)
class ConsumersRun:
    """One number of consumers."""

    consumers: int
    caught_up: CaughtUp
    worker_failures: int
    warnings: int

    def figures(self) -> dict[str, object]:
        measured = self.caught_up
        used_s = cpu_s(measured.processes, OWN_ROLES)
        each_us = used_s * 1e6 / (measured.load.rows * self.consumers)
        own = {role: measured.processes[role] for role in OWN_ROLES if role in measured.processes}
        return {
            "seconds": round(measured.seconds, 2),
            "rows_per_s": round(measured.rows_per_s),
            "cpu_s": round(used_s, 2),
            "cpu_us_per_row_and_consumer": round(each_us, 2),
            "peak_rss_mb": round(sum(figures["peak_rss_mb"] for figures in own.values()), 1),
            "worker_failures": self.worker_failures,
            "warnings": self.warnings,
            "processes": measured.processes,
        }


def run(sizes: Sizes) -> dict[str, object]:
    """Each number of consumers with a service of its own, on one source."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-consumers-") as directory,
        open_source(Path(directory) / "postgres") as source,
    ):
        runs = [_run(Path(directory), source, count, sizes) for count in _COUNTS]
    alone_s = runs[0].caught_up.seconds
    return {
        "rows": sizes.rows,
        "transaction_rows": sizes.transaction_rows,
        **{
            f"growth_{each.consumers}": round(each.caught_up.seconds / alone_s, 2)
            for each in runs[1:]
        },
        "consumers": {str(each.consumers): each.figures() for each in runs},
    }


def _run(directory: Path, source: BenchmarkSource, count: int, sizes: Sizes) -> ConsumersRun:
    target = parquet_target(directory, source, f"lake_{count}", count)
    with service_of(directory, source, target) as service:
        make_warm(source, service, target, sizes)
        measured = catch_up(source, service, target, sizes)
        progress(f"consumers: {count} of them {measured.rows_per_s:,.0f} rows/s")
    require_whole(target, measured)
    source.drop_slot(service.slot)
    return ConsumersRun(count, measured, service.worker_failures(), service.warnings())
