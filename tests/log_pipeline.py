"""A stage without threads: a hand-written log, a real state database, file sinks, chosen cuts.

Ranges are taken as Spark would plan them, and each worker delivers them in turn, so a test can end
one wherever it likes, and start again as after a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from psycopg.conninfo import make_conninfo
from pyspark.sql import DataFrame, SparkSession

from cdc.config import FileDestination, SinkConfig
from cdc.connection import Connection
from cdc.connection_pool import ConnectionPool
from cdc.cursor import ORIGIN, Cursor, idle_place
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import TransientError, WalbrookError
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from cdc.queue.ledger.open import LedgerAddress
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed
from cdc.replication.wire.table_versions import TableVersions
from cdc.state.consumers import Described
from cdc.state.feeds import FeedFigures, open_feed
from cdc.state.health import open_of_kind
from cdc.state.migrate import migrate
from cdc.state.positions import register_source, restart_cursor
from cdc.state.schema_versions import known_versions, record_versions
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.delivery.isolate import as_walbrook_error
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.feed.body import FeedBody
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.planner import Planner
from spark_pipeline.feed.progress import StageProgress
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.slices.exchange import Exchange, PlannedRange
from spark_pipeline.stage.worker import TABLES_STOPPED, Worker
from spark_pipeline.workers.base import ATTEMPTS_IN_DRIVER, RestartError
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.settler import Settler
from tests.wire_messages import wire

SOURCE = "shop"
FIRST_LSN = 8


class LogPipeline:
    """One source with consumers whose messages go to files below ``directory``."""

    spark: SparkSession | None = None
    ledger: LedgerAddress | None = None
    driver_rows = 20_000

    def __init__(self, state: Connection, directory: Path, **sinks: dict[str, Any]) -> None:
        self.state = state
        self.dsn = make_conninfo(state.info.dsn, password=state.info.password)
        self.directory = directory
        self.workers: dict[str, Worker] = {}
        self.sinks = [
            SinkConfig.model_validate(
                {
                    "name": name,
                    "database": SOURCE,
                    "destination": FileDestination(path=directory / name),
                    "partition_count": 1,  # one request after another, unless a test says more
                    **given,
                }
            )
            for name, given in sinks.items()
        ]
        self.log = LogWriter(directory / "log")
        self._starts = 0
        migrate(state)
        self.start()
        self._sealer = self._sealer_at(ORIGIN)
        state.execute("UPDATE walbrook.sources SET earliest_lsn = restart_lsn, earliest_idx = 0")

    def write(self, *messages: bytes) -> None:
        """One batch of these messages; a transaction may go on in the next one."""
        assert self.write_if_any(*messages)

    def write_if_any(self, *messages: bytes) -> bool:
        """The same, unless nothing of them is for the log."""
        sealed = self._sealer.seal(wire(*messages)) if messages else None
        if sealed is not None:
            if sealed.versions:
                record_versions(self.state, SOURCE, self.settings.term, sealed.versions)
            self.log.append(sealed.raw, sealed.schemas, first=sealed.first, high=sealed.high)
        return sealed is not None

    def seal_and_lose(self, *messages: bytes) -> Sealed:
        """A batch of these messages that never comes into the log."""
        sealed = self._sealer.seal(wire(*messages))
        assert sealed is not None
        return sealed

    def connect_again(self) -> None:
        """What the log has is skipped from now on, and the versions are those recorded."""
        self._sealer = self._sealer_at(self.log.end)

    def begin_log_anew(self) -> None:
        """Lose the log; what is above the restart cursor can be written again, in other pieces."""
        restart = restart_cursor(self.state, SOURCE)
        self.log.restart_at(restart)
        self._sealer = self._sealer_at(restart)

    def _sealer_at(self, resume: Cursor) -> Sealer:
        """What a connection of the reader goes on with."""
        versions = TableVersions(known_versions(self.state, SOURCE, resume))
        return Sealer(resume=resume, versions=versions)

    def idle(self, lsn: int) -> None:
        """A batch without rows: nothing was committed below ``lsn``."""
        end = idle_place(lsn)
        empty = pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA)
        self.log.append(empty, {}, first=end, high=end)

    def start(self) -> None:
        """What a start of the service does, also after a crash."""
        term = register_source(
            self.state,
            name=SOURCE,
            slot="slot",
            publication="pub",
            system_identifier="1",
            slot_lsn=FIRST_LSN,
            consumers=[sink.name for sink in self.sinks],
            described={sink.name: Described(rewind_ways=sink.rewind_ways) for sink in self.sinks},
        )
        self.settings = StageSettings(
            source=SOURCE,
            term=term,
            origin=Origin(SOURCE, "h", "d"),
            consumers=self.sinks,
            state_dsn=self.dsn,
            log_directory=self.directory / "log",
            checkpoint_directory=self.directory,
            micro_batch_rows=1000,
            micro_batch_bytes=1 << 20,
            ledger=self.ledger,
            driver_rows=self.driver_rows,
        )
        self.start_pipeline_again()

    def start_pipeline_again(self) -> None:
        """What a new process does: it begins at the rows in Postgres."""
        self._close_stage()
        self._starts += 1
        names = [sink.name for sink in self.sinks]
        self.feed_run = open_feed(self.state, SOURCE, self.settings.term, names)
        self.exchange = Exchange.create(self.directory / "exchange")
        self.feed = Feed(64 << 20)
        self.feed.is_filled = True  # by the test
        self.connections = ConnectionPool(self.dsn, name="test")
        self.settler = Settler(
            SOURCE,
            self.settings.term,
            self.feed_run.run,
            self.dsn,
            self.connections,
            self._figures,
            self.settings.records,
        )
        self.context = WorkerContext(
            settings=self.settings,
            feed=self.feed,
            settler=self.settler,
            connections=self.connections,
            scratch=self.exchange.directory,
            spark=None if self.spark is None else LateSession.of(self.spark),
            run=f"{self.directory} {self._starts}",
        )
        stopped = open_of_kind(self.state, SOURCE, TABLES_STOPPED)
        self.workers = {
            sink.name: Worker(
                sink,
                self.context,
                attempts=self.feed_run.consumers[sink.name],
                stopped=stopped.get(sink.name),
            )
            for sink in self.sinks
        }
        self.failed: dict[str, WalbrookError] = {}
        self.served: set[str] = set()
        with closing(LogView(self.directory / "log")) as view:
            self.feed.begin(view.history(), view.first_batch(), ORIGIN)
            for worker in self.workers.values():
                self.begin(worker)
            places = [self.workers[name].batch for name in self.served]
            self.feed.begin(view.history(), min(places, default=view.next_batch()), ORIGIN)
        planner = Planner(self.settings, self.feed.history, self.exchange.directory)
        self.body = FeedBody(
            self.feed,
            planner,
            self.exchange,
            StageProgress(),
            self.context.ended,
            little=self.settings.little,
            isolate=self.feed_run.attempts > ATTEMPTS_IN_DRIVER,
        )

    def begin(self, worker: Worker) -> None:
        """Let a worker read its row."""
        self.served.discard(worker.name)
        try:
            if worker.begin():
                self.served.add(worker.name)
        except Exception as error:
            self._fails(worker, error)

    @property
    def next_batch(self) -> int:
        """The first batch that is not decoded."""
        return self.feed.position

    def take(self, batches: int | None = None) -> None:
        """One range of the next ``batches``, or of all that there are, for all workers."""
        end = self.log.next_batch
        if batches is not None:
            end = min(end, self.feed.position + batches)
        self._take(None, end)

    def take_frame(self, markers: DataFrame) -> None:
        """One range of all that there is, which Spark has decoded."""
        self._take(markers, self.log.next_batch)

    def _take(self, markers: DataFrame | None, end: int) -> None:
        for name in sorted(self.served):
            self.feed.join(name, self.feed.history, self.workers[name].batch)
        start = self.feed.position
        with closing(LogView(self.directory / "log")) as view:
            rows = int(view.entries(start, end)["rows"].sum()) if end > start else 0
        if end > start:
            self.body.take_range(PlannedRange(start, end, rows), markers)
        self.serve(end)
        self.settler.write()
        if self.settler.failure is not None:
            raise self.settler.failure
        for name, error in self.failed.items():
            raise TransientError(f"consumer {name} failed: {error}")

    def serve(self, end: int) -> None:
        """Let each worker deliver what there is below batch ``end``."""
        for name in sorted(self.served):
            worker = self.workers[name]
            try:
                while name in self.served and worker.batch < end and worker.serve_next(0.0):
                    pass
            except RestartError:
                self.begin(worker)
            except Exception as error:
                self._fails(worker, error)

    def begin_again(self) -> None:
        """Let the workers that failed, or were moved, read their rows: their pause is over."""
        self.failed.clear()
        for name, worker in self.workers.items():
            if name not in self.served or self.settler.was_moved(name):
                self.begin(worker)

    def deliver_due(self, claims: int = 1, run: str = "") -> list[Outcome]:
        """Let each worker deliver what is due in its retry queue; ``run`` names the process."""
        found: list[Outcome] = []
        for sink in self.sinks:
            refusals = self.context.refusals
            retries = RetryQueue(
                sink,
                self.settings,
                run or self.context.run,
                refusals,
                records=self.settings.records,
            )
            for _ in range(claims):
                outcome = retries.deliver_due(self.state, self.context.over)
                found += [outcome] if outcome is not None else []
        return found

    def _fails(self, worker: Worker, error: Exception) -> None:
        self.served.discard(worker.name)
        worker.failed(error)
        self.failed[worker.name] = worker.current.error or as_walbrook_error(error)

    def _figures(self) -> FeedFigures:
        return FeedFigures(self.feed.high)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.state.execute(query.encode()).fetchall()

    def close(self) -> None:
        self.log.close()
        self._close_stage()

    def _close_stage(self) -> None:
        for worker in self.workers.values():
            worker.close()
        if self._starts:
            self.settler.close()
            self.feed.close()
            self.body.close()
            self.exchange.remove()
            self.connections.end()


def arrived(directory: Path) -> list[dict[str, Any]]:
    """The messages in a file sink's directory, in order; not one that is being written."""
    return [
        orjson.loads(line)
        for file in sorted(directory.glob("*.jsonl"))
        for line in file.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]


def cursors_of(messages: Sequence[dict[str, Any]]) -> list[Cursor]:
    metadata = [message["metadata"] for message in messages]
    return [Cursor(each["commit_lsn"], each["commit_idx"]) for each in metadata]
