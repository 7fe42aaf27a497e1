"""A consumer in event-time order without Spark: hand-written logs, a real state database.

Each source has a table ``item (id, at)``; ``at`` is the event time in microseconds. A test writes
transactions, lets the ordering take turns, and starts the worker again as after a crash. Nobody
decodes for the feeds, so the worker reads the logs itself; ``served`` in ``fix_event_pipeline``
runs whole stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession

from cdc.config import FileDestination, SinkConfig
from cdc.connection import Connection
from cdc.connection_pool import ConnectionPool
from cdc.cursor import ORIGIN, Cursor
from cdc.log.writer import LogWriter
from cdc.queue.ledger.open import LedgerAddress
from cdc.replication.wire.seal import Sealer
from cdc.state.feeds import FeedFigures, open_feed
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.eventtime.ordering import Ordering
from spark_pipeline.eventtime.tables import SourceTables
from spark_pipeline.eventtime.windows.due import Windows
from spark_pipeline.eventtime.worker import EventTimeWorker
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.settler import Settler
from tests import pgoutput
from tests.wire_messages import wire

INT4, INT8 = 23, 20
NAME = "timed"
S = 1_000_000
"""A second."""

ITEM = pgoutput.relation(1, "public", "item", [("id", INT4, True), ("at", INT8)])
OTHER = pgoutput.relation(2, "public", "other", [("id", INT4, True), ("at", INT8)])
TABLES = {1: ITEM, 2: OTHER}


class GivenTables(SourceTables):
    """Tables and windows as a test gives them, without a database to ask."""

    given: dict[str, str]
    given_windows: Windows | None

    def find(self, state: Connection) -> bool:
        self.roots = {name: {**self.given} for name in self._contexts}
        return False

    def windows(self) -> Windows | None:
        return self.given_windows


class EventPipeline:
    """One consumer called ``timed`` of one or several sources; ``beside`` are names of others."""

    def __init__(
        self,
        state: Connection,
        directory: Path,
        *,
        sources: Sequence[str] = ("a",),
        tables: Sequence[str] = ("item",),
        event_time: dict[str, Any] | None = None,
        state_dsn: str = "",
        ledger: LedgerAddress | None = None,
        windows: Windows | None = None,
        beside: Sequence[str] = (),
        spark: SparkSession | None = None,
        driver_rows: int = 20_000,
        **sink: Any,
    ) -> None:
        self.state = state
        self.directory = directory
        self.sources = list(sources)
        self.tables = {f"public.{name}": f"public.{name}" for name in tables}
        self._state_dsn, self._ledger, self._windows = state_dsn, ledger, windows
        self._beside, self._spark, self._driver_rows = beside, spark, driver_rows
        timed = {"column": "at", "type": "unix_us", "idle_timeout": "1h", **(event_time or {})}
        if sink.get("ordering") == "processing_time":
            timed = event_time or {}
        timed = {key: value for key, value in timed.items() if value is not None}
        self.sink = SinkConfig.model_validate(
            {
                "name": NAME,
                "databases": list(sources),
                "ordering": "event_time",
                "event_time": timed,
                "destination": FileDestination(path=directory / NAME),
                **sink,
            }
        )
        self.logs = {name: LogWriter(directory / name / "log") for name in sources}
        self._sealers = {name: Sealer() for name in sources}
        self._lsn = dict.fromkeys(sources, 0)
        self._starts = 0
        self.worker: EventTimeWorker | None = None
        migrate(state)
        self.start()
        state.execute(
            "UPDATE walbrook.sources SET earliest_lsn = restart_lsn, earliest_idx = restart_idx"
        )

    def write(
        self, source: str, *rows: tuple[int, int | str | None], table: int = 1, at_us: int = 0
    ) -> None:
        """One transaction and batch of these rows: id and event time."""
        changes = [
            pgoutput.insert(table, [str(number), None if at is None else str(at)])
            for number, at in rows
        ]
        self.write_messages(source, TABLES[table], *changes, at_us=at_us)

    def write_messages(self, source: str, *messages: bytes, at_us: int = 0) -> None:
        self._lsn[source] += 0x100
        lsn = self._lsn[source]
        sealed = self._sealers[source].seal(
            wire(
                pgoutput.begin(lsn, at_us or lsn, lsn), *messages, pgoutput.commit(lsn, lsn + 8, 0)
            )
        )
        assert sealed is not None
        self.logs[source].append(sealed.raw, sealed.schemas, first=sealed.first, high=sealed.high)

    def start(self) -> None:
        """What a start of the service does, also after a crash."""
        self._starts += 1
        settings = {}
        self.runs: dict[str, int] = {}
        for name in self.sources:
            term = register_source(
                self.state,
                name=name,
                slot="slot",
                publication="pub",
                system_identifier="1",
                slot_lsn=8,
                consumers=[NAME, *self._beside],
            )
            self.runs[name] = open_feed(self.state, name, term, [NAME]).run
            settings[name] = StageSettings(
                source=name,
                term=term,
                origin=Origin(name, "h", f"db_{name}"),
                consumers=[],
                in_event_time=[self.sink],
                state_dsn=self._state_dsn,
                log_directory=self.directory / name / "log",
                checkpoint_directory=self.directory / name,
                micro_batch_rows=1000,
                micro_batch_bytes=1 << 20,
                ledger=self._ledger,
                driver_rows=self._driver_rows,
            )
        self.settings = settings
        self.read_resume_state()

    def read_resume_state(self) -> None:
        """What the worker does when the consumer's rows were changed."""
        self.stop_serving()
        contexts = {name: self._context(name) for name in self.sources}
        tables = GivenTables(self.sink, contexts)
        tables.given, tables.given_windows = self.tables, self._windows
        self.worker = EventTimeWorker(self.sink, contexts, tables=tables)
        assert self.worker.begin()

    def _context(self, source: str) -> WorkerContext:
        settings = self.settings[source]
        dsn = self._state_dsn or dsn_of(self.state)
        connections = ConnectionPool(dsn, name="test")
        return WorkerContext(
            settings=settings,
            feed=Feed(1 << 20),
            settler=Settler(
                source,
                settings.term,
                self.runs[source],
                dsn,
                connections,
                lambda: FeedFigures(ORIGIN),
                settings.records,
            ),
            connections=connections,
            scratch=self.directory,
            spark=None if self._spark is None else LateSession.of(self._spark),
            run=f"{self.directory} {self._starts}",
        )

    def stop_serving(self) -> None:
        """As a killed process does: nothing more is written."""
        if self.worker is not None:
            self.worker.close()
            for each in self.worker.inputs.values():
                each.context.connections.end()
            self.worker = None

    @property
    def queues(self) -> dict[str, RetryQueue]:
        assert self.worker is not None
        return {name: each.retries for name, each in self.worker.inputs.items()}

    def change_event_time(self, **given: Any) -> None:
        """Start with another configuration of event time."""
        assert self.sink.event_time is not None
        changed = self.sink.event_time.model_copy(update=given)
        self.sink = self.sink.model_copy(update={"event_time": changed})
        self.start()

    @property
    def ordering(self) -> Ordering:
        assert self.worker is not None
        assert self.worker.ordering is not None
        return self.worker.ordering

    def turns(self, most: int = 50) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.ordering.turn():
                return
        raise AssertionError("it does not come to an end")

    def step(self) -> bool:
        """One step of the worker, which waits if there is nothing to do."""
        assert self.worker is not None
        return self.worker.step(0.2)

    def cursors(self) -> dict[str, Cursor]:
        rows = self.state.execute(
            "SELECT source, cursor_lsn - '0/0'::pg_lsn, cursor_idx FROM walbrook.consumers"
        ).fetchall()
        return {str(source): Cursor(int(str(lsn)), int(str(idx))) for source, lsn, idx in rows}

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.state.execute(query.encode()).fetchall()

    def close(self) -> None:
        self.stop_serving()
        for log in self.logs.values():
            log.close()


def _no_figures() -> FeedFigures:
    return FeedFigures(ORIGIN)


def dsn_of(state: Connection) -> str:
    return make_conninfo(state.info.dsn, password=state.info.password)
