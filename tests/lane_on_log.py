"""A lane without Spark: a hand-written log, a real state database, file sinks, chosen cuts.

Micro-batches are taken as Spark would plan them, batch range by batch range, so a test can end one
wherever it likes, and start again as after a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from pyspark.sql import DataFrame

from cdc.config import FileDestination, Sink
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import TransientError
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from cdc.queue.open_ledger import LedgerAddress
from cdc.replication.seal import Sealer
from cdc.state.migrate import migrate
from cdc.state.positions import register_source, restart_cursor
from spark_pipeline.delivery import Origin
from spark_pipeline.exchange import Exchange, PlannedRange, note_planned
from spark_pipeline.members import Departure
from spark_pipeline.passage import Passage
from spark_pipeline.post import Post
from spark_pipeline.queues import Queues
from spark_pipeline.settings import LaneSettings
from tests.unit.replication.test_seal import wire

SOURCE = "shop"
FIRST_LSN = 8


class LogLane:
    """One source with consumers whose messages go to files below ``directory``."""

    patience_s = 30.0
    state_dsn = ""
    ledger: LedgerAddress | None = None

    def __init__(self, state: Connection, directory: Path, **sinks: dict[str, Any]) -> None:
        self.state = state
        self.directory = directory
        self.sinks = [
            Sink.model_validate(
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
        self._sealer = Sealer()
        self._starts = 0
        migrate(state)
        self.start()
        state.execute("UPDATE walbrook.sources SET earliest_lsn = restart_lsn, earliest_idx = 0")

    def write(self, *messages: bytes) -> None:
        """One batch of these messages; a transaction may go on in the next one."""
        assert self.write_if_any(*messages)

    def write_if_any(self, *messages: bytes) -> bool:
        """The same, unless nothing of them is for the log."""
        sealed = self._sealer.seal(wire(*messages)) if messages else None
        if sealed is not None:
            self.log.append(sealed.raw, sealed.schemas, first=sealed.first, high=sealed.high)
        return sealed is not None

    def begin_log_anew(self) -> None:
        """Lose the log; what is above the restart cursor can be written again, in other pieces."""
        restart = restart_cursor(self.state, SOURCE)
        self.log.restart_at(restart)
        self._sealer = Sealer(resume=restart)

    def idle(self, lsn: int) -> None:
        """A batch without rows: nothing was committed below ``lsn``."""
        end = Cursor(lsn, 0)
        empty = pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA)
        self.log.append(empty, {}, first=end, high=end)

    def start(self) -> None:
        """What a start of the service and of its lane does, also after a crash."""
        self._starts += 1
        term = register_source(
            self.state,
            name=SOURCE,
            slot="slot",
            publication="pub",
            system_identifier="1",
            slot_lsn=FIRST_LSN,
            consumers=[sink.name for sink in self.sinks],
        )
        self.settings = LaneSettings(
            source=SOURCE,
            term=term,
            origin=Origin(SOURCE, "h", "d"),
            consumers=self.sinks,
            state_dsn=self.state_dsn,
            log_directory=self.directory / "log",
            checkpoint_directory=self.directory,
            micro_batch_rows=1000,
            micro_batch_bytes=1 << 20,
            patience_s=self.patience_s,
            ledger=self.ledger,
        )
        self.queues = Queues()
        self.start_lane_again()

    def start_lane_again(self) -> None:
        """What the service does when a lane has failed."""
        self.exchange = Exchange.create(self.directory / "exchange")
        run = f"{self.directory} {self._starts}"
        view = LogView(self.directory / "log")
        self.departures: list[Departure] = []
        names = tuple(sink.name for sink in self.sinks)
        post = Post(names, self.departures.append, queues=self.queues)
        self.passage = Passage(self.settings, self.state, view, self.exchange, run, post)

    def take(self, batches: int | None = None) -> None:
        """One micro-batch of the next ``batches``, or of all that there are."""
        start, end = self.passage.next_batch, self.log.next_batch
        if batches is not None:
            end = min(end, start + batches)
        self._take(None, start, end)

    def take_frame(self, markers: DataFrame) -> None:
        """One micro-batch of all that there is, which Spark has decoded."""
        self._take(markers, self.passage.next_batch, self.log.next_batch)

    def _take(self, markers: DataFrame | None, start: int, end: int) -> None:
        rows = int(LogView(self.directory / "log").entries(start, end)["rows"].sum())
        note_planned(self.exchange.directory, PlannedRange(start, end, rows))
        self.passage.take(markers, 0)
        if self.passage.failure is not None:
            raise self.passage.failure
        for departure in self.departures:
            if departure.error is not None:
                raise TransientError(f"consumer {departure.consumer} left: {departure.error}")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.state.execute(query.encode()).fetchall()

    def close(self) -> None:
        self.log.close()
        self.exchange.remove()


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
