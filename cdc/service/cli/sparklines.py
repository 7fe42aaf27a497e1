"""Rates and lags of the last looks, as lines of blocks for ``walbrook status --watch``.

Invariant: it keeps ``LOOKS_MAX`` figures per sink, and none of a sink that is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cdc.service.cli.row_listing import Row
from cdc.state.operators import State

LOOKS_MAX: Final = 30
_BLOCKS: Final = "▁▂▃▄▅▆▇█"

_Key = tuple[str, str]


def _figures() -> deque[float]:
    return deque(maxlen=LOOKS_MAX)


@dataclass
class _OfSink:
    delivered: int
    rates: deque[float] = field(default_factory=_figures)
    lags: deque[float] = field(default_factory=_figures)


@dataclass
class RateHistory:
    """What was delivered per second between two looks, and the lag at each."""

    HEADINGS = ("sink", ">changes/s", "delivered", ">lag s", "lag")

    _sinks: dict[_Key, _OfSink] = field(default_factory=dict)
    _looked_at: float | None = None

    def note(self, now_s: float, sinks: Iterable[State], lags: Iterable[State]) -> None:
        """One look: the rows of the listings ``sinks`` and ``lag``."""
        behind = {_key(row): float(str(row["lag_seconds"] or 0)) for row in lags}
        passed_s = None if self._looked_at is None else now_s - self._looked_at
        seen: dict[_Key, _OfSink] = {}
        for row in sinks:
            if not row["active"]:
                continue
            key, delivered = _key(row), int(str(row["delivered"]))
            known = seen[key] = self._sinks.get(key) or _OfSink(delivered)
            if passed_s:
                known.rates.append(max(0, delivered - known.delivered) / passed_s)
            known.delivered = delivered
            known.lags.append(behind.get(key, 0.0))
        self._sinks, self._looked_at = seen, now_s

    def rows(self) -> list[Row]:
        """A row per sink."""
        return [
            Row(
                (
                    f"{source}/{sink}",
                    f"{known.rates[-1]:,.0f}" if known.rates else "",
                    sparkline(known.rates),
                    f"{known.lags[-1]:,.1f}",
                    sparkline(known.lags),
                )
            )
            for (source, sink), known in sorted(self._sinks.items())
        ]


def sparkline(figures: Sequence[float]) -> str:
    """A block per figure, as high as its share of the largest."""
    top = max(figures, default=0.0)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(each / top * steps) if top else 0] for each in figures)


def _key(row: State) -> _Key:
    return str(row["source"]), str(row["consumer"])
