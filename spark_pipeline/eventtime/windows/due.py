"""Windows as the stage sees them: when a row is done with, and what closes with a watermark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from pyspark.sql import SparkSession

from cdc.change import synthetic_rows
from cdc.config.event_time import Window
from cdc.cursor_columns import cursor_at
from cdc.eventtime.buffer import EventTimeBuffer
from cdc.eventtime.released import Released, both
from cdc.eventtime.sequencer import WatermarkStep
from cdc.eventtime.times import NO_TIME, Times
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.delivery.outcome import Poison
from spark_pipeline.eventtime.release import WINDOW, OwnRows
from spark_pipeline.eventtime.windows.aggregate import WindowAggregator, WindowSpec, last_window_end
from spark_pipeline.eventtime.windows.tables import Tables


@dataclass(frozen=True)
class WindowResults:
    """What closed with a step: its messages, and the changes that could not be counted in."""

    own: list[OwnRows]
    bad: dict[int, list[Poison]]  # by the place of their database


class Windows(Protocol):
    """The windows of one consumer."""

    def due(self, times: Times) -> Times:
        """The watermark at which all windows that hold a row of each time have closed."""
        ...

    def results(
        self, done: Released | None, left: EventTimeBuffer, step: WatermarkStep, now: datetime
    ) -> WindowResults:
        """What the windows came to that close with a step; some of their rows may be left."""
        ...


class SparkWindows:
    """Computed on Spark, over the changes themselves: nothing but they is kept of a window."""

    def __init__(
        self,
        spark: SparkSession,
        consumer: str,
        window: Window,
        tables: Tables,
        origins: Sequence[Origin],
    ) -> None:
        self._size, self._slide = window.size_us, window.slide_us
        spec = WindowSpec(self._size, self._slide, window.group_by, window.aggregates)
        self._aggregator = WindowAggregator(spark, consumer, spec, tables, origins)

    def due(self, times: Times) -> Times:
        return last_window_end(times, self._size, self._slide) - 1

    def results(
        self, done: Released | None, left: EventTimeBuffer, step: WatermarkStep, now: datetime
    ) -> WindowResults:
        found = done
        if self._slide < self._size and self._closes(step):
            rest = left.within(NO_TIME + 1, step.watermark + 1)
            found = both(done, rest)
        if found is None:
            return WindowResults([], {})
        rows = found.rows
        closed = self._aggregator.close(
            rows, found.times, (step.before, step.watermark), found.sources
        )
        own = []
        if closed.results.num_rows:
            own.append(OwnRows(synthetic_rows(WINDOW, closed.results.column("record"), now)))
        bad: dict[int, list[Poison]] = {}
        for at, what in sorted(closed.bad.items()):
            bad.setdefault(int(found.sources[at]), []).append(Poison(cursor_at(rows, at), what))
        return WindowResults(own, bad)

    def _closes(self, step: WatermarkStep) -> bool:
        """Whether a window ends between the two watermarks."""
        if step.before == NO_TIME:
            return True
        return (step.watermark + 1) // self._slide > (step.before + 1) // self._slide
