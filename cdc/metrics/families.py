"""A measure with its labels, of which there is a bounded number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from cdc.metrics.cells import Count, Distribution, Level

Cell = TypeVar("Cell", Count, Level, Distribution)

SERIES_MAX: Final = 2_000
"""Of one measure in one process; what has more labels than that is counted and not shown."""

_making = threading.Lock()


@dataclass(frozen=True, eq=False)
class Family(Generic[Cell]):
    """``walbrook_<name>`` with its help text, the names of its labels, and its cells."""

    name: str
    text: str
    labels: tuple[str, ...]
    make: Callable[[], Cell]
    bounds: tuple[float, ...] = ()
    cells: dict[tuple[str, ...], Cell] = field(default_factory=dict)

    def of(self, *values: str) -> Cell:
        """The cell with these labels; a caller in a hot loop keeps it."""
        found = self.cells.get(values)
        if found is not None:
            return found
        if len(values) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {values}")
        with _making:
            if len(self.cells) >= SERIES_MAX:
                return self.make()
            return self.cells.setdefault(values, self.make())


def counter(name: str, text: str, *labels: str) -> Family[Count]:
    return Family(name, text, labels, Count)


def gauge(name: str, text: str, *labels: str) -> Family[Level]:
    return Family(name, text, labels, Level)


def histogram(name: str, text: str, bounds: Sequence[float], *labels: str) -> Family[Distribution]:
    found = tuple(bounds)
    return Family(name, text, labels, lambda: Distribution(found), found)
