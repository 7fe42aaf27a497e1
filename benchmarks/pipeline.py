"""How fast the whole way catches up, into a Redis stream, into Kafka and into Parquet.

The yardstick, ``pg_recvlogical``, reads the same rows from a slot of its own, after the service has
stopped. A bare psycopg loop drains a copy of that slot: the limit of any client in Python.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.catch_up import (
    BenchmarkTarget,
    CaughtUp,
    catch_up,
    kafka_target,
    make_warm,
    parquet_target,
    redis_target,
    require_whole,
    service_of,
)
from benchmarks.recvlogical import receive
from benchmarks.sizes import Sizes, progress
from benchmarks.slot_drain import drain
from benchmarks.source import BenchmarkSource, open_source

_REFERENCE, _LIMIT = "reference", "bare_loop"


@dataclass(frozen=True)
class PipelineRun:
    """One target, and the yardstick on the same rows."""

    caught_up: CaughtUp
    recvlogical_rows_per_s: float
    slot_rows_per_s: float
    warnings: int


def run(sizes: Sizes) -> dict[str, object]:
    """All targets, one after the other, on one source."""
    runs: dict[str, PipelineRun] = {}
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-pipeline-") as name,
        open_source(Path(name) / "postgres") as source,
    ):
        directory = Path(name)
        with redis_target(directory) as target:
            runs["redis"] = _run(directory, source, target, sizes)
        with kafka_target(directory) as target:
            runs["kafka"] = _run(directory, source, target, sizes)
        target = parquet_target(directory, source, "parquet")
        runs["parquet"] = _run(directory, source, target, sizes)
    # The best of the runs of the yardstick: a busy moment must not flatter us.
    reference = max(each.recvlogical_rows_per_s for each in runs.values())
    rates = {name: each.caught_up.rows_per_s for name, each in runs.items()}
    return {
        "rows": sizes.rows,
        "transaction_rows": sizes.transaction_rows,
        **{f"rows_per_s_{name}": round(rate) for name, rate in rates.items()},
        "recvlogical_rows_per_s": round(reference),
        "slot_rows_per_s": round(max(each.slot_rows_per_s for each in runs.values())),
        **{f"pipeline_ratio_{name}": round(rate / reference, 3) for name, rate in rates.items()},
        "load_s": {name: round(each.caught_up.load_s, 1) for name, each in runs.items()},
        "warnings": {name: each.warnings for name, each in runs.items()},
        "rounds": {
            "recvlogical_rows_per_s": [
                round(each.recvlogical_rows_per_s) for each in runs.values()
            ],
            "slot_rows_per_s": [round(each.slot_rows_per_s) for each in runs.values()],
        },
        "processes": {name: each.caught_up.processes for name, each in runs.items()},
    }


def _run(
    directory: Path, source: BenchmarkSource, target: BenchmarkTarget, sizes: Sizes
) -> PipelineRun:
    with service_of(directory, source, target) as service:
        make_warm(source, service, target, sizes)
        source.create_slot(_REFERENCE)
        measured = catch_up(source, service, target, sizes)
        progress(f"pipeline: {target.name} {measured.rows_per_s:,.0f} rows/s")
    require_whole(target, measured)
    with source.slot_copy(_REFERENCE, _LIMIT) as slot:
        limit = drain(source.postgres, slot, measured.load)
    progress(f"pipeline: a bare psycopg loop {limit:,.0f} rows/s")
    reference = receive(source.postgres, _REFERENCE, measured.load)
    progress(f"pipeline: pg_recvlogical {reference:,.0f} rows/s")
    source.drop_slot(_REFERENCE)
    source.drop_slot(service.slot)
    return PipelineRun(measured, reference, limit, service.warnings())
