"""The workers of consumers in event-time order: each exists while all of its sources are served.

Sources begin and end one by one. Invariant: a worker has the contexts of the stages that run now;
when a stage begins again, or a consumer is configured otherwise, it gets a new worker.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from spark_pipeline.eventtime.worker import EventTimeWorker
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.workers.context import WorkerContext, new_run


class EventTimeWorkers:
    """Shared by the stages of all sources; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[str, WorkerContext] = {}
        self._workers: dict[str, EventTimeWorker] = {}
        self._ended: dict[str, EventTimeWorker] = {}  # the last one of a consumer that was changed

    def join(self, context: WorkerContext, attempts: Mapping[str, int]) -> None:
        """The stage of a source has begun; ``attempts`` by consumer."""
        with self._lock:
            self._contexts[context.settings.source] = context
            self._begin(context.settings, attempts)

    def follow(self, settings: StageSettings) -> None:
        """The consumers of a source are configured like this from now on."""
        source = settings.source
        with self._lock:
            if source not in self._contexts:
                return
            self._contexts[source] = self._contexts[source].with_settings(settings)
            for name, worker in list(self._workers.items()):
                if source in worker.inputs and worker.consumer not in settings.in_event_time:
                    worker.end()
                    self._ended[name] = self._workers.pop(name)
            self._begin(settings, {})

    def _begin(self, settings: StageSettings, attempts: Mapping[str, int]) -> None:
        """Make the workers that are missing and of which all sources are served."""
        for consumer in settings.in_event_time:
            contexts = {name: self._contexts.get(name) for name in consumer.sources}
            ready = {name: each for name, each in contexts.items() if each is not None}
            if consumer.name in self._workers or len(ready) < len(contexts):
                continue
            if not all(consumer in each.settings.in_event_time for each in ready.values()):
                continue  # a source has not heard of the change yet
            before = self._ended.pop(consumer.name, None)
            run = None if before is None else new_run()
            self._workers[consumer.name] = worker = EventTimeWorker(
                consumer,
                {name: each.for_worker(run) for name, each in ready.items()},
                attempts=attempts.get(consumer.name, 0),
            )
            if before is not None:
                worker.succeed(before)

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
