"""The ranges of one source for one worker: from the feed at the head of the log, else from the log.

A worker that is behind (it failed, is slow, was moved back, is new, or was paused) reads the log
itself, in the driver when that is little, as a Spark job when it is much, and is in the feed again
when it gets there. How many workers of a source do that at a time is bounded.

An input belongs to its worker's thread. Invariant: a range begins with the batch that is needed
next, and that batch moves when the range was taken without an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.log.open import open_log
from cdc.log.view import LogReader
from spark_pipeline.capacity.backlog import fits, fitting
from spark_pipeline.delivery.measures import DeliveryMeasures
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.feed import BehindError
from spark_pipeline.feed.plan import job_group
from spark_pipeline.feed.planner import Planner
from spark_pipeline.slices.exchange import PlannedRange
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.state import CurrentState, Work

_STALLED_S = 0.4
POLL_S = 0.05
"""How often a worker outside the feed looks for more in the log."""


class Input:
    """``woken`` is set when the worker has to act, and, in the feed, when a range arrives.

    ``on_serve`` is called before a range is waited for, or read. ``isolate`` keeps decoding out of
    this process.
    """

    def __init__(
        self,
        consumer: SinkConfig,
        context: WorkerContext,
        woken: threading.Event,
        current: CurrentState,
        on_serve: Callable[[], None],
        *,
        isolate: bool = False,
    ) -> None:
        self.context = context
        self.settings = context.settings
        self.source = context.settings.source
        self.retries = RetryQueue(
            consumer,
            context.settings,
            context.run,
            context.refusals,
            context.settler.feed_run,
            context.settler.records,
        )
        self.measures = DeliveryMeasures(self.source, consumer.name)
        self.job_group = job_group(context.run, self.source, consumer.name)
        """What the worker's Spark jobs of this source are cancelled by."""
        self.isolate = isolate
        self.is_live = False
        """Whether it was in the feed when it was last asked for a range."""
        self.batch = 0
        """The next batch of the log that the worker needs."""
        self._consumer = consumer
        self._woken = woken
        self._current = current
        self._on_serve = on_serve
        self._stalled_since: float | None = None  # monotonic
        self._log: LogReader | None = None
        self._planner: Planner | None = None

    @property
    def log(self) -> LogReader:
        assert self._log is not None
        return self._log

    @property
    def planner(self) -> Planner:
        assert self._planner is not None
        return self._planner

    @property
    def has_next(self) -> bool:
        """Whether a range with changes is there to be taken at once."""
        if self.is_live:
            return self.context.feed.has_rows(self._consumer.name)
        end = self.log.next_batch()
        return end > self.batch and bool(self.log.entries(self.batch, end)["rows"].any())

    def open(self) -> LogReader:
        """Open the log, in the history that it is in now."""
        self.close()
        self._log = open_log(self.settings.log_directory)
        return self._log

    def begin(self, cursor: Cursor) -> None:
        """Go on from a cursor."""
        self.batch = self.log.seek(cursor)
        self._planner = Planner(
            self.settings,
            self.log.history(),
            self.context.scratch,
            pool="catch_up",
            spark=self.context.session,
            job_group=self.job_group,
        )

    def leave(self) -> None:
        """Take part in the feed no more, until the next range is asked for."""
        self.context.feed.leave(self._consumer.name)

    def rest(self, wait_s: float) -> None:
        """Take nothing for so long, or until the worker has to act: others need not wait for it."""
        self.leave()
        self.is_live = False
        self._current.live()
        self._woken.wait(wait_s)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._planner is not None:
            self._planner.close()
        self._log = self._planner = None

    @contextmanager
    def next(self, wait_s: float) -> Iterator[DecodedRange | None]:
        """The range with the next batch; None if there is none within ``wait_s``.

        It is closed, and passed, when the block ends.
        """
        with ExitStack() as held:
            decoded = self._from_feed(held, wait_s)
            if decoded is None and not self.is_live:
                decoded = self._from_log(held, wait_s)
            yield decoded
        if decoded is not None:
            self.batch, self._stalled_since = decoded.end, None

    @contextmanager
    def next_below(self, cursor: Cursor) -> Iterator[DecodedRange | None]:
        """The next range of the log that ends where a cursor stands, or before; not of the feed.

        A batch in the middle of which the cursor stands comes whole, and is needed again.
        """
        self.leave()
        self.is_live = False
        last = self.log.seek(cursor)
        with ExitStack() as held:
            decoded = self._from_log(held, 0.0, last if last > self.batch else last + 1)
            yield decoded
        if decoded is not None:
            self.batch = min(decoded.end, max(last, self.batch))

    def _from_feed(self, held: ExitStack, wait_s: float) -> DecodedRange | None:
        feed, name = self.context.feed, self._consumer.name
        if self._is_alone:
            feed.leave(name)  # it goes on without it, and joins again at another batch
            self.is_live = False
            return None
        joined = feed.join(name, self.log.history(), self.batch, self._woken)
        self.is_live = joined
        if not joined:
            return None
        self._on_serve()
        try:
            decoded = held.enter_context(feed.next(name, wait_s))
        except BehindError:
            return None  # the next time it reads the log
        if decoded is not None:
            self.measures.waited(time.monotonic() - decoded.decoded_at)
        elif self._is_stalled():
            feed.leave(name)
            self.is_live = False
        return decoded

    @property
    def _is_alone(self) -> bool:
        """Whether it takes nothing from the feed: it must not, or the feed is not filled yet."""
        return self.isolate or self.context.awaits_spark

    def _is_stalled(self) -> bool:
        """Whether the log has had a little for a while that the feed does not bring.

        So it is if Spark takes long between two micro-batches: then the worker leaves the feed and
        serves itself. Where there is much it waits for the feed.
        """
        end = self.log.next_batch()
        if end <= max(self.batch, self.context.feed.position):
            self._stalled_since = None
            return False
        now = time.monotonic()
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since < _STALLED_S:
            return False
        return fits(self.log, self.batch, end, self.settings.little)

    def _from_log(
        self, held: ExitStack, wait_s: float, last: int | None = None
    ) -> DecodedRange | None:
        """What the log has, up to batch ``last``, exclusive."""
        end = self.log.wait(self.batch, wait_s if self._is_alone else 0.0)
        end = end if last is None else min(end, last)
        if end <= self.batch:
            # The feed is about to begin again, or could not decode what comes next.
            self._woken.wait(min(wait_s, POLL_S))
            return None
        self._on_serve()
        name, priority = self._consumer.name, self._consumer.priority
        slots, over = self.context.catch_up, self.context.over
        held.enter_context(slots.hold(self.source, name, priority, over))
        with self._current.doing(Work.READ):
            decoded = self._read(end)
        return held.enter_context(closing(decoded))

    def _read(self, end: int) -> DecodedRange:
        log, settings, first = self.log, self.settings, self.batch
        as_job = self.planner.has_spark and (
            self.isolate or not fits(log, first, end, settings.little)
        )
        batches, rows = fitting(log, first, end, settings.much if as_job else settings.little)
        if not batches:  # one alone is more than that
            batches, rows = 1, int(log.entries(first, first + 1)["rows"].sum())
        planned = PlannedRange(first, first + batches, rows)
        plan = self.planner.as_job(planned) if as_job else self.planner.in_driver(planned)
        return DecodedRange.decode(log.history(), planned.start, planned.end, plan)
