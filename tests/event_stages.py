"""Whole stages over the logs of an ``EventPipeline``, with feeds and threads, and without Spark."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import yaml

from cdc.config import Config, SinkConfig, loads
from cdc.stop import StopReason, StopSignal
from spark_pipeline.delivery import deliver
from spark_pipeline.eventtime.workers import EventTimeWorkers
from spark_pipeline.feed.body import FeedBody
from spark_pipeline.feed.planner import Planner
from spark_pipeline.stage.stage import SourceStage
from tests.event_pipeline import EventPipeline
from tests.fix_postgres import Database
from tests.walbrook_service import _url


class LogStage(SourceStage):
    """Its feed is decoded in this process: the body follows the log without a query."""

    def _run_feed(self) -> None:
        setattr(self._runner, "_run_query", self._follow_log)  # noqa: B010 (mypy refuses a method)
        super()._run_feed()

    def _follow_log(self) -> bool:
        runner = self._runner
        assert runner is not None
        runner.take_settings()
        exchange = runner._exchange
        planner = Planner(runner._settings, self.feed.history, exchange.directory)
        body = FeedBody(
            self.feed,
            planner,
            exchange,
            runner.progress,
            runner.query_over,
            little=self._settings.little,
            on_read=self._note_read,
        )
        try:
            while not runner.query_over.is_set():
                body.take(None, 0)
                if body.failure is not None:
                    raise body.failure
        finally:
            body.close()
            planner.close()
        return True


def config_of(pipeline: EventPipeline, database: Database, away: str = "") -> Config:
    """The pipeline's sources; the one that is away has no database."""
    urls = {name: _url(database.dsn) for name in pipeline.sources}
    if away:
        urls[away] = "postgres://nobody@127.0.0.1:1/nothing"
    data = {
        "databases": [
            {"name": name, "url": url, "slot": {"name": name}, "publication": {"name": "pub"}}
            for name, url in urls.items()
        ],
        "sinks": [],
        "state": {"url": _url(database.dsn)},
    }
    return loads(yaml.safe_dump(data), base=pipeline.directory)


class Stages:
    """One stage per source of a pipeline, each in a thread; ``plain`` are consumers beside it."""

    def __init__(
        self,
        pipeline: EventPipeline,
        database: Database,
        stop: StopSignal,
        *,
        away: str = "",
        plain: Mapping[str, list[SinkConfig]] | None = None,
        drain_timeout_s: float = 10.0,
    ) -> None:
        config = config_of(pipeline, database, away)
        pipeline.stop_serving()
        for known in [*deliver._open_sinks]:  # of another pipeline: a process has one run
            deliver._open_sinks.pop(known)[2].close()
        self.failures: list[Exception] = []
        self.by_source: dict[str, SourceStage] = {}
        self._settings = {
            name: replace(
                settings,
                consumers=(plain or {}).get(name, []),
                database=config.database(name),
                state_dsn=settings.state_dsn or database.dsn,
            )
            for name, settings in pipeline.settings.items()
        }
        self._workers = EventTimeWorkers()
        self._stop, self._drain_timeout_s = stop, drain_timeout_s
        self._followers = ExitStack()
        self._threads: dict[str, threading.Thread] = {}
        for name in self._settings:
            self._begin(name)

    def begin_again(self, source: str) -> None:
        """Let the stage of one source end, and another one begin, as after a failure."""
        self.by_source[source]._stop.request(StopReason.FAILURE)
        self._join(source)
        self._begin(source)

    def join(self) -> None:
        for source in self._threads:
            self._join(source)
        self._followers.close()

    def _begin(self, source: str) -> None:
        own = self._followers.enter_context(self._stop.follower())
        stage = LogStage(None, self._settings[source], own, self._workers)
        thread = threading.Thread(target=self._run, args=(stage,), daemon=True)
        self.by_source[source], self._threads[source] = stage, thread
        thread.start()

    def _join(self, source: str) -> None:
        self._threads[source].join(30)
        assert not self._threads[source].is_alive()

    def _run(self, stage: SourceStage) -> None:
        try:
            stage.run(self._drain_timeout_s)
        except Exception as error:
            self.failures.append(error)
            self._stop.request()


@contextmanager
def served(
    pipeline: EventPipeline,
    database: Database,
    *,
    drain_timeout_s: float = 10.0,
    away: str = "",
    plain: Mapping[str, list[SinkConfig]] | None = None,
) -> Iterator[tuple[Stages, StopSignal]]:
    """The pipeline's consumer as the service serves it, until a stop and the drain behind it."""
    stop = StopSignal()
    stages = Stages(
        pipeline, database, stop, away=away, plain=plain, drain_timeout_s=drain_timeout_s
    )
    try:
        yield stages, stop
    finally:
        stop.request(StopReason.OPERATOR)
        stages.join()
        assert stages.failures == []
