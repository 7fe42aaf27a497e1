"""Repair of a source whose slot is lost: what changed meanwhile arrives, and it is said how.

Real Postgres, a real slot and reader, a worker with its sink. Nothing here runs Spark.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from cdc.connection import connect
from cdc.errors import OperatorError, SourceError, TransientError
from cdc.service.cli.repairs import _show, _watch
from cdc.state.repairs import repairs
from tests.backfill_rig import SOURCE, Rig
from tests.fix_postgres import Database, embedded, fresh_database
from tests.repairing import drop_slot, note_horizon, repaired, until_repaired
from tests.slot_source import PUBLISHED
from tests.waiting import until

pytestmark = pytest.mark.migrated

ROWS = 200


@pytest.fixture
def rig(database: Database, tmp_path: Path) -> Rig:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL);"
        "CREATE TABLE quiet (id int PRIMARY KEY, version int NOT NULL)"
    )
    return Rig(database, tmp_path)


def lose_slot(rig: Rig) -> None:
    """Rows are delivered, the slot goes, and more is written without it."""
    with rig.running():
        rig.database.execute(
            f"INSERT INTO item SELECT i, 1 FROM generate_series(1, {ROWS}) AS i;"
            f"INSERT INTO quiet SELECT i, 1 FROM generate_series(1, {ROWS}) AS i"
        )
        rig.until_delivered()
    note_horizon(rig)
    drop_slot(rig)
    rig.database.execute(
        "INSERT INTO item VALUES (1001, 2); UPDATE item SET version = 3 WHERE id = 7;"
        "UPDATE item SET id = 1002, version = 4 WHERE id = 8; DELETE FROM item WHERE id = 9"
    )


def test_rows_that_changed_without_a_slot_are_read_and_no_others(rig: Rig) -> None:
    lose_slot(rig)
    begun = repaired(rig, "skip")
    assert begun.found == "slot_missing"
    with rig.running():
        done = until_repaired(rig)
        rig.database.execute("UPDATE item SET version = 5 WHERE id = 10")
        rig.until_delivered()
    assert done == {
        "state": "done", "rows": 3, "deleted": 0, "tables_whole": 0, "found": "slot_missing",
    }  # fmt: skip
    late = rig.messages()[2 * ROWS :]
    assert late[0]["action"] == "gap"
    assert late[0]["record"]["reason"] == "repaired"
    assert late[0]["record"]["bridged"] == {
        "repair": begun.id,
        "tables": [
            {
                "table": f"public.{table}", "rows": "xmin", "deletes": "not found",
                "why_not_found": "a destination of the type file cannot be read back",
            }
            for table in ("item", "quiet")
        ],
    }  # fmt: skip
    got = {(m["action"], m["record"]["id"], m["record"]["version"]) for m in late[1:]}
    assert got == {("read", 1001, 2), ("read", 7, 3), ("read", 1002, 4), ("update", 10, 5)}
    ((start, end, repair),) = rig.rows("SELECT from_lsn, to_lsn, repair FROM walbrook.gaps")
    assert (repair, end > start) == (begun.id, True)


@pytest.mark.parametrize("found", ["publication_replaced", "slot_missing"])
def test_after_a_replaced_publication_whole_tables_are_read(rig: Rig, found: str) -> None:
    with rig.running():
        rig.database.execute("INSERT INTO item VALUES (1, 1)")
        rig.until_delivered()
    rig.database.execute("DROP PUBLICATION pub")
    rig.database.execute("INSERT INTO item VALUES (2, 1)")
    rig.database.execute(f"CREATE PUBLICATION pub {PUBLISHED}")
    if found == "slot_missing":
        drop_slot(rig)
    # As a stream that goes on without its publication (Postgres 18) leaves it.
    rig.rows(
        "WITH moved AS (UPDATE walbrook.consumers SET cursor_lsn = pg_current_wal_lsn() "
        "WHERE name = 'files' RETURNING source, cursor_lsn) "
        "INSERT INTO walbrook.horizons (source, lsn, xid) "
        "SELECT source, cursor_lsn, pg_snapshot_xmin(pg_current_snapshot())::text::int8 "
        "FROM moved RETURNING 1"
    )
    assert repaired(rig, "skip").found == found
    with rig.running():
        done = until_repaired(rig)
    assert (done["rows"], done["tables_whole"]) == (2, 2)
    assert [*rig.table()] == ['item ["1"]', 'item ["2"]']
    whys = rig.rows("SELECT DISTINCT whole_reason FROM walbrook.repaired_tables")
    assert "the publication was replaced" in whys[0][0]


def test_deletes_that_cannot_be_found_refuse_a_repair_before_anything_changes(rig: Rig) -> None:
    lose_slot(rig)
    before = rig.rows("SELECT cursor_lsn FROM walbrook.consumers")
    with pytest.raises(
        OperatorError, match=r"of public\.item, public\.quiet for consumer files: "
    ) as refused:
        repaired(rig)
    assert "--deletes=skip" in refused.value.fix
    assert rig.rows("SELECT cursor_lsn FROM walbrook.consumers") == before
    slot = rig.source.settings.slot
    assert rig.rows(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{slot}'") == []


def test_rows_that_only_all_columns_identify_refuse_a_repair(rig: Rig) -> None:
    rig.database.execute(
        "CREATE TABLE keyless (a int, b int); ALTER TABLE keyless REPLICA IDENTITY FULL"
    )
    rig.sink["destination"] = {
        "type": "parquet",
        "columns": "json",
        "max_delay_ms": 0,
        "path": str(rig.directory / "rows"),
    }
    drop_slot(rig)
    with pytest.raises(OperatorError, match=r"public\.keyless .*: the table has no key") as refused:
        repaired(rig)
    assert refused.value.kind == "deletes_unknown"
    assert rig.rows("SELECT 1 FROM walbrook.repairs") == []


def test_a_sink_that_the_configuration_lacks_gets_a_gap_that_says_why_it_has_no_rows(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    drop_slot(rig)
    rig.sink["status"] = "disabled"
    begun = repaired(rig)
    why = "no active sink of this name is in the configuration"
    bridged = rig.rows("SELECT bridged FROM walbrook.gaps WHERE consumer = 'files'")
    assert bridged == [({"repair": begun.id, "tables": [], "why_none": why},)]
    with connect(rig.state_dsn, name="test") as state:
        _show(state, repairs(state)[0])
    assert f"consumer files gets its gap and no rows: {why}" in capsys.readouterr().out


def test_the_wait_for_a_repair_is_bounded(rig: Rig) -> None:
    drop_slot(rig)
    repaired(rig, "skip")  # and nothing serves it
    with (
        connect(rig.state_dsn, name="test") as state,
        pytest.raises(OperatorError, match="longer than the timeout") as ended,
    ):
        _watch(state, SOURCE, 0.1)
    assert ended.value.kind == "timeout"


def test_a_source_that_has_lost_nothing_keeps_its_slot(rig: Rig) -> None:
    with rig.running():
        rig.until_delivered()
        with pytest.raises(TransientError, match="another service reads slot"):
            repaired(rig, "skip")
    before = rig.source.confirmed_lsn()
    with pytest.raises(OperatorError, match="has lost nothing") as refused:
        repaired(rig, "skip")
    assert refused.value.kind == "nothing_lost"
    assert rig.source.confirmed_lsn() == before


def test_a_reader_without_its_slot_names_the_repair(rig: Rig) -> None:
    lose_slot(rig)
    failed = "SELECT count(*) > 0 FROM walbrook.health WHERE kind = 'slot_missing'"
    with pytest.raises(SourceError) as stopped, rig.source.reading():
        until("the reader to stop", lambda: rig.rows(failed)[0][0])
    assert stopped.value.kind == "slot_missing"
    assert "walbrook repair shop" in stopped.value.fix


def test_a_slot_that_the_server_invalidated_is_replaced(tmp_path: Path) -> None:
    settings = {"max_slot_wal_keep_size": "32MB", "wal_keep_size": "0", "min_wal_size": "32MB"}
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-test-tight-") as directory,
        embedded(Path(directory), fast=True, settings=settings) as server,
        fresh_database(server.dsn) as database,
    ):
        database.execute("CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL)")
        rig = Rig(database, tmp_path)
        note_horizon(rig)
        database.execute("INSERT INTO item VALUES (1, 1)")

        def lost() -> bool:
            database.execute("SELECT pg_logical_emit_message(false, 'filler', 'x')")
            database.execute("SELECT pg_switch_wal()")
            database.execute("CHECKPOINT")
            ((status,),) = database.execute("SELECT wal_status FROM pg_replication_slots")
            return bool(status == "lost")

        until("the slot to be lost", lost)
        begun = repaired(rig, "skip")
        with rig.running():
            done = until_repaired(rig)
        assert (begun.found, done["rows"], done["tables_whole"]) == ("slot_lost", 1, 0)
        assert rig.table() == {'item ["1"]': {"id": 1, "version": 1}}
