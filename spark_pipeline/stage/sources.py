"""The sources that the driver serves, each in threads of its own.

A source is served from the moment the supervisor gives its term, which may be long after the start.
One that needs an operator fails alone: its stage is started again with backoff. What was not
foreseen, such as a JVM that is gone, ends the driver, and a new process mends it.
"""

from __future__ import annotations

import queue
import threading

import structlog

from cdc.backoff import Backoff
from cdc.config import Config
from cdc.errors import OperatorError
from cdc.stop import StopSignal
from spark_pipeline.capacity.slots import Slots
from spark_pipeline.eventtime.workers import EventTimeWorkers
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.stage.stage import SourceStage

_logger = structlog.get_logger("walbrook.stage")

_TICK_S = 0.1
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 1.0, 30.0


class Sources:
    """Begins to serve sources, and ends them all together."""

    def __init__(self, spark: LateSession, config: Config, stop: StopSignal) -> None:
        self._spark = spark
        self._config = config
        self._stop = stop
        self._slots = Slots(config.spark.delivery_slots)
        self._event_time = EventTimeWorkers()
        self._settings: dict[str, StageSettings] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._failures: list[Exception] = []

    def begin(self, source: str, term: int) -> None:
        """Serve a source."""
        if source in self._settings:
            return
        database = self._config.database(source)
        self._settings[source] = StageSettings.of(self._config, database, term, self._slots)
        thread = threading.Thread(target=self._serve, args=(source,), name=f"stage-{source}")
        self._threads[source] = thread
        thread.start()
        _logger.info("stage.started", sources=[*self._settings])

    def run(self, lines: queue.SimpleQueue[str]) -> list[Exception]:
        """Serve until a stop; ``lines`` has the sources that become ready meanwhile, with terms."""
        while not self._stop.wait(_TICK_S):
            if self._spark.failure is not None:
                self._failures.append(self._spark.failure)
                self._stop.request()
            while not lines.empty():
                source, _, term = lines.get().rpartition("=")
                self.begin(source, int(term))
        for thread in self._threads.values():
            thread.join()
        return self._failures

    def _serve(self, source: str) -> None:
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        while True:
            with self._stop.follower() as own:
                stage = SourceStage(self._spark, self._settings[source], own, self._event_time)
                try:
                    stage.run(self._drain_s)
                    return
                except OperatorError as error:
                    pause_s = round(backoff.next_s(), 1)
                    _logger.error("stage.failed", source=source, error=error, again_in_s=pause_s)
                except Exception as error:
                    self._failures.append(error)
                    self._stop.request()
                    return
            if self._stop.wait(pause_s):
                return

    @property
    def _drain_s(self) -> float:
        return self._config.service.drain_timeout_s


def needs_spark_first(config: Config) -> bool:
    """Whether a consumer needs Spark for every change: others are served while Spark starts."""
    active = [sink for sink in config.sinks if sink.status == "active"]
    return any(sink.expressions or sink.window is not None for sink in active)
