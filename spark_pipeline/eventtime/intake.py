"""Reading a consumer's changes from the log of one of its databases, stretch by stretch.

What must always hold: a stretch begins where the one before it ended, and everything of it that is
the consumer's is in it or among its dead letters. A stretch is bounded in rows and bytes.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc.cursor import Cursor
from cdc.errors import WalbrookError
from cdc.log.open import open_log
from cdc.log.segment import high_of
from cdc.log.view import LogReader
from cdc.state.dead_letters import DeadLetter
from spark_pipeline.delivery.dead_letters import dead_letters
from spark_pipeline.delivery.deliver import Share, in_order
from spark_pipeline.feed.backlog import fitting
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.exchange import Exchange, PlannedRange
from spark_pipeline.feed.planner import Planner
from spark_pipeline.workers.settings import StageSettings


@dataclass(frozen=True)
class Stretch:
    """The consumer's changes up to ``read``, in cursor order."""

    rows: list[pa.RecordBatch]
    read: Cursor
    commit_us: int  # when the last of all changes in it was committed; 0 if there was none
    dead: list[DeadLetter]
    held: WalbrookError | None = None  # why nothing that follows can be read


class Intake:
    """One log; ``settings`` has the one consumer."""

    def __init__(
        self,
        settings: StageSettings,
        start: Cursor,
        *,
        run: str,
        pool: str = "shared",
        spark: SparkSession | None = None,
    ) -> None:
        self._settings = settings
        self._run = run
        self._view = open_log(settings.log_directory)
        scratch = settings.checkpoint_directory / f"event_time-{settings.consumers[0].name}"
        self._exchange = Exchange.create(scratch / "exchange")
        self.history = self._view.history()
        self._planner = Planner(
            settings, self.history, self._exchange.directory, pool=pool, spark=spark
        )
        self.read = start
        self.next_batch = self._view.seek(start)

    @property
    def at_end(self) -> bool:
        """Whether everything that the log has was read."""
        return self.next_batch >= self._view.next_batch()

    def wait(self, timeout_s: float) -> bool:
        """Until there is more to read; says whether there is."""
        return self._view.wait(self.next_batch, timeout_s) > self.next_batch

    def take(self, until: Cursor | None = None) -> Stretch | None:
        """The next stretch, up to ``until`` at most; None if there is nothing to read."""
        end = self._view.next_batch()
        if self.next_batch >= end or (until is not None and self.read >= until):
            return None
        first, last = self.next_batch, self.next_batch + self._batches(end)
        (entry,) = self._view.entries(last - 1, last)
        read = high_of(entry)
        cut = until is not None and read > until
        if until is not None and cut:
            read = until
        if read > self.read:
            stretch = self._read(first, last, read)
        else:  # nothing but the time has passed
            stretch = Stretch([], self.read, 0, [])
        self.read = max(self.read, stretch.read)
        self.next_batch = self._view.seek(self.read) if cut else last
        return stretch

    def close(self) -> None:
        self._view.close()
        self._planner.close()
        self._exchange.remove()

    def open_log(self) -> LogReader:
        return open_log(self._settings.log_directory, history=self.history)

    def _batches(self, end: int) -> int:
        """How many are read at once: at least one."""
        return max(1, fitting(self._view, self.next_batch, end, self._settings.little)[0])

    def _read(self, first: int, last: int, read: Cursor) -> Stretch:
        settings = self._settings
        decoded = DecodedRange.decode(
            self.history, first, last, self._planner.in_driver(PlannedRange(first, last, 0))
        )
        slices = [piece for piece in decoded.slices if piece.rows]
        lacking = Share(
            settings.consumers[0], settings.origin, self._run, self.read, read, slices,
            settings.wanted,
        )  # fmt: skip
        share = self._planner.judge(lacking)
        changes_of = decoded.plan.changes
        try:
            # Rows are copied by whoever keeps them: the verdicts go with this stretch.
            rows = [each for each in in_order(share, changes_of(share.slices)) if each.num_rows]
            dead: list[DeadLetter] = []
            if share.failed or any(piece.errors for piece in share.slices):
                with closing(self.open_log()) as log:
                    dead = list(dead_letters(share, share.end, log, changes_of))
            commit_us = max((piece.commit_us for piece in share.slices), default=0)
            return Stretch(rows, share.end, commit_us, dead, share.held)
        finally:
            if share.verdicts is not None:
                Path(share.verdicts).unlink(missing_ok=True)
