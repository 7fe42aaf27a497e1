"""When enough has come for a destination that writes files: a delivery of little makes small ones.

What waits lies in the log, and the consumer's cursor before it, so nothing is held in memory and
nothing counts as delivered before it is.
"""

from __future__ import annotations

from typing import Self

from cdc.config import SinkConfig
from cdc.config.lakehouse import GatheredFiles
from cdc.log.view import LogReader
from spark_pipeline.capacity.backlog import Bounds, fits


class Gathering:
    """Lets a consumer wait until the log has as much for it as it asks for, or for a bounded time.

    Invariant: once something is due, all that the log had then is due until it was taken.
    """

    def __init__(self, min_rows: int, max_bytes: int, max_delay_s: float) -> None:
        self._little = Bounds(min_rows - 1, max_bytes)
        self._max_delay_s = max_delay_s
        self._since: float | None = None  # when the log first had something that waits
        self._due_to = 0  # the batch up to which all is due
        self._drains = False

    @classmethod
    def of(cls, consumer: SinkConfig, max_bytes: int) -> Self | None:
        """As the configuration says; None for a consumer that takes what comes."""
        destination = consumer.destination
        if not isinstance(destination, GatheredFiles) or not destination.max_delay_ms:
            return None
        return cls(destination.min_rows, max_bytes, destination.max_delay_ms / 1000)

    def begin(self) -> None:
        """The consumer's cursor is somewhere else."""
        self._since, self._due_to = None, 0

    def drain(self) -> None:
        """From now on everything is due."""
        self._drains = True

    def wait_s(self, log: LogReader, batch: int, now: float) -> float:
        """How long the consumer may wait before it takes ``batch``; 0.0 if it is due."""
        end = log.next_batch()
        if batch < self._due_to:
            return 0.0
        if end <= batch:
            self._since = None
            return self._max_delay_s
        if self._since is None:
            self._since = now
        left_s = self._since + self._max_delay_s - now
        if left_s > 0 and not self._drains and fits(log, batch, end, self._little):
            return left_s
        self._since, self._due_to = None, end
        return 0.0
