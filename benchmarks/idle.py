"""What the service costs while nothing is written: CPU time of its processes.

It runs with one file sink and has delivered some rows. Then it is left alone, first until what they
left to do is done, and measured for ``sizes.seconds``.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.catch_up import Target, service_of, wait_arrived, wait_delivering
from benchmarks.processes import ProcessMeter, cpu_s
from benchmarks.service import OWN_ROLES
from benchmarks.sizes import Sizes, progress
from benchmarks.source import open_source

_NAME = "idle"
_WARM_UP_ROWS, _WARM_UP_TRANSACTION_ROWS = 20_000, 100
_QUIET_S = 10.0


def run(sizes: Sizes) -> dict[str, object]:
    """Deliver, wait, then measure while nothing happens."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-idle-") as name,
        open_source(Path(name) / "postgres") as source,
    ):
        target = Target(
            _NAME,
            {_NAME: {"type": "file", "path": str(Path(name) / "files")}},
            lambda: source.delivered(_NAME),
            lambda: [source.delivered(_NAME)],
        )
        with service_of(Path(name), source, target) as service:
            wait_delivering(source, service, target)
            source.load(_WARM_UP_ROWS, _WARM_UP_TRANSACTION_ROWS)
            wait_arrived(service, target)
            time.sleep(_QUIET_S)
            progress(f"idle: nothing for {sizes.seconds} s")
            started_at = time.perf_counter()
            with ProcessMeter(service.roles) as meter:
                time.sleep(sizes.seconds)
            took_s = time.perf_counter() - started_at
            warnings = service.warnings()
    figures = meter.figures()
    return {
        "seconds": sizes.seconds,
        "idle_cpu_percent": _percent(cpu_s(figures, OWN_ROLES), took_s),
        "cpu_percent": {role: _percent(each["cpu_s"], took_s) for role, each in figures.items()},
        "warnings": warnings,
        "processes": figures,
    }


def _percent(used_s: float, took_s: float) -> float:
    return round(100 * used_s / took_s, 2)
