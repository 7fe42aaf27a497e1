"""How far time has come for one consumer: its clocks, watermarks and, by arrival, row times.

The two orders differ here and nowhere else: by event time the rows say how far it has come, by
processing time the clock of their arrival does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from cdc.config import Sink as SinkConfig
from cdc.cursor import Cursor
from cdc.eventtime.arrival import ArrivalClock, Arrivals, ArrivalTracker, Bound
from cdc.eventtime.clock import SourceClock
from cdc.eventtime.times import Times
from cdc.eventtime.tracker import WatermarkTracker
from cdc.state.event_time import Planned, SourceStanding
from spark_pipeline.eventtime.timing import ArrivalTiming, RowTiming

_STEP_TOLD_US: Final = 1_000_000
_STEP_US: Final = 10_000_000
"""How often the clock moves a watermark that no window waits for, told to the sink or not: each
move is a small transaction."""


class Progress:
    """By event time."""

    def __init__(self, consumer: SinkConfig, sources: list[str], due: Callable[[Times], Times]):
        config = consumer.event_time
        assert config is not None
        self.clocks: Mapping[str, SourceClock] = {name: SourceClock() for name in sources}
        self.tracker = WatermarkTracker(
            clock=lambda source: self.clocks[source].now,
            idle_timeout_us=config.idle_timeout_us,
            safety_margin_us=config.safety_margin_us,
            due=due,
        )

    def timings(self, watermark: Callable[[], int]) -> Mapping[str, RowTiming] | None:
        """What gives the rows their times, by database; None if they carry them."""
        return None

    def arrived(
        self, cursors: Mapping[str, Cursor], reads: Mapping[str, Cursor]
    ) -> dict[str, list[Bound]]:
        """What has to be stored for the rows from these cursors on to have the same times again."""
        return {}

    def settled(self, cursors: Mapping[str, Cursor]) -> None:
        """Nothing below these cursors is read again."""


class ArrivalProgress(Progress):
    """By processing time."""

    def __init__(
        self,
        consumer: SinkConfig,
        sources: Mapping[str, SourceStanding],
        planned: Planned | None,
        clock: Callable[[], int],
    ) -> None:
        config, window = consumer.event_time, consumer.window
        assert config is not None
        clocks = {name: ArrivalClock(clock) for name in sources}
        step_us = _STEP_TOLD_US if config.emit_watermarks else _STEP_US
        self.clocks = clocks
        self.tracker = ArrivalTracker(
            sources,
            clock=lambda source: clocks[source].now,
            is_at_end=lambda source: clocks[source].is_at_end,
            step_us=step_us if window is None else window.slide_us,
            held=window is not None,
        )
        known = {name: each.read for name, each in sources.items()}
        if planned is not None:
            known |= planned.reads
        self._arrivals = {
            name: Arrivals(each.arrived, known[name]) for name, each in sources.items()
        }

    def timings(self, watermark: Callable[[], int]) -> Mapping[str, RowTiming]:
        return {name: ArrivalTiming(each, watermark) for name, each in self._arrivals.items()}

    def arrived(
        self, cursors: Mapping[str, Cursor], reads: Mapping[str, Cursor]
    ) -> dict[str, list[Bound]]:
        return {
            name: each.bounds(cursors[name], reads[name]) for name, each in self._arrivals.items()
        }

    def settled(self, cursors: Mapping[str, Cursor]) -> None:
        for name, each in self._arrivals.items():
            each.forget(cursors[name])


def progress_of(
    consumer: SinkConfig,
    sources: Mapping[str, SourceStanding],
    planned: Planned | None,
    due: Callable[[Times], Times],
    clock: Callable[[], int] | None = None,
) -> Progress:
    """For a consumer as it is taken up; ``clock`` gives microseconds since 1970."""
    if consumer.ordering == "processing_time":
        return ArrivalProgress(consumer, sources, planned, clock or wall_clock_us)
    return Progress(consumer, [*sources], due)


def wall_clock_us() -> int:
    return time.time_ns() // 1000
