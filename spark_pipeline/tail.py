"""The body of ``foreachBatch``: the planned range, then whatever the log gets while that is little.

Spark needs tens of milliseconds, and half a core, to begin the next micro-batch. So the body stays
and serves new batches in the driver as they are written. It gives control back to Spark when more
has come than the driver should do alone, when its lane ends, or after a bounded time.

Invariant: the source plans the next micro-batch from where the body got to. The body notes that
batch in the exchange before it returns.
"""

from __future__ import annotations

import time

from pyspark.sql import DataFrame

from cdc.log.open import open_log
from spark_pipeline.backlog import Bounds, fitting
from spark_pipeline.exchange import Exchange, Followed, PlannedRange
from spark_pipeline.passage import Passage
from spark_pipeline.plan import DRIVER_WORK_MAX
from spark_pipeline.settings import LaneSettings

_FOLLOWS_S = 10.0
_POLL_S = 0.2  # how often the end of the lane is looked for


class Tail:
    """Takes the micro-batches of one query for a passage."""

    def __init__(self, passage: Passage, exchange: Exchange, settings: LaneSettings) -> None:
        self._passage = passage
        self._exchange = exchange
        self._settings = settings
        self._log = open_log(settings.log_directory, history=passage.history)

    @property
    def next_batch(self) -> int:
        return self._passage.next_batch

    @property
    def history(self) -> int:
        return self._passage.history

    def take(self, markers: DataFrame | None, batch_id: int) -> None:
        """One micro-batch of Spark's, and what follows it in the log."""
        self._passage.take(markers, batch_id)
        began = time.monotonic()
        try:
            self._follow(began + _FOLLOWS_S)
        except Exception as error:
            self._passage.fail(error)
        self._exchange.note_followed(Followed(self.next_batch, time.monotonic() - began))

    def close(self) -> None:
        self._log.close()

    def _follow(self, until: float) -> None:
        passage = self._passage
        if passage.suspicious:
            return
        while not passage.ended.is_set() and (left_s := until - time.monotonic()) > 0:
            first = passage.next_batch
            end = self._log.wait(first, min(left_s, _POLL_S))
            batches, rows = fitting(self._log, first, end, self._most())
            if batches < end - first:
                return
            if batches:
                passage.take_range(PlannedRange(first, end, rows))

    def _most(self) -> Bounds:
        """How much the driver serves faster than the executors would."""
        consumers = max(1, len(self._passage.members.cursors))
        little = self._settings.little
        return Bounds(min(little.rows, DRIVER_WORK_MAX // consumers), little.bytes)
