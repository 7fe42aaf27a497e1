"""What happens to a table while it is read, and what operators do to its backfill."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest

from cdc.backfill import log_scan
from cdc.backfill.ranges import BlockRange
from cdc.backfill.reading import ChunkRead, ChunkTask, read_chunk
from cdc.errors import TransientError
from spark_pipeline.backfill import runner
from spark_pipeline.stage.worker import Worker
from spark_pipeline.workers.settler import Settler
from tests.backfill_rig import Rig, stale
from tests.fix_postgres import Database
from tests.waiting import until

pytestmark = pytest.mark.migrated

_ITEMS = """
CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, pad text);
INSERT INTO item SELECT i, 1, repeat('x', 200) FROM generate_series(1, 400) AS i;
CREATE TABLE other (id int PRIMARY KEY, version int NOT NULL);
INSERT INTO other VALUES (1, 1)
"""
_SLOWLY = {"chunk_bytes": 8192, "rows_per_second": 100, "connections": 1}


def _begun(rig: Rig, table: str = "item") -> int:
    """A backfill of many chunks of which some rows have arrived."""
    backfill = rig.start(table, **_SLOWLY)
    until("some rows", rig.messages)
    return backfill


@pytest.mark.parametrize(
    "act",
    [
        "VACUUM FULL item",
        pytest.param("CLUSTER item USING item_pkey", marks=pytest.mark.chaos),
        "ALTER TABLE item ALTER id TYPE bigint",
    ],
)
def test_a_table_that_is_rewritten_is_planned_again(
    database: Database, tmp_path: Path, act: str
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = _begun(rig)
        database.execute("DELETE FROM item WHERE id % 2 = 0")
        database.execute(act)
        rig.hurry()
        rig.until_state(backfill)
        rig.until_delivered()
    assert set(rig.table()) == {f'item ["{i}"]' for i in range(1, 400, 2)}
    states = rig.rows("SELECT DISTINCT state FROM walbrook.backfill_chunks")
    assert ("replaced",) in states


def test_a_column_that_is_added_arrives_in_the_chunks_that_follow(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = _begun(rig)
        database.execute("ALTER TABLE item ADD extra text DEFAULT 'new'")
        rig.hurry()
        rig.until_state(backfill)
    records = [each["record"] for each in rig.messages()]
    assert len(records) == 400
    assert records[-1]["extra"] == "new"
    assert "extra" not in records[0]


def test_a_table_that_is_dropped_fails_alone_and_can_be_skipped(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = _begun(rig)
        database.execute("DROP TABLE item")
        rig.until_state(backfill, "failed")
        assert "item" in str(rig.progress(backfill)[2])
        rig.backfilled("other")
        assert rig.rows(f"SELECT state FROM walbrook.skip_backfill({backfill})") == [("skipped",)]
    assert rig.table()['other ["1"]'] == {"id": 1, "version": 1}


_PARTED = """
CREATE TABLE item (id int PRIMARY KEY, version int) PARTITION BY RANGE (id);
CREATE TABLE low PARTITION OF item FOR VALUES FROM (0) TO (500);
CREATE TABLE high (id int PRIMARY KEY, version int);
INSERT INTO high SELECT i, 1 FROM generate_series(500, 899) AS i;
INSERT INTO item SELECT i, 1 FROM generate_series(0, 499) AS i
"""
_VIA_ROOT = "FOR TABLE item WITH (publish_via_partition_root = true)"
_ATTACH = "ALTER TABLE item ATTACH PARTITION high FOR VALUES FROM (500) TO (1000)"


def test_the_rows_of_a_partition_that_is_attached_meanwhile_arrive(
    database: Database, tmp_path: Path
) -> None:
    """They were never changes of the table; those that are written from then on are."""
    database.execute(_PARTED)
    rig = Rig(database, tmp_path, publication=_VIA_ROOT)
    with rig.running():
        backfill = _begun(rig)
        database.execute(_ATTACH)
        database.execute("INSERT INTO item VALUES (900, 1); DELETE FROM item WHERE id = 501")
        rig.hurry()
        rig.until_state(backfill)
        rig.until_delivered()
    assert set(rig.table()) == {f'item ["{i}"]' for i in range(901) if i != 501}


def test_the_rows_of_a_partition_that_is_detached_meanwhile_are_left_out(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_PARTED + ";" + _ATTACH)
    rig = Rig(database, tmp_path, publication=_VIA_ROOT)
    with rig.running():
        backfill = _begun(rig)
        database.execute("ALTER TABLE item DETACH PARTITION high")
        rig.hurry()
        rig.until_state(backfill)
        rig.until_delivered()
    assert set(rig.table()) == {f'item ["{i}"]' for i in range(500)}


def test_row_level_security_is_refused_and_a_retry_goes_on(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    database.execute(
        "ALTER TABLE item ENABLE ROW LEVEL SECURITY; ALTER TABLE item FORCE ROW LEVEL SECURITY;"
        "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'limited') THEN"
        " CREATE ROLE limited LOGIN PASSWORD 'limited'; END IF; END $$;"
        "GRANT SELECT ON item TO limited"
    )
    rig = Rig(database, tmp_path)
    rig.read_as = psycopg.conninfo.make_conninfo(database.dsn, user="limited", password="limited")
    with rig.running():
        backfill = rig.start("item")
        rig.until_state(backfill, "failed")
        assert "row-level security" in str(rig.progress(backfill)[2])
        database.execute("ALTER TABLE item DISABLE ROW LEVEL SECURITY")
        rig.rows(f"SELECT walbrook.retry_backfill({backfill})")
        rig.until_state(backfill)
    assert len(rig.table()) == 400


def test_a_chunk_whose_changes_cannot_be_looked_at_is_not_read_for_ever(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_far(*_given: object) -> NoReturn:
        raise log_scan.TooFarError("the log is too long", fix="the chunk is read again")

    monkeypatch.setattr(log_scan.NewerScan, "up_to", too_far)
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = rig.start("item")
        rig.until_state(backfill, "failed")
    assert "a chunk was read 10 times" in str(rig.progress(backfill)[2])
    assert rig.rows("SELECT attempts FROM walbrook.backfill_chunks") == [(10,)]


def test_a_backfill_goes_on_behind_more_changes_than_one_chunk_may_have_behind_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is read again; what lies between two pieces of the table is searched all the same."""
    bounded = partial(log_scan.changes_between, bytes_max=50_000)
    monkeypatch.setattr(log_scan, "changes_between", bounded)
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = _begun(rig)
        rig.rows(f"SELECT walbrook.pause_backfill({backfill})")
        database.execute("INSERT INTO other SELECT i, 1 FROM generate_series(2, 5000) AS i")
        rig.until_delivered()
        rig.hurry()
        rig.rows(f"SELECT walbrook.resume_backfill({backfill})")
        rig.until_state(backfill)
    assert len(rig.table()) == 400 + 4999


def test_a_chunk_whose_file_is_damaged_is_read_again(database: Database, tmp_path: Path) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = _begun(rig)
    files = [*(tmp_path / "log" / "backfill" / "files").glob("*.arrow")]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    rig.hurry()
    with rig.running():
        rig.until_state(backfill)
        database.execute("UPDATE other SET version = 2")
        rig.until_delivered()
    assert len(rig.table()) == 401


def test_a_chunk_that_takes_too_long_is_read_in_halves(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(_ITEMS)
    read: list[BlockRange] = []

    def read_two_blocks_at_most(task: ChunkTask) -> ChunkRead:
        blocks = task.choice.range
        assert isinstance(blocks, BlockRange)
        if (blocks.end is None and blocks.first == 0) or (blocks.end or 0) - blocks.first > 2:
            raise TransientError("it took too long", fix="smaller parts", kind="chunk_timeout")
        read.append(blocks)
        return read_chunk(task)

    monkeypatch.setattr(runner, "read_chunk", read_two_blocks_at_most)
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("item")
    assert len(read) > 2
    assert len(rig.messages()) == len(rig.table()) == 400
    assert rig.rows("SELECT sum(attempts) FROM walbrook.backfill_chunks") == [(0,)]


def test_an_operator_pauses_resumes_and_cancels(database: Database, tmp_path: Path) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = _begun(rig)
        rig.rows(f"SELECT walbrook.pause_backfill({backfill})")
        database.execute("UPDATE other SET version = 2")
        rig.until_delivered()  # changes go on
        held = len(rig.messages())
        database.execute("UPDATE other SET version = 3")
        rig.until_delivered()
        assert len(rig.messages()) == held + 1
        rig.rows(f"SELECT walbrook.resume_backfill({backfill})")
        until("more rows", lambda: len(rig.messages()) > held + 1)
        with pytest.raises(psycopg.Error, match="under way"):
            rig.start("item")
        rig.rows(f"SELECT walbrook.cancel_backfill({backfill})")
        with pytest.raises(psycopg.Error, match="cancelled"):
            rig.rows(f"SELECT walbrook.resume_backfill({backfill})")
        rig.backfilled("item")  # and begins anew
    assert len(rig.table()) == 401


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sort_column": "id", "start_position": "not a number"}, "start_position"),
        ({"sort_column": "doc"}, "sort_column"),
    ],
    ids=["value", "order"],
)
def test_a_table_that_cannot_be_planned_fails_alone(
    database: Database, tmp_path: Path, options: dict[str, str], said: str
) -> None:
    database.execute(_ITEMS + "; ALTER TABLE item ADD doc json")
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = rig.start("item", **options)
        rig.backfilled("other")
        rig.until_state(backfill, "failed")
    assert said in rig.progress(backfill)[2]
    assert "not a number" not in rig.progress(backfill)[2]
    assert set(rig.table()) == {'other ["1"]'}


def test_a_new_place_gets_the_rows_that_went_to_the_one_before(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    rewind = "walbrook.rewind('files', to_earliest => true, destination => 'truncate')"
    with rig.running():
        rig.rows("UPDATE walbrook.consumers SET rewind_ways = '{truncate}' RETURNING 1")
        backfill = _begun(rig)
        rig.rows(f"SELECT {rewind}")
        rig.rows("UPDATE walbrook.backfills SET rows_per_second = NULL RETURNING 1")
        rig.until_state(backfill)
        rig.until_delivered()
        assert set(rig.table()) == {f'item ["{i}"]' for i in range(1, 401)}
        warned: list[str] = []
        with psycopg.connect(rig.state_dsn, autocommit=True) as state:
            state.add_notice_handler(lambda said: warned.append(str(said.message_primary)))
            state.execute(f"SELECT {rewind}".encode())
        assert len(warned) == 1
        assert warned[0].endswith("do not come again: public.item")


def test_a_table_that_cannot_be_backfilled_says_why(database: Database, tmp_path: Path) -> None:
    database.execute(_ITEMS + "; CREATE SCHEMA hidden; CREATE TABLE hidden.item (id int)")
    rig = Rig(database, tmp_path)
    with rig.running():
        for table, said in (("hidden.item", "publication"), ("nothing", "there is no table")):
            backfill = rig.start(table)
            rig.until_state(backfill, "failed")
            assert said in str(rig.progress(backfill)[2])
        backfill = rig.start("item", where_sql="no_such_column > 1")
        rig.until_state(backfill, "failed")
        assert "cannot be read" in str(rig.progress(backfill)[2])
        rig.rows(f"SELECT walbrook.cancel_backfill({backfill})")
        backfill = rig.start("item", sort_column="nothing")
        rig.until_state(backfill, "failed")
        assert "no published column nothing" in str(rig.progress(backfill)[2])
    for wrong in ("start_backfill('nobody', 'item')", "start_backfill('files', 'a.b.c')",
                  "start_backfill('files', 'other', start_position => '1')",
                  "pause_backfill(99)"):  # fmt: skip
        with pytest.raises(psycopg.Error):
            rig.rows(f"SELECT walbrook.{wrong}")


def test_writers_and_restarts_leave_the_destination_equal_to_the_source(
    database: Database, tmp_path: Path
) -> None:
    """Rows are inserted, updated, moved, deleted and rolled back; the worker begins anew."""
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, pad text, body text);"
        "ALTER TABLE item ALTER body SET STORAGE EXTERNAL;"
        "CREATE SEQUENCE versions START 2;"
        "INSERT INTO item SELECT i, 1, repeat('p', 100), repeat('b' || i, 800)"
        " FROM generate_series(1, 6000) AS i"
    )
    rig = Rig(database, tmp_path)
    over = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with database.connect() as connection:
            while not over.is_set():
                key = chance.randrange(seed, 7000, 2)  # each writer has rows of its own
                act = chance.choice(_ACTS)
                try:
                    with connection.transaction(force_rollback=chance.random() < 0.1):
                        connection.execute(act.encode(), {"id": key, "to": key + 2})
                except psycopg.errors.UniqueViolation:
                    continue

    writers = [threading.Thread(target=write, args=(seed,)) for seed in (0, 1)]
    with rig.source.reading():
        try:
            with rig.serving():
                backfill = rig.start("item", chunk_bytes=65536, rows_per_second=3000)
                for thread in writers:
                    thread.start()
                until("some rows", rig.messages)
            for _ in range(2):
                before = len(rig.messages())
                with rig.serving():
                    until("more rows", lambda: len(rig.messages()) > before + 200)  # noqa: B023
            with rig.serving():
                rig.until_state(backfill, timeout_s=120)
        finally:
            over.set()
        for thread in writers:
            thread.join()
        with rig.serving():
            rig.until_delivered()
    messages = rig.messages()
    cursors = [(m["metadata"]["commit_lsn"], m["metadata"]["commit_idx"]) for m in messages]
    assert cursors == sorted(set(cursors)), "a message came twice, or out of order"
    assert stale(messages) == []
    with database.connect() as connection:
        rows = connection.execute("SELECT id, version, pad, body FROM item").fetchall()
    expected = {
        f'item ["{key}"]': {"id": key, "version": version, "pad": pad, "body": body}
        for key, version, pad, body in rows
    }
    assert rig.table() == expected


_ACTS = (
    "INSERT INTO item VALUES (%(id)s, nextval('versions'), 'new', 'short')",
    "UPDATE item SET version = nextval('versions') WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), pad = pad || 'u' WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), body = repeat('z', 3000) WHERE id = %(id)s",
    "UPDATE item SET version = nextval('versions'), id = %(to)s WHERE id = %(id)s",
    "DELETE FROM item WHERE id = %(id)s",
)


@pytest.mark.sinks
def test_changes_that_were_delivered_and_not_settled_hide_no_rows(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destination that knows its last message takes whatever stands below it for a repeat."""
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    read = "SELECT count(*) > 0 FROM walbrook.backfill_chunks WHERE state = 'read'"
    with rig.source.reading():
        with rig.serving():
            backfill = rig.start("item", chunk_bytes=8192, rows_per_second=10, connections=4)
            until(
                "some rows, and chunks that wait", lambda: rig.messages() and rig.rows(read)[0][0]
            )
            monkeypatch.setattr(Settler, "report", lambda *_given, **_named: None)
            database.execute("UPDATE other SET version = 2")
            until(
                "the update",
                lambda: [each for each in rig.messages() if each["action"] == "update"],
            )
        monkeypatch.undo()
        with monkeypatch.context() as slow, rig.serving():
            steps: list[float] = []

            def nothing(_worker: Worker, wait_s: float) -> bool:
                steps.append(wait_s)
                time.sleep(wait_s / 10)
                return False

            # The worker of the next process takes no changes for a while.
            slow.setattr(Worker, "serve_next", nothing)
            until("some steps", lambda: len(steps) > 10)
            slow.undo()
            rig.hurry()
            rig.until_state(backfill)
            rig.until_delivered()
    assert len(rig.table()) == 401
