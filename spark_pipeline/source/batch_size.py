"""How many rows a micro-batch may take, so that each takes about as long as is wanted. Pure.

Invariant: the limit stays between its floor and its ceiling, and no step more than
doubles or halves it. A micro-batch that took all there was says nothing about what a larger one
would take, so it never raises the limit; one that took too long always lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS_MIN = 1_000
"""Below this a micro-batch costs more than its rows."""

_FIRST_SHARE = 4
_STEP_MAX = 2.0


@dataclass(frozen=True)
class _HandedOut:
    end: int
    at_s: float
    limited: bool


class Admission:
    """The current limit. ``target_s`` 0 leaves it at ``rows_max``."""

    def __init__(self, rows_max: int, target_s: float) -> None:
        self._rows_max = rows_max
        self._rows_min = min(ROWS_MIN, rows_max)
        self._target_s = target_s
        # The first micro-batches start workers and warm the JVM: the cost of rows is not known yet.
        # From a quarter it takes two steps to the ceiling if all is well.
        first = max(self._rows_min, rows_max // _FIRST_SHARE)
        self.rows = first if target_s else rows_max
        self._under_way: _HandedOut | None = None

    def handed_out(self, end: int, now_s: float, *, limited: bool) -> None:
        """A range up to ``end`` was given; ``limited``: this limit kept it from being longer."""
        self._under_way = _HandedOut(end, now_s, limited)

    def asked(self, start: int, now_s: float, widened_by: float = 1.0) -> None:
        """What follows ``start`` is asked for: the micro-batch that ended there is done.

        Under pressure it may have taken longer, ``widened_by`` times what is wanted.
        """
        done, self._under_way = self._under_way, None
        if done is None or done.end != start or not self._target_s:
            return
        target_s = self._target_s * widened_by
        step = max(1 / _STEP_MAX, target_s / max(target_s / _STEP_MAX, now_s - done.at_s))
        if step > 1 and not done.limited:
            return
        self.rows = max(self._rows_min, min(self._rows_max, round(self.rows * step)))
