"""The body of ``foreachBatch``: the planned range, then whatever the log gets while that is little.

Spark needs tens of milliseconds, and half a core, to begin the next micro-batch. So the body stays
and decodes new batches in the driver as they are written. It gives control back to Spark when more
has come than the driver should do alone, when the stage ends, or after a bounded time.

Invariants: every range that was decoded goes into the feed, in order. The source plans the next
micro-batch from where the body got to: the body notes that batch in the exchange before it returns.
Batches that no worker in the feed needs are passed over without being decoded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pyspark.sql import DataFrame

from cdc.cursor import Cursor
from cdc.errors import GapError, WalbrookError
from cdc.log.segment import high_of
from spark_pipeline.capacity.backlog import Bounds, fitting
from spark_pipeline.delivery.isolate import as_walbrook_error
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.planner import Planner
from spark_pipeline.feed.progress import StageProgress
from spark_pipeline.slices.exchange import Exchange, Overrun, PlannedRange

_FOLLOWS_S = 10.0
_POLL_S = 0.2  # how often the end of the stage is looked for


class FeedBody:
    """Takes the micro-batches of one query. ``isolate`` keeps decoding out of this process."""

    def __init__(
        self,
        feed: Feed,
        planner: Planner,
        exchange: Exchange,
        progress: StageProgress,
        ended: threading.Event,
        *,
        little: Bounds,
        isolate: bool = False,
        on_read: Callable[[Cursor], None] = lambda _read_to: None,
    ) -> None:
        self._feed = feed
        self._planner = planner
        self._exchange = exchange
        self._progress = progress
        self._ended = ended
        self._little = little
        self._isolate = isolate
        self._on_read = on_read
        self._log = planner.log()
        self.failure: WalbrookError | None = None

    @property
    def next_batch(self) -> int:
        return self._feed.position

    @property
    def history(self) -> int:
        return self._feed.history

    def take(self, frame: DataFrame | None, _batch_id: int) -> None:
        """One micro-batch as Spark planned it, and what follows it in the log.

        Raising here would make Spark print pages and tell only a text. So the query's
        runner finds the failure here; until the query is stopped, nothing more is taken.
        """
        if self._is_over:
            return
        self._feed.is_filled = True
        followed_s = 0.0
        try:
            # A note that is missing for another reason shows at the next one: as a missing range. A
            # micro-batch without rows has none of its own: the note is then of an earlier one.
            planned = self._exchange.planned()
            if planned is not None and planned.end > self._feed.position:
                self.take_range(planned, frame)
            began = time.monotonic()
            self._follow(began + _FOLLOWS_S)
            followed_s = time.monotonic() - began
        except Exception as error:
            self.failure = as_walbrook_error(error)
        self._exchange.note_followed(Overrun(self._feed.position, followed_s))

    def take_range(self, planned: PlannedRange, frame: DataFrame | None = None) -> None:
        """Decode a range into the feed if a worker needs it; without ``frame`` in the driver."""
        demand = self._feed.demand()
        if demand is None or demand >= planned.end:
            self.skip_to(planned.end)
            return
        self._progress.begin("decode", planned.rows)
        try:
            plan = self._planner.plan(frame, planned, len(self._feed.readers), self._isolate)
            try:
                decoded = DecodedRange.decode(self.history, planned.start, planned.end, plan)
            except GapError:
                raise
            except WalbrookError as error:
                self._feed.fail(error)
                raise
            self._progress.decoded(decoded)
            self._progress.begin("wait", planned.rows)
            self._feed.put(decoded, self._ended)
        finally:
            self._progress.end()
        self._isolate = False
        self._on_read(self._feed.high)

    def skip_to(self, batch: int) -> None:
        """Pass over what no worker in the feed needs."""
        self._feed.skip(batch, self._high(batch))
        self._on_read(self._feed.high)

    def close(self) -> None:
        self._log.close()

    @property
    def _is_over(self) -> bool:
        return self._ended.is_set() or self.failure is not None

    def _follow(self, until: float) -> None:
        while not self._is_over and (left_s := until - time.monotonic()) > 0:
            first = self._feed.position
            end = self._log.wait(first, min(left_s, _POLL_S))
            if end <= first:
                continue
            # While all are busy more comes together: one larger range costs less than two.
            if self._feed.wait_for_idle(_POLL_S):
                end = self._log.next_batch()
            if self._isolate and self._feed.demand() is not None:
                return
            batches, rows = fitting(self._log, first, end, self._most())
            if batches < end - first:
                return
            self.take_range(PlannedRange(first, end, rows))

    def _most(self) -> Bounds:
        """How much the driver serves faster than the executors would."""
        consumers = max(1, len(self._feed.readers))
        return Bounds(self._little.rows // consumers, self._little.bytes)

    def _high(self, end: int) -> Cursor:
        """The high watermark of the batch before ``end``."""
        with suppress(GapError):
            return high_of(self._log.entries(end - 1, end)[0])
        return self._feed.high
