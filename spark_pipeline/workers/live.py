"""Live traces of a source's consumers: who is watched, how often, and the samples they get.

Invariants: a consumer that is not watched costs one comparison per range. A watched one is sampled
at most as often as was asked, and what cannot be stored is dropped: no delivery fails for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pyarrow as pa
import structlog

from cdc.connection import Connection
from cdc.connection_pool import ConnectionPool
from cdc.error_text import public_text
from cdc.state.traces import add_samples, running_live_traces
from spark_pipeline.delivery.deliver import Share
from spark_pipeline.delivery.sampling import samples_of

_logger = structlog.get_logger("walbrook.trace")

_AT_ONCE_MAX = 100


@dataclass
class _Watch:
    """One live trace: until when (monotonic), and how many samples it may have now."""

    per_second: int
    until: float
    left: float
    counted_at: float

    def take(self, now: float) -> int:
        """How many samples may be made now."""
        if now >= self.until:
            return 0
        more = (now - self.counted_at) * self.per_second
        self.left = min(float(self.per_second), self.left + more)
        self.counted_at = now
        return int(min(self.left, _AT_ONCE_MAX))


class LiveTraces:
    """Those of one source. ``look`` is for the stage's thread, ``sample`` for those of workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, dict[str, _Watch]] = {}  # by consumer, then by trace

    def look(self, state: Connection, source: str) -> None:
        """Find out who is watched; those known already keep their count."""
        now = time.monotonic()
        watched: dict[str, dict[str, _Watch]] = {}
        for each in running_live_traces(state, source):
            known = self._watched.get(each.consumer, {}).get(each.id)
            fresh = _Watch(each.per_second, now + each.left_s, float(each.per_second), now)
            watched.setdefault(each.consumer, {})[each.id] = known or fresh
        with self._lock:
            self._watched = watched

    def sample(
        self,
        share: Share,
        changes: Callable[[], Iterable[pa.RecordBatch]],
        connections: ConnectionPool,
    ) -> None:
        """Sample a share that was delivered, if its consumer is watched."""
        if not self._watched:
            return
        now = time.monotonic()
        with self._lock:
            watches = self._watched.get(share.consumer.name, {})
            asked = {trace: watch.take(now) for trace, watch in watches.items()}
        most = max(asked.values(), default=0)
        if not most:
            return
        try:
            samples = samples_of(share, changes(), most)
            if not samples:
                return
            with connections.connection() as state:
                for trace, count in asked.items():
                    if count:
                        add_samples(state, trace, samples[:count])
        except Exception as error:  # whatever it is: the delivery is done, and must be reported
            consumer, what = share.consumer.name, public_text(error)
            _logger.warning("trace.unsampled", consumer=consumer, error=what)
            return
        with self._lock:
            for trace, count in asked.items():
                watches[trace].left -= min(count, len(samples))
