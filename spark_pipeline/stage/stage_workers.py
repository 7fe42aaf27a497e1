"""The workers of one source: begun, replaced when their consumers are configured otherwise, ended.

Invariants: a consumer is served by one worker at a time; its next one begins when the one before
has settled what it had begun. The others go on meanwhile. The stage's thread calls all methods.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from cdc.config import SinkConfig
from cdc.state.health import Condition
from spark_pipeline.delivery.deliver import close_sinks, end_run, stage_of
from spark_pipeline.eventtime.worker import EventTimeWorker
from spark_pipeline.eventtime.workers import EventTimeWorkers
from spark_pipeline.feed.plan import end_jobs
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.stage.worker import Worker
from spark_pipeline.workers.base import BaseWorker
from spark_pipeline.workers.context import WorkerContext, new_run

_JOIN_S: Final = 5.0  # for workers that end; one that hangs is fenced

StartThread = Callable[[str, Callable[[], None]], threading.Thread]


class StageWorkers:
    """``current`` is shared with those that only look."""

    def __init__(self, source: str, event_time: EventTimeWorkers, start: StartThread) -> None:
        self.current: dict[str, BaseWorker] = {}
        self._source = source
        self._event_time = event_time
        self._start_thread = start
        self._context: WorkerContext | None = None  # of those that are made from now on
        self._in_commit_order: list[SinkConfig] = []
        self._threads: dict[BaseWorker, threading.Thread] = {}
        self._ending: list[BaseWorker] = []

    def make(
        self,
        context: WorkerContext,
        attempts: Mapping[str, int],
        stopped: Mapping[str, Condition],
    ) -> None:
        """The workers of a stage that begins; ``start`` starts them."""
        self._context = context
        self._in_commit_order = context.settings.consumers
        for consumer in self._in_commit_order:
            name = consumer.name
            self.current[name] = Worker(
                consumer,
                context.for_worker(),
                attempts=attempts.get(name, 0),
                stopped=stopped.get(name),
            )

    def start(self, attempts: Mapping[str, int]) -> None:
        assert self._context is not None
        for worker in list(self.current.values()):
            self._start(worker)
        self._event_time.join(self._context, attempts)
        self.follow_event_time()

    def follow(self, settings: StageSettings) -> list[str]:
        """Serve the consumers of these settings. Returns those that have no worker any more."""
        assert self._context is not None
        before = set(self.current)
        self._context = self._context.with_settings(settings)
        wanted = {consumer.name: consumer for consumer in settings.consumers}
        stopped: dict[str, Condition | None] = {}
        for name, worker in list(self.current.items()):
            if isinstance(worker, Worker) and wanted.get(name) != worker.consumer:
                stopped[name] = worker.stopped
                self._end(name)
        for name, consumer in wanted.items():
            if not isinstance(self.current.get(name), Worker):
                context = self._context.for_worker(new_run())
                self._begin(Worker(consumer, context, stopped=stopped.get(name)))
        self._event_time.follow(settings)
        self.follow_event_time()
        return sorted(before - self.current.keys())

    def follow_event_time(self) -> None:
        """Take in workers whose sources have all begun; those of a source that ended are gone."""
        found = self._event_time.of(self._source)
        for name, worker in list(self.current.items()):
            if isinstance(worker, EventTimeWorker) and found.get(name) is not worker:
                self._end(name)
        for name, now in found.items():
            if self.current.get(name) is not now:
                if name in self.current:
                    self._end(name)
                if now.home == self._source:
                    self._begin(now)
                else:
                    self.current[name] = now

    @property
    def are_settled(self) -> bool:
        """Whether all that were replaced or removed have finished."""
        for worker in [each for each in self._ending if each.finished.is_set()]:
            self._ending.remove(worker)
            self._threads.pop(worker, None)
            if worker.name not in self.current:
                close_sinks(self._source, worker.name)
        return not self._ending

    def end(self, context: WorkerContext) -> None:
        """All of them end; one that hangs is fenced: nothing of it counts any more."""
        self._event_time.leave(self._source)
        every = {*self.current.values(), *self._ending, *self._threads}
        for worker in every:
            worker.end()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        context.over.set()
        runs = {each.inputs[self._source].context.run for each in every} | {context.run}
        for run in sorted(runs, key=stage_of):
            end_run(self._source, run)
        for worker, thread in self._threads.items():
            if thread.is_alive() and context.session is not None:
                end_jobs(context.session.sparkContext, worker.inputs[self._source].job_group)

    def _begin(self, worker: BaseWorker) -> None:
        for other in self._ending:
            if other.name == worker.name:
                worker.succeed(other)
        self.current[worker.name] = worker
        self._start(worker)

    def _start(self, worker: BaseWorker) -> None:
        self._threads[worker] = self._start_thread(worker.name, worker.run)

    def _end(self, name: str) -> None:
        worker = self.current.pop(name)
        worker.end()
        if worker in self._threads:
            self._ending.append(worker)
