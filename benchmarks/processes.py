"""CPU time and memory of processes, by role, while something is measured.

Processes come and go, so they are looked up again for each sample. CPU time is what a role's
processes used between the first and the last sample; what a process used after its last sample is
lost. Memory is the largest sum of resident sizes; pages that processes share count for each.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import psutil

Figures = dict[str, dict[str, float]]
Roles = Callable[[], Iterable[tuple[str, psutil.Process]]]

_SAMPLE_S = 0.25
_MB = 1 << 20


class ProcessMeter:
    """Samples in a thread from ``with`` to its end."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._before: dict[tuple[str, psutil.Process], float] = {}
        self._after: dict[tuple[str, psutil.Process], float] = {}
        self._peak_bytes: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._before = dict(self._after)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def figures(self) -> Figures:
        """``cpu_s``, ``peak_rss_mb`` and ``processes``, the most at a time, of each role."""
        cpu_s = dict.fromkeys(self._peak_bytes, 0.0)
        for key, seconds in self._after.items():
            cpu_s[key[0]] += seconds - self._before.get(key, 0.0)
        return {
            role: {
                "cpu_s": round(cpu_s[role], 2),
                "peak_rss_mb": round(peak / _MB, 1),
                "processes": self._most[role],
            }
            for role, peak in sorted(self._peak_bytes.items())
        }

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        resident: dict[str, int] = {}
        count: Counter[str] = Counter()
        for role, process in self._roles():
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._after[role, process] = times.user + times.system
            resident[role] = resident.get(role, 0) + memory.rss
            count[role] += 1
        for role, size in resident.items():
            self._peak_bytes[role] = max(self._peak_bytes.get(role, 0), size)
            self._most[role] = max(self._most.get(role, 0), count[role])


def cpu_s(figures: Figures, roles: Iterable[str]) -> float:
    """What these roles used together, as far as there were any."""
    return sum(figures[role]["cpu_s"] for role in roles if role in figures)


def pss_mb(processes: Iterable[psutil.Process]) -> float:
    """Memory of processes together; pages that several share count once among them."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return round(total / _MB, 1)


def family(pid: int) -> list[psutil.Process]:
    """A process and everything below it; nothing if it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
