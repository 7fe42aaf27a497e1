"""What this machine has left: memory and disk, as the kernel and the control group say.

Where a system does not say (macOS has no ``/proc``), nothing is known and nothing is warned of.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc.state.health import Condition

_MEMORY: Final = Path("/proc/meminfo")
_GROUP: Final = Path("/sys/fs/cgroup")
_PACE_S: Final = 5.0
_RECOVERED: Final = 1.25
"""A warning ends once there is this much more than its bound: it must not come and go."""
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Left:
    """Bytes that are left; None where the machine does not say."""

    memory: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class MachineBounds:
    """Below which a warning is given; 0 gives none."""

    memory: int = 256 * _MIB
    disk: int = 1024 * _MIB


def memory_left(meminfo: Path = _MEMORY, group: Path = _GROUP) -> int | None:
    """Memory that can still be used: that of the machine, or less in a control group."""
    found = [_available(meminfo), _left_in_group(group)]
    return min((each for each in found if each is not None), default=None)


def disk_left(directory: Path) -> int | None:
    """Bytes that an ordinary account may still write there."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


class MachineWatch:
    """Looks every few seconds at memory, and at the disk of one directory."""

    def __init__(
        self,
        directory: Path,
        bounds: MachineBounds,
        look: Callable[[], Left] | None = None,
    ) -> None:
        self._directory = directory
        self._bounds = bounds
        self._look = look or (lambda: Left(memory_left(), disk_left(directory)))
        self._looked_at = float("-inf")
        self._conditions: dict[str, Condition] = {}
        self.left = Left()

    def conditions(self) -> list[Condition]:
        """What there is too little of."""
        if time.monotonic() - self._looked_at >= _PACE_S:
            self._looked_at = time.monotonic()
            self.left = self._look()
            self._judge(self.left.memory, self._bounds.memory, self._little_memory())
            self._judge(self.left.disk, self._bounds.disk, self._little_disk())
        return [*self._conditions.values()]

    def _judge(self, left: int | None, bound: int, condition: Condition) -> None:
        was = condition.kind in self._conditions
        if left is not None and left < bound * (_RECOVERED if was else 1):
            self._conditions[condition.kind] = condition
        else:
            self._conditions.pop(condition.kind, None)

    def _little_memory(self) -> Condition:
        return Condition(
            "memory_low",
            "warning",
            f"less than {self._bounds.memory // _MIB} MiB of memory are available to the service; "
            "the system ends a process when there is none",
            "give the machine or its container more memory, or let others on it use less; "
            "service.health.min_memory is the bound",
        )

    def _little_disk(self) -> Condition:
        return Condition(
            "disk_low",
            "warning",
            f"less than {self._bounds.disk // _MIB} MiB are free on the disk of "
            f"{self._directory}; when it is full, reading stops and the source keeps its WAL",
            "free space there, or lower log.max_bytes and log.retain_bytes; "
            "service.health.min_disk is the bound",
        )


def _available(meminfo: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_group(group: Path) -> int | None:
    """What a container may still use; its file cache can be dropped."""
    with suppress(OSError, ValueError):
        most = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, most - used + int(stat["inactive_file"]))
    return None
