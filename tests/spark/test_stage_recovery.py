"""The stage of a source on real Spark: how it comes back from failures of its surroundings."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from psycopg.conninfo import make_conninfo
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.connection import Connection
from cdc.state.positions import consumer_cursors
from cdc.state.workers import WorkerState
from cdc.stop import StopSignal
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.stage import stage_workers
from spark_pipeline.stage.feed_runner import FeedRunner
from spark_pipeline.stage.stage import SourceStage
from spark_pipeline.workers import base as base_module
from tests import pgoutput
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.log_pipeline import SOURCE, LogPipeline, arrived
from tests.proxy import Proxy
from tests.waiting import until
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

# Sinks stay open for the life of the process, by name: each test has one of its own.
ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])


class RunningStage:
    """The stage of the source of a ``LogPipeline``, in a thread."""

    def __init__(
        self,
        spark: SparkSession | LateSession,
        pipeline: LogPipeline,
        drain_timeout_s: float = 0.0,
        **settings: Any,
    ) -> None:
        late = spark if isinstance(spark, LateSession) else LateSession.of(spark)
        self._stop = StopSignal()
        self._drain_timeout_s = drain_timeout_s
        self.stage = SourceStage(late, replace(pipeline.settings, **settings), self._stop)
        self.failures: list[Exception] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.stage.run(self._drain_timeout_s)
        except Exception as error:
            self.failures.append(error)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.request()
            self._thread.join(60)
            assert not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


def write(pipeline: LogPipeline, *numbers: int) -> None:
    """One transaction of these rows."""
    rows = [pgoutput.insert(1, [str(number), "n"]) for number in numbers]
    pipeline.write(ITEM, *transaction(0x100 * numbers[0], *rows))


def hook(endpoint: Endpoint, **given: Any) -> dict[str, Any]:
    destination = {
        "type": "webhook", "url": endpoint.url, "max_retries": 0, "timeout_ms": 60_000,
    }  # fmt: skip
    return {"destination": destination, "batch_size": 1, **given}


def sent(endpoint: Endpoint) -> list[int]:
    return [m["record"]["id"] for r in endpoint.requests for m in r.messages]  # type: ignore[index]


def ids(directory: Path) -> list[int]:
    return [message["record"]["id"] for message in arrived(directory)]


def test_delivery_goes_on_at_once_when_the_state_database_is_back(
    spark: SparkSession,
    state: Connection,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_BACKOFF_FIRST_S", "_BACKOFF_MAX_S"):
        monkeypatch.setattr(f"spark_pipeline.stage.feed_runner.{name}", 240.0)  # it would time out
    pipeline = LogPipeline(state, tmp_path, first={})
    write(pipeline, 1)
    logged: list[MutableMapping[str, Any]]
    with Proxy(database.dsn) as proxy, structlog.testing.capture_logs() as logged:
        running = RunningStage(spark, pipeline, state_dsn=proxy.dsn(database.dsn))
        with running.running():
            settled = "SELECT delivered + absorbed = {} FROM walbrook.consumers"
            until("the first", lambda: database.execute(settled.format(1)) == [(True,)], 60)
            proxy.retarget(make_conninfo(database.dsn, port="1"))  # nobody listens there
            write(pipeline, 2)
            away = "settler.state_unreachable"
            until("a failure", lambda: any(one["event"] == away for one in logged), 60)
            proxy.retarget(database.dsn)
            until("the second", lambda: database.execute(settled.format(2)) == [(True,)], 60)
    assert ids(tmp_path / "first") == [1, 2]
    pipeline.close()


def test_changes_are_delivered_while_spark_starts_and_by_the_feed_once_it_is_up(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, early={})
    late = LateSession()
    running = RunningStage(late, pipeline, state_dsn=database.dsn)
    with running.running():
        for number in (1, 2):
            write(pipeline, number)
            until("it, without Spark", lambda: number in ids(tmp_path / "early"), 60)  # noqa: B023
        assert running.stage.feed.position == 0, "there is no query yet"
        late.open(lambda: spark)
        until("the feed to follow", lambda: running.stage.feed.position == 2, 60)
        write(pipeline, 3)
        until("it, by the feed", lambda: running.stage.feed.position == 3, 60)
        until("the last", lambda: ids(tmp_path / "early") == [1, 2, 3], 60)
    pipeline.close()


def test_a_stage_that_ends_before_spark_is_up_does_not_wait_for_it(
    state: Connection, database: Database, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, brief={})
    write(pipeline, 1)
    running = RunningStage(LateSession(), pipeline, state_dsn=database.dsn)
    with running.running():
        until("the change", lambda: ids(tmp_path / "brief") == [1], 60)
    assert running.failures == []
    pipeline.close()


def test_a_query_that_spark_still_holds_does_not_keep_the_feed_from_starting(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, second={})
    write(pipeline, 1)
    left_over = (
        spark.readStream.format("rate")
        .load()
        .writeStream.queryName(f"feed-{SOURCE}")
        .format("noop")
        .trigger(processingTime="1 hour")
        .option("checkpointLocation", str(tmp_path / "left_over"))
        .start()
    )
    try:
        running = RunningStage(spark, pipeline, state_dsn=database.dsn)
        with running.running():
            until("the change", lambda: ids(tmp_path / "second") == [1], 60)
    finally:
        left_over.stop()
    pipeline.close()


def test_a_stage_that_spark_cannot_start_is_a_health_event_and_ends_the_driver(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, third={})
    write(pipeline, 1)
    file = tmp_path / "a file where Spark wants a directory"
    file.touch()
    running = RunningStage(
        spark, pipeline, state_dsn=database.dsn, checkpoint_directory=file / "checkpoint"
    )
    told = "SELECT severity FROM walbrook.health WHERE kind = 'feed_stopped'"
    with running.running():
        until("the health event", lambda: database.execute(told) == [("error",)], 60)
        until("the end of the stage", lambda: running.ended, 60)
    (failure,) = running.failures
    assert isinstance(failure, PySparkException | Py4JJavaError)
    pipeline.close()


def damage_first_batch(pipeline: LogPipeline) -> None:
    (segment,) = (pipeline.directory / "log").glob("*.seg")
    with segment.open("r+b") as file:
        file.seek(int(pipeline.log.active.bytes) // 4)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_damage_in_the_log_stops_the_consumers_before_it_alone(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, ahead={}, behind={})
    write(pipeline, 1)
    write(pipeline, 2)
    pipeline.take()
    state.execute(
        "UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0 WHERE name = 'behind'"
    )
    damage_first_batch(pipeline)
    running = RunningStage(spark, pipeline, state_dsn=database.dsn)
    with running.running():
        write(pipeline, 3)
        until("the consumer beyond it", lambda: ids(tmp_path / "ahead") == [1, 2, 3], 60)
        told = "SELECT breaker = 'open' FROM walbrook.consumers WHERE name = '{}'"
        until("the other to wait", lambda: database.execute(told.format("behind")) == [(True,)], 60)
    assert ids(tmp_path / "behind") == [1, 2]
    pipeline.close()


def test_a_stop_ends_a_stage_that_cannot_drain(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, only={})
    write(pipeline, 1)
    damage_first_batch(pipeline)
    logged: list[MutableMapping[str, Any]]
    running = RunningStage(spark, pipeline, drain_timeout_s=600.0, state_dsn=database.dsn)
    with structlog.testing.capture_logs() as logged, running.running():
        until("a failure", lambda: any(one["event"] == "worker.failed" for one in logged), 60)
    assert running.ended
    pipeline.close()


def test_a_worker_that_hangs_delivers_and_settles_nothing_once_its_stage_was_started_again(
    spark: SparkSession,
    state: Connection,
    database: Database,
    tmp_path: Path,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_workers, "_JOIN_S", 0.1)
    pipeline = LogPipeline(state, tmp_path, fourth=hook(endpoint))
    go_on = threading.Event()
    endpoint.script.append(Scripted(after=go_on))
    with ExitStack() as at_the_end:
        at_the_end.callback(go_on.set)
        first, second = (RunningStage(spark, pipeline, state_dsn=database.dsn) for _ in range(2))
        with first.running():
            write(pipeline, 1, 2, 3)
            until("the request that hangs", lambda: sent(endpoint) == [1], 60)
            (old,) = [each for each in threading.enumerate() if each.name == f"fourth-{SOURCE}"]
        assert old.is_alive()
        with second.running():
            write(pipeline, 4)
            until("all by the new one", lambda: sent(endpoint) == [1, 1, 2, 3, 4], 60)
            settled = "SELECT delivered FROM walbrook.consumers"
            until("them to be settled", lambda: database.execute(settled) == [(4,)])
            at = consumer_cursors(state, SOURCE)
            go_on.set()
            until("the old one to end", lambda: not old.is_alive())
    assert sent(endpoint) == [1, 1, 2, 3, 4], "the old one has delivered"
    assert database.execute(settled) == [(4,)], "the old one has settled"
    assert consumer_cursors(state, SOURCE) == at
    pipeline.close()


def test_a_read_of_the_log_that_hangs_is_cancelled_and_names_its_consumer(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, ahead={}, fifth={})
    for number in range(1, 6):
        write(pipeline, number)
    pipeline.take()
    little = {"driver_rows": 1, "micro_batch_rows": 2}
    running = RunningStage(spark, pipeline, state_dsn=database.dsn, deadline_s=1.5, **little)
    told = "SELECT what FROM walbrook.health WHERE kind = 'worker_slow' AND consumer = 'fifth'"
    logged: list[MutableMapping[str, Any]]
    failed = "worker.failed"
    with ExitStack() as open_now:
        logged = open_now.enter_context(structlog.testing.capture_logs())
        open_now.enter_context(running.running())
        # A query whose start hangs is another matter: its JVM is ended after a minute.
        write(pipeline, 6)
        until(
            "the feed to follow", lambda: running.stage.feed.position == pipeline.log.next_batch, 60
        )
        until("all to be there", lambda: ids(tmp_path / "fifth") == [*range(1, 7)], 60)
        spark.range(4).rdd.map(lambda n: n).count()  # now there are Python workers
        open_now.enter_context(stopped_workers())
        state.execute(
            "UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0 WHERE name = 'fifth'"
        )
        until("the health event", lambda: database.execute(told), 60)
        ((what,),) = database.execute(told)
        assert what.startswith("a read of the change log for fifth has been under way")
        until("its end", lambda: [e for e in logged if e["event"] == failed], 60)
    assert "cancelled" in str(next(e["error"] for e in logged if e["event"] == failed))
    pipeline.close()


@contextmanager
def stopped_workers() -> Iterator[None]:
    """Spark's Python workers hang until the end of the block; tasks that get them hang, too."""
    daemons = [each for each in psutil.Process().children(recursive=True) if _is_daemon(each)]
    workers = [worker.pid for daemon in daemons for worker in daemon.children()]
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):  # Spark has ended it
                os.kill(pid, signal.SIGCONT)


def _is_daemon(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # or one that has ended and is not waited for
        is_one = "daemon pyspark" in " ".join(process.cmdline())
        return is_one and "daemon pyspark" not in " ".join(process.parent().cmdline())
    return False


def _state_of(database: Database, consumer: str) -> object:
    ((found,),) = database.execute(
        f"SELECT state FROM walbrook.consumers WHERE name = '{consumer}'"
    )
    return found


def test_a_thread_of_the_feed_that_dies_ends_the_stage(
    spark: SparkSession,
    state: Connection,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_runner: FeedRunner, _error: Exception) -> bool:
        raise LookupError("nobody foresaw this")

    monkeypatch.setattr(FeedRunner, "_is_fatal", broken)
    pipeline = LogPipeline(state, tmp_path, seventh={})
    file = tmp_path / "a file where Spark wants a directory"
    file.touch()
    running = RunningStage(
        spark, pipeline, state_dsn=database.dsn, checkpoint_directory=file / "checkpoint"
    )
    with running.running():
        until("the end of the stage", lambda: running.ended, 60)
    (failure,) = running.failures
    assert isinstance(failure, LookupError)
    pipeline.close()


def test_a_settlement_before_a_failure_does_not_cut_the_pause_short(
    spark: SparkSession,
    state: Connection,
    database: Database,
    tmp_path: Path,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base_module, "_BACKOFF_FIRST_S", 300.0)
    monkeypatch.setattr(base_module, "_BACKOFF_MAX_S", 300.0)
    pipeline = LogPipeline(state, tmp_path, eighth=hook(endpoint))
    endpoint.script += [Scripted(), Scripted(503), *[Scripted()] * 10]
    looks = 0
    look = SourceStage._look

    def counted(stage: SourceStage, connection: Connection) -> None:
        nonlocal looks
        look(stage, connection)
        looks += 1

    monkeypatch.setattr(SourceStage, "_look", counted)
    running = RunningStage(spark, pipeline, state_dsn=database.dsn)
    with running.running():
        until("it to be live", lambda: _state_of(database, "eighth") == "live", 60)
        write(pipeline, 1, 2)
        until("its failure", lambda: sent(endpoint) == [1, 2], 60)
        until("it to wait", lambda: _state_of(database, "eighth") == "waiting", 60)
        seen = looks + 2
        until("two looks at its row", lambda: looks >= seen)
        assert sent(endpoint) == [1, 2], "it was tried again at once"
        assert running.stage.workers["eighth"].current.state is WorkerState.WAITING
    pipeline.close()
