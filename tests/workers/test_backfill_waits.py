"""What a backfill waits for is bounded, and is said with a word that code can compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_pipeline.backfill import runner
from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.waiting import until

pytestmark = pytest.mark.migrated


def test_transactions_from_before_are_waited_for_within_a_bound(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(
        "CREATE TABLE other (id int); CREATE TABLE item (id int PRIMARY KEY);"
        "INSERT INTO item SELECT generate_series(1, 10)"
    )
    rig = Rig(database, tmp_path)
    with database.connect() as early, rig.running():
        early.execute("BEGIN; INSERT INTO other VALUES (1)")
        ((xid,),) = early.execute("SELECT pg_current_xact_id()::text").fetchall()
        number = rig.start("item")
        named = f"SELECT waits_for, reason FROM walbrook.backfills WHERE id = {number}"
        until("the reason", lambda: rig.rows(named)[0][0])
        kind, reason = rig.rows(named)[0]
        assert kind == "open_transactions"
        assert str(xid) in reason
        monkeypatch.setattr(runner, "OPEN_WAIT_S", 0.5)
        until("the end of patience", lambda: rig.progress(number)[0] == "failed")
        _, reason, error = rig.progress(number)
        assert reason is None
        assert str(xid) in error
        assert "retry the backfill" in error
        early.execute("COMMIT")
        rig.rows(f"SELECT walbrook.retry_backfill({number})")
        rig.until_state(number)
    read = [m["record"]["id"] for m in rig.messages() if m["action"] == "read"]
    assert sorted(read) == list(range(1, 11))
    assert rig.rows("SELECT waits_for, waits_since FROM walbrook.backfills") == [(None, None)]


def test_an_idle_source_holds_no_backfill_up(database: Database, tmp_path: Path) -> None:
    """Rows are delivered behind the position they were read at, which no change may ever pass."""
    database.execute(
        "CREATE TABLE other (id int); CREATE TABLE item (id int PRIMARY KEY, pad text);"
        "INSERT INTO item SELECT i, repeat('x', 500) FROM generate_series(1, 500) AS i"
    )
    rig = Rig(database, tmp_path)
    with rig.source.reading(idle_s=3600, heartbeat_s=0), rig.serving():
        number = rig.start("item", chunk_bytes=8192, rows_per_second=500)
        until("some rows", rig.messages)
        database.execute("INSERT INTO other VALUES (1)")  # after it there are none
        rig.until_state(number)
    assert len([m for m in rig.messages() if m["action"] == "read"]) == 500
