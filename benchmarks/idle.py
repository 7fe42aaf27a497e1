"""What the service costs while nothing is written: CPU time and memory of its processes.

It has delivered some rows and is left alone, first until what they left to do is done. CPU time is
measured with one file sink for ``sizes.seconds``, memory with ten.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.catch_up import file_target, service_of, wait_arrived, wait_delivering
from benchmarks.processes import ProcessMeter, cpu_s, pss_mb
from benchmarks.service import OWN_ROLES, RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.source import BenchmarkSource, open_source

_SINKS = 10
_WARM_UP_ROWS, _WARM_UP_TRANSACTION_ROWS = 20_000, 100
_QUIET_S = 10
_LET_GO_S = 90  # Spark lets Python workers go that had nothing to do for a minute


def run(sizes: Sizes) -> dict[str, object]:
    """Deliver, wait, then measure while nothing happens."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-idle-") as name,
        open_source(Path(name) / "postgres") as source,
    ):
        quiet_s = min(_QUIET_S, sizes.seconds)
        with _quiet(Path(name), source, "idle", 1, quiet_s) as service:
            progress(f"idle: nothing for {sizes.seconds} s")
            started_at = time.perf_counter()
            with ProcessMeter(service.roles) as meter:
                time.sleep(sizes.seconds)
            took_s = time.perf_counter() - started_at
            warnings = service.warnings()
        source.drop_slot(service.slot)
        quiet_s = min(_LET_GO_S, 3 * sizes.seconds)
        with _quiet(Path(name), source, "ten", _SINKS, quiet_s) as service:
            memory = _memory(service)
            warnings += service.warnings()
    figures = meter.figures()
    return {
        "seconds": sizes.seconds,
        "idle_cpu_percent": _percent(cpu_s(figures, OWN_ROLES), took_s),
        "cpu_percent": {role: _percent(each["cpu_s"], took_s) for role, each in figures.items()},
        "idle_pss_mb": round(sum(memory.values()), 1),
        "pss_mb": memory,
        "warnings": warnings,
        "processes": figures,
    }


@contextmanager
def _quiet(
    directory: Path, source: BenchmarkSource, name: str, sinks: int, quiet_s: int
) -> Iterator[RunningService]:
    """A service that has delivered something and has nothing to do any more."""
    target = file_target(directory, source, name, sinks)
    with service_of(directory, source, target) as service:
        wait_delivering(source, service, target)
        source.load(_WARM_UP_ROWS, _WARM_UP_TRANSACTION_ROWS)
        wait_arrived(service, target)
        time.sleep(quiet_s)
        yield service


def _memory(service: RunningService) -> dict[str, float]:
    """PSS of the service's own processes, by role."""
    found = list(service.own_roles())
    return {
        role: pss_mb(process for own, process in found if own == role)
        for role in sorted({role for role, _ in found})
    }


def _percent(used_s: float, took_s: float) -> float:
    return round(100 * used_s / took_s, 2)
