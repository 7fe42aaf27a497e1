"""A consumer in event-time order without Spark: hand-written logs, a real state database.

Each source has a table ``item (id, at)``; ``at`` is the event time in microseconds. A test writes
transactions, lets the passage take turns, and starts it again as after a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cdc.config import FileDestination, Sink
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.log.writer import LogWriter
from cdc.queue.open_ledger import LedgerAddress
from cdc.replication.seal import Sealer
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.delivery.refusal_log import RefusalLog
from spark_pipeline.eventtime.passage import EventPassage
from spark_pipeline.eventtime.windows.due import Windows
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.settings import StageSettings
from tests import pgoutput
from tests.unit.replication.test_seal import wire

INT4, INT8 = 23, 20
NAME = "timed"
S = 1_000_000
"""A second."""

ITEM = pgoutput.relation(1, "public", "item", [("id", INT4, True), ("at", INT8)])
OTHER = pgoutput.relation(2, "public", "other", [("id", INT4, True), ("at", INT8)])
TABLES = {1: ITEM, 2: OTHER}


class EventLane:
    """One consumer called ``timed`` of one or several sources."""

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
        **sink: Any,
    ) -> None:
        self.state = state
        self.directory = directory
        self.sources = list(sources)
        self.tables = {f"public.{name}": f"public.{name}" for name in tables}
        self._state_dsn, self._ledger, self._windows = state_dsn, ledger, windows
        timed = {"column": "at", "type": "unix_us", "idle_timeout": "1h", **(event_time or {})}
        if sink.get("ordering") == "processing_time":
            timed = event_time or {}
        timed = {key: value for key, value in timed.items() if value is not None}
        self.sink = Sink.model_validate(
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
        self._passages: list[EventPassage] = []
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
        timed = self.sink.event_time
        assert timed is not None
        settings = {}
        for name in self.sources:
            term = register_source(
                self.state,
                name=name,
                slot="slot",
                publication="pub",
                system_identifier="1",
                slot_lsn=8,
                consumers=[NAME],
            )
            settings[name] = StageSettings(
                source=name,
                term=term,
                origin=Origin(name, "h", f"db_{name}"),
                consumers=[self.sink],
                state_dsn=self._state_dsn,
                log_directory=self.directory / name / "log",
                checkpoint_directory=self.directory / name,
                micro_batch_rows=1000,
                micro_batch_bytes=1 << 20,
                ledger=self._ledger,
                times=(("", timed.column or ""),) if self.sink.ordering == "event_time" else (),
            )
        self.settings = settings
        self.take_up()

    def take_up(self) -> None:
        """What the stage does when the consumer's rows were changed."""
        for earlier in self._passages:
            earlier.close()
        run = f"{self.directory} {self._starts}"
        self.queues = {
            name: RetryQueue(self.sink, self.settings[name], run, RefusalLog())
            for name in self.sources
        }
        passage = EventPassage(
            self.sink,
            self.settings,
            self.state,
            roots=dict.fromkeys(self.sources, self.tables),
            queues=self.queues,
            run=run,
            over=threading.Event(),
            windows=self._windows,
        )
        self._passages = [passage]

    def change_event_time(self, **given: Any) -> None:
        """Start with another configuration of event time."""
        assert self.sink.event_time is not None
        changed = self.sink.event_time.model_copy(update=given)
        self.sink = self.sink.model_copy(update={"event_time": changed})
        self.start()

    @property
    def passage(self) -> EventPassage:
        return self._passages[0]

    def turns(self, most: int = 50) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.passage.turn():
                return
        raise AssertionError("it does not come to an end")

    def cursors(self) -> dict[str, Cursor]:
        rows = self.state.execute(
            "SELECT source, cursor_lsn - '0/0'::pg_lsn, cursor_idx FROM walbrook.consumers"
        ).fetchall()
        return {str(source): Cursor(int(str(lsn)), int(str(idx))) for source, lsn, idx in rows}

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.state.execute(query.encode()).fetchall()

    def close(self) -> None:
        self.passage.close()
        for log in self.logs.values():
            log.close()
