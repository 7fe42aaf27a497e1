"""How long the service takes from its start to the first delivered change.

Each round starts a new service with one file sink twice. The first time it makes its slot and its
state, and a row is written as soon as the slot is there; the second time a row waits for it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.catch_up import BenchmarkTarget, file_target, service_of
from benchmarks.service import RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.source import BenchmarkSource, open_source

_TIMEOUT_S = 180.0


def run(sizes: Sizes) -> dict[str, object]:
    """``sizes.rounds`` rounds; medians."""
    first_s: list[float] = []
    again_s: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-start-") as name,
        open_source(Path(name) / "postgres") as source,
    ):
        for number in range(sizes.rounds):
            target = file_target(Path(name), source, f"start_{number}")
            service = service_of(Path(name), source, target)
            first_s.append(_first(source, service, target))
            again_s.append(_again(source, service, target))
            progress(f"start: {first_s[-1]:.1f} s, again {again_s[-1]:.1f} s")
            source.drop_slot(service.slot)
    return {
        "first_change_s": round(median(first_s), 2),
        "restart_first_change_s": round(median(again_s), 2),
        "rounds": {
            "first_change_s": [round(each, 2) for each in first_s],
            "restart_first_change_s": [round(each, 2) for each in again_s],
        },
    }


def _first(source: BenchmarkSource, service: RunningService, target: BenchmarkTarget) -> float:
    started_at = time.perf_counter()
    with service:
        service.until("the slot", lambda: source.has_slot(service.slot), _TIMEOUT_S)
        source.load(1, 1)
        return _delivered(service, target, 0) - started_at


def _again(source: BenchmarkSource, service: RunningService, target: BenchmarkTarget) -> float:
    before = min(target.held())
    source.load(1, 1)
    started_at = time.perf_counter()
    with service:
        return _delivered(service, target, before) - started_at


def _delivered(service: RunningService, target: BenchmarkTarget, before: int) -> float:
    """When the folder held more lines than before."""
    return service.until("a change", lambda: min(target.held()) > before, _TIMEOUT_S)
