"""How long after its commit a large transaction is in the log, received in pieces or whole.

One transaction of ``sizes.rows`` rows is written while the reader runs; the clock runs from the
moment COMMIT is sent to the last row that can be read from the log. The writer commits as soon as
it has written, so with streaming some of the rows are still on their way.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psycopg

from benchmarks.reader import measured_reader
from benchmarks.sizes import Sizes, progress
from benchmarks.source import BenchmarkSource, open_source

_FILL = "INSERT INTO orders SELECT * FROM new_orders(%s, %s)"


@dataclass(frozen=True)
class Arrival:
    """One large transaction."""

    after_commit_s: float
    reader_cpu_s: float
    peak_rss_mb: float


def run(sizes: Sizes) -> dict[str, object]:
    """``sizes.rounds`` transactions each way, in turns; medians."""
    arrivals: dict[bool, list[Arrival]] = {False: [], True: []}
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-large-") as directory,
        open_source(Path(directory) / "postgres") as source,
    ):
        for number in range(sizes.rounds):
            for streamed, found in arrivals.items():
                name = f"{'pieces' if streamed else 'whole'}_{number}"
                found.append(_arrival(Path(directory) / name, source, sizes.rows, name, streamed))
                progress(f"large, {name}: {found[-1].after_commit_s:.1f} s after the commit")
    whole, pieces = _figures("whole", arrivals[False]), _figures("pieces", arrivals[True])
    return {"rows": sizes.rows, **whole, **pieces}


def _figures(name: str, arrivals: list[Arrival]) -> dict[str, object]:
    return {
        f"{name}_after_commit_s": round(median(a.after_commit_s for a in arrivals), 2),
        f"{name}_reader_cpu_s": round(median(a.reader_cpu_s for a in arrivals), 2),
        f"{name}_peak_rss_mb": max(a.peak_rss_mb for a in arrivals),
        f"{name}_rounds_s": [round(a.after_commit_s, 2) for a in arrivals],
    }


def _arrival(
    directory: Path, source: BenchmarkSource, rows: int, name: str, streamed: bool
) -> Arrival:
    wanted = {"stream_transactions": streamed}
    with measured_reader(directory, source, name, database=wanted) as reader:
        committed_at = _write(source, rows)
        ended_at = reader.wait_for_rows(rows + 1)
    source.drop_slot(name)
    figures = reader.meter.figures()["reader"]
    return Arrival(ended_at - committed_at, figures["cpu_s"], figures["peak_rss_mb"])


def _write(source: BenchmarkSource, rows: int) -> float:
    """Empty the table, one change, and fill it; when that COMMIT was sent, by ``perf_counter``."""
    with psycopg.connect(source.postgres.dsn) as connection:
        connection.execute("TRUNCATE orders")
        connection.commit()
        connection.execute(_FILL, (1, rows))
        committed_at = time.perf_counter()
        connection.commit()
    return committed_at
