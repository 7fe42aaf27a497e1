"""The workers of consumers in event-time order: each exists while all of its sources are served.

Sources begin and end one by one. Invariant: a worker has the contexts of the stages that run now;
when a stage begins again, its consumers get new workers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from spark_pipeline.eventtime.worker import EventTimeWorker
from spark_pipeline.workers.context import WorkerContext


class EventTimeWorkers:
    """Shared by the stages of all sources; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[str, WorkerContext] = {}
        self._workers: dict[str, EventTimeWorker] = {}

    def join(self, context: WorkerContext, attempts: Mapping[str, int]) -> None:
        """The stage of a source has begun; ``attempts`` by consumer."""
        with self._lock:
            self._contexts[context.settings.source] = context
            for consumer in context.settings.in_event_time:
                if self._contexts.keys() >= set(consumer.sources):
                    self._workers[consumer.name] = EventTimeWorker(
                        consumer,
                        {source: self._contexts[source] for source in consumer.sources},
                        attempts=attempts.get(consumer.name, 0),
                    )

    def leave(self, source: str) -> None:
        """The stage of a source ends."""
        with self._lock:
            self._contexts.pop(source, None)
            self._workers = {
                n: each for n, each in self._workers.items() if source not in each.inputs
            }

    def of(self, source: str) -> dict[str, EventTimeWorker]:
        """The workers that have an input in a source, by consumer."""
        with self._lock:
            return {n: each for n, each in self._workers.items() if source in each.inputs}
