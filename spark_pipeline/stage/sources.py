"""The sources that the driver serves, each in threads of its own.

A source is served from the moment the supervisor gives its term, which may be long after the start.
A configuration that is applied meanwhile concerns the sources and the workers that it changes.
One that needs an operator fails alone: its stage is started again with backoff. What was not
foreseen, such as a JVM that is gone, ends the driver, and a new process mends it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import psycopg
import structlog

from cdc.backoff import Backoff
from cdc.config import Config
from cdc.config.diff import reads_otherwise
from cdc.connection import connect
from cdc.errors import OperatorError
from cdc.state.configurations import report_taken
from cdc.stop import StopReason, StopSignal
from spark_pipeline.capacity.slots import Slots
from spark_pipeline.eventtime.workers import EventTimeWorkers
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.stage.stage import SourceStage

_logger = structlog.get_logger("walbrook.stage")

_TICK_S = 0.1
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 1.0, 30.0
_REPORT_S = 5
REVISION = "revision "
"""How a line begins by which the supervisor says that there is another configuration."""


@dataclass
class _Served:
    """A source in a thread of its own."""

    settings: StageSettings
    thread: threading.Thread | None = None
    stage: SourceStage | None = None
    waiting: StopSignal | None = None  # what its thread waits for
    ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """Serve it no more."""
        self.ended = True
        if self.waiting is not None:
            self.waiting.request(StopReason.OPERATOR)

    def begin(self, make: Callable[[StageSettings], SourceStage]) -> SourceStage:
        """Begin a stage with the settings of now; other settings come before it, or to it."""
        with self._lock:
            self.stage = make(self.settings)
            return self.stage

    def take(self, settings: StageSettings) -> None:
        with self._lock:
            self.settings = settings
            if self.stage is not None:
                self.stage.take(settings)

    @property
    def has_taken(self) -> bool:
        """Whether its stage serves by the settings; one that begins later does from its start."""
        stage = self.stage
        return stage is None or stage.has_taken(self.settings)

    @property
    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class Sources:
    """Begins to serve sources, has them follow the configuration, and ends them together."""

    def __init__(
        self, spark: LateSession, config: Config, stop: StopSignal, revision: int | None = None
    ) -> None:
        """``revision`` is what the configuration is in SQL; None: it is not there."""
        self._spark = spark
        self._config = config
        self._stop = stop
        self._slots = Slots(config.spark.delivery_slots)
        self._event_time = EventTimeWorkers()
        self._served: dict[str, _Served] = {}
        self._ending: list[_Served] = []
        self._failures: list[Exception] = []
        self._revision = revision  # that is to be reported as taken
        self._report_after = 0.0  # monotonic

    def begin(self, source: str, term: int) -> None:
        """Serve a source."""
        if source in self._served:
            return
        database = self._config.database(source)
        settings = StageSettings.of(self._config, database, term, self._slots)
        served = self._served[source] = _Served(settings)
        served.thread = threading.Thread(
            target=self._serve, args=(source, served), name=f"stage-{source}"
        )
        served.thread.start()
        _logger.info("stage.started", sources=[*self._served])

    def take(self, config: Config, revision: int) -> None:
        """Serve by another configuration: only what differs ends or begins.

        A source whose database is configured otherwise ends; the supervisor begins it again.
        """
        before, self._config = self._config, config
        known = {database.name: database for database in config.databases}
        for source, served in list(self._served.items()):
            if source not in known or reads_otherwise(before.database(source), known[source]):
                served.end()
                self._ending.append(self._served.pop(source))
                continue
            old = served.settings
            settings = StageSettings.of(config, known[source], old.term, self._slots)
            served.take(replace(settings, wanted_before=old.wanted))
        self._revision = revision
        _logger.info("stage.reconfigured", revision=revision, sources=[*self._served])

    def run(self, lines: queue.SimpleQueue[str], load: Callable[[], Config]) -> list[Exception]:
        """Serve until a stop.

        ``lines`` has what the supervisor says meanwhile: sources that are ready, with their terms,
        and revisions of the configuration, which ``load`` reads.
        """
        while not self._stop.wait(_TICK_S):
            if self._spark.failure is not None:
                self._failures.append(self._spark.failure)
                self._stop.request()
            while not lines.empty():
                self._hear(lines.get(), load)
            self._report_taken()
        for served in [*self._served.values(), *self._ending]:
            if served.thread is not None:
                served.thread.join()
        return self._failures

    def _hear(self, line: str, load: Callable[[], Config]) -> None:
        if line.startswith(REVISION):
            self.take(load(), int(line.removeprefix(REVISION)))
            return
        source, _, term = line.rpartition("=")
        self.begin(source, int(term))

    def _report_taken(self) -> None:
        """Say in SQL that every worker serves by the latest revision, once that is so."""
        self._ending = [each for each in self._ending if each.is_alive]
        if self._revision is None or self._ending or time.monotonic() < self._report_after:
            return
        if not all(each.has_taken for each in self._served.values()):
            return
        try:
            with connect(self._config.state_dsn(), name="driver", statement_s=_REPORT_S) as state:
                report_taken(state, self._revision)
            self._revision = None
        except psycopg.Error as error:
            self._report_after = time.monotonic() + _REPORT_S
            _logger.debug("stage.not_reported", error=error)

    def _serve(self, source: str, served: _Served) -> None:
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        while True:
            try:
                with self._following(served) as own:
                    make = partial(SourceStage, self._spark, stop=own, event_time=self._event_time)
                    served.begin(make).run(self._drain_s)
                    return
            except OperatorError as error:
                pause_s = round(backoff.next_s(), 1)
                _logger.error("stage.failed", source=source, error=error, again_in_s=pause_s)
            except Exception as error:
                if served.ended:  # it is not needed any more
                    _logger.exception("stage.ended_badly", source=source)
                    return
                self._failures.append(error)
                self._stop.request()
                return
            finally:
                served.stage = None
            with self._following(served) as own:
                if own.wait(pause_s):
                    return

    @contextmanager
    def _following(self, served: _Served) -> Iterator[StopSignal]:
        """A signal for the next wait of a source: the stop of the whole, or its own end."""
        with self._stop.follower() as own:
            served.waiting = own
            if served.ended:
                own.request(StopReason.OPERATOR)
            yield own

    @property
    def _drain_s(self) -> float:
        return self._config.service.drain_timeout_s


def needs_spark_first(config: Config) -> bool:
    """Whether a consumer needs Spark for every change: others are served while Spark starts."""
    active = [sink for sink in config.sinks if sink.status == "active"]
    return any(sink.expressions or sink.window is not None for sink in active)
