"""What a backfill waits for is bounded, and is said with a word that code can compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_pipeline.backfill import runner
from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.waiting import until


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
