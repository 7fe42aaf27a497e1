"""Rows and changes in order by visibility: commits that hang, nested, prepared and long ones.

The position of a commit in the WAL says nothing of when a SELECT sees it. A build that goes by
positions delivers an old row behind its change: the last test shows that this would be noticed.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cdc.backfill.open_transactions import OpenTransactions
from cdc.backfill.snapshot import Snapshot
from demo.embedded_postgres import EmbeddedPostgres
from tests.backfill_rig import Rig, stale
from tests.fix_postgres import VERSIONS, Database, embedded, fresh_database
from tests.waiting import until

_ITEMS = """
CREATE TABLE other (id int PRIMARY KEY, version int NOT NULL);
INSERT INTO other VALUES (1, 1);
CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL);
INSERT INTO item SELECT i, 1 FROM generate_series(1, 10) AS i
"""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A server of its own: all commits of it wait while one hangs."""
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-visibility-"))
    settings = {"max_prepared_transactions": "10"}
    try:
        with embedded(directory, VERSIONS[-1], fast=True, settings=settings) as running:
            yield running
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(server.dsn) as found:
        yield found


@contextmanager
def hanging_update(database: Database) -> Iterator[None]:
    """An UPDATE of item 1 whose commit is written, and waits for a standby that never comes."""
    with (
        database.connect() as admin,
        database.connect() as first,
        database.connect() as writer,
    ):
        over = threading.Event()

        def standby(name: str) -> None:
            admin.execute("SET synchronous_commit = local")
            admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'".encode())
            admin.execute("SELECT pg_reload_conf()")

        def commit_until_it_waits() -> None:
            while not over.wait(0.01):
                first.execute("SELECT pg_logical_emit_message(true, 'test', 'wait')")

        def update() -> None:
            writer.execute("UPDATE item SET version = 2 WHERE id = 1")

        threads = []
        try:
            standby("nobody")
            for connection, run in ((first, commit_until_it_waits), (writer, update)):
                connection.execute("SET synchronous_commit = on")
                threads.append(threading.Thread(target=run))
                threads[-1].start()
                pid = connection.info.backend_pid
                waiting = f"SELECT wait_event FROM pg_stat_activity WHERE pid = {pid}"
                until("the commit to wait", partial(_is_waiting, database, waiting))
            yield
        finally:
            over.set()
            standby("")
            for thread in threads:
                thread.join(30)


def _is_waiting(database: Database, query: str) -> bool:
    return database.execute(query) == [("SyncRep",)]


def _until_update(rig: Rig) -> None:
    until(
        "the update to be delivered",
        lambda: [each for each in rig.messages() if each["action"] == "update"],
    )


def _backfill_beside_a_hanging_commit(rig: Rig) -> None:
    with rig.running():
        rig.backfilled("other")  # which transactions are open is known from here on
        with hanging_update(rig.database):
            _until_update(rig)
            rig.backfilled("item")
            assert rig.rows("SELECT version FROM item WHERE id = 1") == [(1,)], "it is visible"
        rig.until_delivered()


def test_a_row_whose_commit_hangs_does_not_go_back_in_time(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path, local_commits=True)
    _backfill_beside_a_hanging_commit(rig)
    assert stale(rig.messages()) == []
    assert rig.table() == {
        'other ["1"]': {"id": 1, "version": 1},
        **{f'item ["{i}"]': {"id": i, "version": 2 if i == 1 else 1} for i in range(1, 11)},
    }
    assert rig.rows("SELECT sum(dropped) FROM walbrook.backfill_chunks") == [(1,)]


def test_a_build_that_goes_by_positions_in_the_wal_is_caught(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def position(self: OpenTransactions, _snapshot: Snapshot) -> int:
        return self.lsn  # a mark before the read: what lies below it counts as read

    monkeypatch.setattr(OpenTransactions, "look_from", position)
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path, local_commits=True)
    _backfill_beside_a_hanging_commit(rig)
    (message,) = stale(rig.messages())
    assert (message["action"], message["record"]) == ("read", {"id": 1, "version": 1})


def test_a_backfill_waits_for_commits_that_hung_before_it_began_and_says_so(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path, local_commits=True)
    with rig.running():
        with hanging_update(database):
            _until_update(rig)
            backfill = rig.start("item")
            until("the reason", lambda: "have to end first" in str(rig.progress(backfill)[1]))
        rig.until_state(backfill)
    assert stale(rig.messages()) == []
    assert rig.table()['item ["1"]'] == {"id": 1, "version": 2}


def test_a_long_writer_that_began_later_holds_nothing_up(
    database: Database, tmp_path: Path
) -> None:
    """With nested transactions: a snapshot lists their numbers, a change has the outermost one."""
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("other")
        with database.connect() as writer, writer.transaction():
            writer.execute("UPDATE item SET version = 2 WHERE id = 1")
            for key in range(2, 6):
                with writer.transaction():
                    writer.execute("UPDATE item SET version = 2 WHERE id = %s", (key,))
            with writer.transaction(force_rollback=True):
                writer.execute("UPDATE item SET version = 9 WHERE id = 6")
            rig.backfilled("item")
        rig.until_delivered()
    read = [each for each in rig.messages() if each["action"] == "read"]
    assert {each["record"]["version"] for each in read} == {1}
    assert stale(rig.messages()) == []
    assert rig.table()['item ["5"]'] == {"id": 5, "version": 2}
    assert rig.table()['item ["6"]'] == {"id": 6, "version": 1}


def test_rows_that_a_nested_transaction_overtook_are_dropped(
    database: Database, tmp_path: Path
) -> None:
    """The transaction ends between the read of the chunk and its delivery."""
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("other")
        with database.connect() as writer:
            with writer.transaction():
                writer.execute("SELECT pg_current_xact_id()")
                with writer.transaction():
                    writer.execute("UPDATE item SET version = 2 WHERE id > 5")
                backfill = rig.start("item", rows_per_second=1)
                until("the first row", lambda: len(rig.messages()) > 1)
            rig.until_delivered()
            rig.rows(f"SELECT walbrook.pause_backfill({backfill})")
            rig.rows(f"SELECT walbrook.resume_backfill({backfill})")
        rig.until_state(backfill)
    assert stale(rig.messages()) == []
    assert rig.table()['item ["9"]'] == {"id": 9, "version": 2}
    assert rig.rows("SELECT sum(dropped) FROM walbrook.backfill_chunks") != [(0,)]


def test_a_prepared_transaction_is_newer_until_it_is_committed(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("other")
        with database.connect() as writer:
            writer.execute("BEGIN")
            writer.execute("UPDATE item SET version = 2 WHERE id = 1")
            writer.execute("PREPARE TRANSACTION 'later'")
        rig.backfilled("item")
        database.execute("COMMIT PREPARED 'later'")
        rig.until_delivered()
    assert stale(rig.messages()) == []
    assert rig.table()['item ["1"]'] == {"id": 1, "version": 2}


def test_a_prepared_transaction_from_before_is_waited_for(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        with database.connect() as writer:
            writer.execute("BEGIN")
            writer.execute("UPDATE item SET version = 2 WHERE id = 1")
            writer.execute("PREPARE TRANSACTION 'earlier'")
        backfill = rig.start("item")
        until("the reason", lambda: "pg_prepared_xacts" in str(rig.progress(backfill)[1]))
        database.execute("ROLLBACK PREPARED 'earlier'")
        rig.until_state(backfill)
    assert rig.table()['item ["1"]'] == {"id": 1, "version": 1}
