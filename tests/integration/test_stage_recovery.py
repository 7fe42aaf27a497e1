"""The stage of a source on real Spark: how it comes back from failures of its surroundings."""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from psycopg.conninfo import make_conninfo
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.connection import Connection
from cdc.replication.stop import StopSignal
from spark_pipeline.session.late import LateSession
from spark_pipeline.workers.stage import SourceStage
from tests import pgoutput
from tests.fix_postgres import Database
from tests.lane_on_log import SOURCE, LogLane, arrived
from tests.proxy import Proxy
from tests.unit.replication.test_seal import transaction
from tests.waiting import until

# Sinks stay open for the life of the process, by name: each test has one of its own.
ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


class RunningStage:
    """The stage of the source of a ``LogLane``, in a thread."""

    def __init__(
        self,
        spark: SparkSession | LateSession,
        lane: LogLane,
        drain_timeout_s: float = 0.0,
        **settings: Any,
    ) -> None:
        late = spark if isinstance(spark, LateSession) else LateSession.of(spark)
        self._stop = StopSignal()
        self._drain_timeout_s = drain_timeout_s
        self.stage = SourceStage(late, replace(lane.settings, **settings), self._stop)
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


def write(lane: LogLane, number: int) -> None:
    lane.write(ITEM, *transaction(0x100 * number, pgoutput.insert(1, [str(number), "n"])))


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
        monkeypatch.setattr(f"spark_pipeline.workers.stage.{name}", 240.0)  # it would time out
    lane = LogLane(state, tmp_path, first={})
    write(lane, 1)
    logged: list[MutableMapping[str, Any]]
    with Proxy(database.dsn) as proxy, structlog.testing.capture_logs() as logged:
        running = RunningStage(spark, lane, state_dsn=proxy.dsn(database.dsn))
        with running.running():
            settled = "SELECT delivered + absorbed = {} FROM walbrook.consumers"
            until("the first", lambda: database.execute(settled.format(1)) == [(True,)], 60)
            proxy.retarget(make_conninfo(database.dsn, port="1"))  # nobody listens there
            write(lane, 2)
            away = "settler.state_unreachable"
            until("a failure", lambda: any(one["event"] == away for one in logged), 60)
            proxy.retarget(database.dsn)
            until("the second", lambda: database.execute(settled.format(2)) == [(True,)], 60)
    assert ids(tmp_path / "first") == [1, 2]
    lane.close()


def test_changes_are_delivered_while_spark_starts_and_by_the_feed_once_it_is_up(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, early={})
    late = LateSession()
    running = RunningStage(late, lane, state_dsn=database.dsn)
    with running.running():
        for number in (1, 2):
            write(lane, number)
            until("it, without Spark", lambda: number in ids(tmp_path / "early"), 60)  # noqa: B023
        assert running.stage.feed.position == 0, "there is no query yet"
        late.open(lambda: spark)
        until("the feed to follow", lambda: running.stage.feed.position == 2, 60)
        write(lane, 3)
        until("it, by the feed", lambda: running.stage.feed.position == 3, 60)
        until("the last", lambda: ids(tmp_path / "early") == [1, 2, 3], 60)
    lane.close()


def test_a_stage_that_ends_before_spark_is_up_does_not_wait_for_it(
    state: Connection, database: Database, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, brief={})
    write(lane, 1)
    running = RunningStage(LateSession(), lane, state_dsn=database.dsn)
    with running.running():
        until("the change", lambda: ids(tmp_path / "brief") == [1], 60)
    assert running.failures == []
    lane.close()


def test_a_query_that_spark_still_holds_does_not_keep_the_feed_from_starting(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, second={})
    write(lane, 1)
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
        running = RunningStage(spark, lane, state_dsn=database.dsn)
        with running.running():
            until("the change", lambda: ids(tmp_path / "second") == [1], 60)
    finally:
        left_over.stop()
    lane.close()


def test_a_stage_that_spark_cannot_start_is_a_health_event_and_ends_the_driver(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, third={})
    write(lane, 1)
    file = tmp_path / "a file where Spark wants a directory"
    file.touch()
    running = RunningStage(
        spark, lane, state_dsn=database.dsn, checkpoint_directory=file / "checkpoint"
    )
    told = "SELECT severity FROM walbrook.health WHERE kind = 'feed_stopped'"
    with running.running():
        until("the health event", lambda: database.execute(told) == [("error",)], 60)
        until("the end of the stage", lambda: running.ended, 60)
    (failure,) = running.failures
    assert isinstance(failure, PySparkException | Py4JJavaError)
    lane.close()


def damage_first_batch(lane: LogLane) -> None:
    (segment,) = (lane.directory / "log").glob("*.seg")
    with segment.open("r+b") as file:
        file.seek(int(lane.log.active.bytes) // 4)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_damage_in_the_log_stops_the_consumers_before_it_alone(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, ahead={}, behind={})
    write(lane, 1)
    write(lane, 2)
    lane.take()
    state.execute(
        "UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0 WHERE name = 'behind'"
    )
    damage_first_batch(lane)
    running = RunningStage(spark, lane, state_dsn=database.dsn)
    with running.running():
        write(lane, 3)
        until("the consumer beyond it", lambda: ids(tmp_path / "ahead") == [1, 2, 3], 60)
        told = "SELECT breaker = 'open' FROM walbrook.consumers WHERE name = '{}'"
        until("the other to wait", lambda: database.execute(told.format("behind")) == [(True,)], 60)
    assert ids(tmp_path / "behind") == [1, 2]
    lane.close()


def test_a_stop_ends_a_stage_that_cannot_drain(
    spark: SparkSession, state: Connection, database: Database, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, only={})
    write(lane, 1)
    damage_first_batch(lane)
    logged: list[MutableMapping[str, Any]]
    running = RunningStage(spark, lane, drain_timeout_s=600.0, state_dsn=database.dsn)
    with structlog.testing.capture_logs() as logged, running.running():
        until("a failure", lambda: any(one["event"] == "worker.failed" for one in logged), 60)
    assert running.ended
    lane.close()
