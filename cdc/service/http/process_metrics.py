"""CPU time and memory of the processes of the service, from ``/proc``.

Of the driver's descendants the JVM is one process more, and all Python workers together another.
Where there is no ``/proc`` nothing is known.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

_PROC: Final = Path("/proc")
_JVM: Final = "java"


@dataclass(frozen=True)
class ProcessFigures:
    """``cpu_s``: with that of children that have ended."""

    name: str
    parent: int
    cpu_s: float
    resident_bytes: int


def process_metrics(pids: Mapping[str, int]) -> Iterator[Metric]:
    """Of these processes by name, and of their descendants."""
    cpu = CounterMetricFamily(
        "walbrook_process_cpu_seconds", "CPU time of a process.", labels=["process"]
    )
    memory = GaugeMetricFamily(
        "walbrook_process_resident_bytes",
        "Resident memory; what processes share counts for each of them.",
        labels=["process"],
    )
    for name, found in sorted(_by_name(pids, _all_figures()).items()):
        cpu.add_metric([name], sum(each.cpu_s for each in found))
        memory.add_metric([name], sum(each.resident_bytes for each in found))
    yield cpu
    yield memory


def _by_name(
    pids: Mapping[str, int], figures: Mapping[int, ProcessFigures]
) -> dict[str, list[ProcessFigures]]:
    children: dict[int, list[int]] = defaultdict(list)
    for pid, each in figures.items():
        children[each.parent].append(pid)
    named = {pid: name for name, pid in pids.items()}
    found: dict[str, list[ProcessFigures]] = defaultdict(list)
    for pid, name in named.items():
        if pid not in figures:
            continue
        found[name].append(figures[pid])
        below = [child for child in children[pid] if child not in named]
        while below:
            child = below.pop()
            of_jvm = figures[child].name == _JVM
            found[f"{name} {'jvm' if of_jvm else 'workers'}"].append(figures[child])
            below += children[child]
    return found


def _all_figures() -> dict[int, ProcessFigures]:
    """Of all processes that this account may see, in one pass."""
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    found = {}
    with suppress(OSError):
        for entry in os.scandir(_PROC):
            if entry.name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    text = (_PROC / entry.name / "stat").read_text()
                    found[int(entry.name)] = _figures(text, ticks, page)
    return found


def _figures(stat: str, ticks: int, page: int) -> ProcessFigures:
    """Read a line of ``/proc/<pid>/stat``; the name, in brackets, may hold anything."""
    before, _, after = stat.rpartition(")")
    fields = after.split()
    return ProcessFigures(
        name=before.partition("(")[2],
        parent=int(fields[1]),
        cpu_s=sum(int(field) for field in fields[11:15]) / ticks,
        resident_bytes=int(fields[21]) * page,
    )
