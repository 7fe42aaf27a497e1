"""Windows as the stage sees them: when a row is done with, and what closes with a watermark."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from cdc.eventtime.buffer import EventTimeBuffer
from cdc.eventtime.released import Released
from cdc.eventtime.sequencer import Step
from cdc.eventtime.times import Times
from spark_pipeline.eventtime.release import Told


class Windows(Protocol):
    """The windows of one consumer."""

    def due(self, times: Times) -> Times:
        """The watermark at which all windows that hold a row of each time have closed."""
        ...

    def results(
        self, done: Released | None, left: EventTimeBuffer, step: Step, now: datetime
    ) -> list[Told]:
        """What the windows came to that close with a step; some of their rows may be left."""
        ...
