"""Backfill without Spark: a real source, a real reader, and workers with file sinks in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from psycopg.rows import namedtuple_row

from cdc.config import FileDestination, SinkConfig
from cdc.config.secrets import SecretText
from cdc.connection import connect
from cdc.connection_pool import ConnectionPool
from cdc.cursor import ORIGIN, parse_lsn
from cdc.queue.ledger.open import LedgerAddress
from cdc.state.active_consumers import read_active_consumers
from cdc.state.backfills import consumers_with_backfills
from cdc.state.feeds import FeedFigures, open_feed
from cdc.state.positions import register_source
from cdc.state.verifications import consumers_with_verifications
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.stage.worker import Worker
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.settler import Settler
from spark_pipeline.workers.state import Reason
from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.slot_source import PUBLISHED, SlotSource, make_slot_source
from tests.waiting import until

SOURCE = "shop"
_LOOK_S = 0.05


@dataclass
class Rig:
    """Consumer ``files`` of source ``shop``; what it gets lies in ``directory / "files"``."""

    database: Database
    directory: Path
    publication: str = PUBLISHED
    sink: dict[str, Any] = field(default_factory=dict)
    local_commits: bool = False  # state is written without waiting for a standby
    read_as: str = ""  # another role than that of the reader
    _starts: int = 0
    _worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        self.source: SlotSource = self._make_source()
        with self.database.connect() as connection:
            row = connection.execute(
                "SELECT system_identifier, restart_lsn::text FROM walbrook.sources"
            ).fetchone()
            assert row is not None
            term = register_source(
                connection, name=SOURCE, slot=self.source.settings.slot, publication="pub",
                system_identifier=row[0], slot_lsn=parse_lsn(row[1]), consumers=["files"],
            )  # fmt: skip
        self.source.term = term
        self.source.settings = replace(self.source.settings, term=term)
        if self.local_commits:
            dsn = f"{self.database.dsn} options='-c synchronous_commit=local'"
            self.source.settings = replace(self.source.settings, state_dsn=dsn)

    def _make_source(self) -> SlotSource:
        return make_slot_source(self.database, self.directory / "log", publication=self.publication)

    @property
    def state_dsn(self) -> str:
        return self.source.settings.state_dsn

    @contextmanager
    def running(self) -> Iterator[None]:
        """The reader and the consumer's worker."""
        with self.source.reading(), self.serving():
            yield

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The worker alone; its end is that of a process: what was not settled is forgotten."""
        self._starts += 1
        sink = SinkConfig.model_validate(
            {
                "name": "files",
                "database": SOURCE,
                "destination": FileDestination(path=self.directory / "files"),
                **self.sink,
            }
        )
        with connect(self.state_dsn, name="test") as state:
            run = open_feed(state, SOURCE, self.source.term, ["files"]).run
        term = self.source.term
        settings = StageSettings(
            source=SOURCE, term=term, origin=Origin(SOURCE, "h", "d"), consumers=[sink],
            state_dsn=self.state_dsn, log_directory=self.source.settings.log_directory,
            checkpoint_directory=self.directory, micro_batch_rows=10_000,
            micro_batch_bytes=16 << 20, publication="pub",
            source_dsn=self.read_as or self.database.dsn,
            ledger=LedgerAddress("postgres", SecretText(self.state_dsn)),
        )  # fmt: skip
        scratch = self.directory / "scratch"
        scratch.mkdir(exist_ok=True)
        connections = ConnectionPool(self.state_dsn, name="test")
        settler = Settler(
            SOURCE, term, run, self.state_dsn, connections, lambda: FeedFigures(ORIGIN)
        )
        context = WorkerContext(
            settings, Feed(64 << 20), settler, connections, scratch,
            run=f"{self.directory} {self._starts}",
        )  # fmt: skip
        self._worker = worker = Worker(sink, context)
        threads = [
            threading.Thread(target=run_)
            for run_ in (settler.run, worker.run, lambda: self._watch(worker, context))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            context.ended.set()
            context.over.set()
            worker.nudge()
            for thread in threads[1:]:
                thread.join(60)
            settler.close()
            threads[0].join(60)
            # One that goes on would deliver beside the next one.
            assert not any(thread.is_alive() for thread in threads)
            connections.end()

    def _watch(self, worker: Worker, context: WorkerContext) -> None:
        """What the stage does each second."""
        with connect(self.state_dsn, name="watch") as state:
            while not context.ended.wait(_LOOK_S):
                served = worker.name in read_active_consumers(state, SOURCE).served
                if served == (worker.current.reason is Reason.PAUSED):
                    worker.nudge()
                if consumers_with_backfills(state, SOURCE):
                    worker.backfill()
                if consumers_with_verifications(state, SOURCE):
                    worker.verify()

    def start(self, table: str, **options: object) -> int:
        """Start a backfill; returns its id."""
        given = "".join(f", {name} => {_literal(value)}" for name, value in options.items())
        with connect(self.state_dsn, name="test") as state:
            row = state.execute(
                f"SELECT id FROM walbrook.start_backfill('files', '{table}'{given})".encode()
            ).fetchone()
        assert row is not None
        return int(str(row[0]))

    def pause(self) -> None:
        """Pause the consumer, and wait until its worker has nothing under way."""
        self.rows("SELECT walbrook.pause('files')")
        until("the pause", lambda: self._worker.current.reason is Reason.PAUSED)

    def hurry(self) -> None:
        """The chunks that are read from now on are delivered without a limit."""
        self.rows("UPDATE walbrook.backfills SET rows_per_second = NULL RETURNING 1")

    def until_state(self, backfill: int, state: str = "done", timeout_s: float = 60.0) -> None:
        def reached() -> bool:
            (now, reason, error) = self.progress(backfill)
            assert now in (state, "waiting", "running", "paused"), (now, reason, error)
            return bool(now == state)

        try:
            until(f"backfill {backfill} to be {state}", reached, timeout_s)
        except AssertionError as error:
            found = self.rows("SELECT * FROM walbrook.backfill_progress")
            where = self.rows("SELECT * FROM walbrook.cursors")
            raise AssertionError(f"{error}\n{found}\n{where}") from None

    def progress(self, backfill: int) -> tuple[Any, ...]:
        """State, reason and error."""
        (row,) = self.rows(
            f"SELECT state, reason, error FROM walbrook.backfills WHERE id = {backfill}"
        )
        return row

    def backfilled(self, table: str, **options: object) -> None:
        """Start a backfill and wait for its end."""
        self.until_state(self.start(table, **options))

    def verified(self, table: str = "item", *, repair: bool = False, state: str = "done") -> Any:
        """Verify a table and wait for the end; returns its row, with names."""
        ((number,),) = self.rows(
            f"SELECT id FROM walbrook.start_verification('files', '{table}', {repair})"
        )

        def ended() -> Any:
            with connect(self.state_dsn, name="test") as connection:
                found = connection.cursor(row_factory=namedtuple_row)
                row: Any = found.execute(
                    f"SELECT * FROM walbrook.verifications WHERE id = {number}".encode()
                ).fetchone()
            return row if row.state in ("done", "failed", "cancelled") else None

        row = until(f"verification {number}", ended, 90)
        assert row.state == state, row.error
        return row

    def until_delivered(self) -> None:
        """Until all that was committed so far is delivered and settled."""
        ((lsn,),) = self.rows("SELECT pg_logical_emit_message(true, 'test', 'mark')")
        query = f"SELECT cursor_lsn >= '{lsn}' FROM walbrook.consumers WHERE name = 'files'"
        until("the changes to be delivered", lambda: self.rows(query)[0][0])

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with connect(self.state_dsn, name="test") as state:
            return state.execute(query.encode()).fetchall()

    def messages(self) -> list[dict[str, Any]]:
        return arrived(self.directory / "files")

    def table(self) -> dict[str, dict[str, Any]]:
        """What a reader has who applies every message, by key."""
        return applied(self.messages())


NOT_SENT = "not sent"


def applied(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows by table and key, as the messages leave them; a value never sent is ``NOT_SENT``."""
    rows: dict[str, dict[str, Any]] = {}
    for message in messages:
        said = message["metadata"]
        if message["action"] not in ("insert", "update", "delete", "read"):
            continue
        where = f"{said['table_name']} {orjson.dumps(said['record_pks']).decode()}"
        changes = message.get("changes") or {}
        record = message["record"]
        before = rows.pop(where, {})
        if message["action"] == "update" and "id" in changes:
            before = rows.pop(f'{said["table_name"]} ["{changes["id"]}"]', before)
        if message["action"] == "delete":
            continue
        for name in said.get("unchanged", []):
            record[name] = before.get(name, NOT_SENT)
        rows[where] = record
    return rows


def stale(messages: list[dict[str, Any]], column: str = "version") -> list[dict[str, Any]]:
    """Messages that take a row back: its ``column`` only ever grows at the source."""
    newest: dict[str, int] = {}
    found = []
    for message in messages:
        said = message["metadata"]
        where = f"{said['table_name']} {said['record_pks']}"
        if message["action"] in ("insert", "update", "read"):
            version = int(message["record"][column])
            if version < newest.get(where, 0):
                found.append(message)
            newest[where] = max(version, newest.get(where, 0))
        elif message["action"] == "delete":
            # A row of the same key comes later with a higher version.
            newest[where] = newest.get(where, 0) + 1
    return found


def _literal(value: object) -> str:
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"
