"""A source under test: a database with a slot, its registered rows, and a reader in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from cdc.connection import Connection
from cdc.cursor import Cursor, parse_lsn
from cdc.errors import GapError
from cdc.log.view import LogView
from cdc.replication.reader import SlotReader
from cdc.replication.settings import ReaderSettings
from cdc.state.migrate import migrate
from cdc.state.positions import Settlement, consumer_cursors, register_source, settle
from cdc.stop import StopSignal
from tests.fix_postgres import DEFAULT_VERSION, Database
from tests.waiting import until

# Postgres 14 cannot publish a schema.
PUBLISHED = "FOR ALL TABLES" if DEFAULT_VERSION < 15 else "FOR TABLES IN SCHEMA public"


@dataclass
class SlotSource:
    """Source ``shop`` with publication ``pub`` and slot ``slot_<database>``."""

    database: Database
    settings: ReaderSettings
    term: int

    @property
    def view(self) -> LogView:
        return LogView(self.settings.log_directory)

    @contextmanager
    def reading(self, **changes: object) -> Iterator[SlotReader]:
        """A reader at work; stopped, and its error raised, at the end."""
        stop = StopSignal()
        reader = SlotReader(replace(self.settings, **changes), stop)  # type: ignore[arg-type]
        failures: list[BaseException] = []

        def run() -> None:
            try:
                reader.run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield reader
        finally:
            stop.request()
            thread.join(30)
        if failures:
            raise failures[0]

    def messages(self) -> list[tuple[Cursor, str]]:
        """Cursor and kind of everything in the log."""
        view = self.view
        found: list[tuple[Cursor, str]] = []
        for frame in view.frames(view.first_batch(), view.next_batch()):
            rows = frame.raw.to_pylist()
            found += [(Cursor(r["commit_lsn"], r["commit_idx"]), chr(r["kind"])) for r in rows]
        return found

    def annotations(self) -> dict[Cursor, str]:
        """What the changes in the log carry that carry anything."""
        view = self.view
        found: dict[Cursor, str] = {}
        for frame in view.frames(view.first_batch(), view.next_batch()):
            lsn, idx = frame.raw.column("commit_lsn"), frame.raw.column("commit_idx")
            for start, stop, text in frame.annotations:
                for row in range(start, stop):
                    found[Cursor(lsn[row].as_py(), idx[row].as_py())] = text.decode()
        return found

    def until_logged(self, count: int) -> list[tuple[Cursor, str]]:
        """The log's messages once there are ``count``."""
        until(f"{count} messages in the log", lambda: self.count() >= count)
        return self.messages()

    def settle_all(self, given: Connection | None = None) -> Cursor:
        """What a pipeline does once everything in the log is delivered."""
        view = self.view
        last = view.entries(view.next_batch() - 1, view.next_batch())[0]
        end = Cursor(int(last["high_lsn"]), int(last["high_idx"]))
        with nullcontext(given) if given is not None else self.database.connect() as connection:
            consumers = {
                name: Settlement(since, end)
                for name, since in consumer_cursors(connection, "shop").items()
            }
            settle(connection, source="shop", term=self.term, read_to=end, consumers=consumers)
        return end

    def confirmed_lsn(self) -> int:
        rows = self.database.execute(
            f"SELECT confirmed_flush_lsn FROM pg_replication_slots "
            f"WHERE slot_name = '{self.settings.slot}'"
        )
        return parse_lsn(str(rows[0][0]))

    def count(self) -> int:
        """How many changes the log holds; none while it is being begun anew."""
        view = self.view
        try:
            return int(view.entries(view.first_batch(), view.next_batch())["rows"].sum())
        except GapError:
            return 0


def make_slot_source(
    database: Database, directory: Path, *, publication: str = PUBLISHED
) -> SlotSource:
    """Publication, slot, state schema and rows for ``database``."""
    slot = f"slot_{database.name}"[:63]
    database.execute(f"CREATE PUBLICATION pub {publication}")
    (row,) = database.execute(
        f"SELECT lsn::text FROM pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    )
    with database.connect() as connection:
        migrate(connection)
        (identifier,) = database.execute("SELECT system_identifier::text FROM pg_control_system()")
        term = register_source(
            connection,
            name="shop",
            slot=slot,
            publication="pub",
            system_identifier=identifier[0],
            slot_lsn=parse_lsn(row[0]),
            consumers=["all"],
        )
    settings = ReaderSettings(
        source="shop",
        term=term,
        dsn=database.dsn,
        slot=slot,
        publication="pub",
        state_dsn=database.dsn,
        log_directory=directory,
        durability="disk",
        idle_s=0.2,
        pace_s=0.1,
    )
    return SlotSource(database, settings, term)
