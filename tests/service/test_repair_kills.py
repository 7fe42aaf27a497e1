"""A repair that is killed on the way is begun again with the same command, or goes on by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.backfill_rig import SOURCE, Rig
from tests.fix_postgres import Database
from tests.repairing import drop_slot, note_horizon, repaired, until_repaired
from tests.waiting import until
from tests.walbrook_service import ROOT, _url

pytestmark = pytest.mark.migrated

ROWS = 20_000


@pytest.fixture
def rig(database: Database, tmp_path: Path) -> Rig:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, pad text);"
        f"INSERT INTO item SELECT i, 1, repeat('p', 200) FROM generate_series(1, {ROWS}) AS i"
    )
    return Rig(database, tmp_path)


def command(rig: Rig, *arguments: str, killed_at: str = "") -> subprocess.CompletedProcess[str]:
    """``walbrook repair`` as a process, which may die at a failpoint."""
    path = rig.directory / "walbrook.yaml"
    configuration = {
        "databases": [
            {
                "name": SOURCE, "url": _url(rig.database.dsn),
                "slot": {"name": rig.source.settings.slot}, "publication": {"name": "pub"},
            }
        ],
        "sinks": [
            {
                "name": "files", "database": SOURCE,
                "destination": {"type": "file", "path": str(rig.directory / "files")},
            }
        ],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(configuration))
    return subprocess.run(
        [sys.executable, "-m", "cdc.service.cli.entry",
         "repair", SOURCE, *arguments, "-c", str(path)],
        capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "WALBROOK_FAILPOINT": killed_at},
    )  # fmt: skip


def first(rig: Rig, query: str) -> object:
    """The first value of the first row."""
    return rig.rows(query)[0][0]


def lose_slot(rig: Rig) -> None:
    note_horizon(rig)
    drop_slot(rig)
    rig.database.execute("UPDATE item SET version = 2 WHERE id <= 12000")


def test_a_command_that_dies_between_its_steps_is_given_again(rig: Rig) -> None:
    lose_slot(rig)
    before = rig.rows("SELECT cursor_lsn, cursor_idx FROM walbrook.consumers WHERE name = 'files'")
    refused = command(rig)
    assert (refused.returncode, "--deletes=skip" in refused.stderr) == (1, True)
    for step in ("slot_dropped", "slot_made", "slot_dropped"):
        died = command(rig, "--deletes=skip", killed_at=step)
        assert died.returncode == -signal.SIGKILL, died.stderr
        now = rig.rows("SELECT cursor_lsn, cursor_idx FROM walbrook.consumers WHERE name = 'files'")
        assert now == before
        assert rig.rows("SELECT count(*) FROM walbrook.repairs") == [(0,)]
    rig.database.execute("UPDATE item SET version = 3 WHERE id = 15000")
    begun = command(rig, "--deletes=skip")
    assert begun.returncode == 0, begun.stderr
    assert "repair 1 of shop (slot_missing) has begun" in begun.stdout
    with rig.running():
        done = until_repaired(rig)
    assert (done["rows"], done["tables_whole"]) == (12_001, 0)
    assert rig.table()['item ["15000"]']["version"] == 3
    shown = command(rig, "--status")
    assert "repair 1 is done: 1 of 1 tables, 12,001 rows, 0 deletes" in shown.stdout
    again = command(rig, "--deletes=skip")
    assert (again.returncode, "has lost nothing" in again.stderr) == (1, True)


def test_a_service_that_ends_in_the_middle_goes_on_where_it_was(rig: Rig) -> None:
    """The end of a worker forgets what was not settled, as the end of its process does."""
    lose_slot(rig)
    repaired(rig, "skip")
    rig.database.execute(
        "UPDATE walbrook.backfills SET chunk_bytes = 262144, rows_per_second = 5000"
    )
    for least in (1, 4_000, 8_000):
        some = f"SELECT rows >= {least} FROM walbrook.repair_progress"
        with rig.running():
            until(f"{least} rows", partial(first, rig, some))
    rig.hurry()
    with rig.running():
        done = until_repaired(rig)
    assert done["rows"] == 12_000
    messages = rig.messages()
    cursors = [(m["metadata"]["commit_lsn"], m["metadata"]["commit_idx"]) for m in messages]
    assert cursors == sorted(set(cursors)), "a message came twice, or out of order"
    read = [m["record"]["id"] for m in messages if m["action"] == "read"]
    assert sorted(read) == list(range(1, 12_001))


def test_a_backfill_under_way_when_the_slot_is_lost_delivers_nothing_old(rig: Rig) -> None:
    """Chunks that were read before the gap are read again: the log has no changes of the gap."""
    with rig.running():
        number = rig.start("item", chunk_bytes=262_144, rows_per_second=5_000)
        some = "SELECT sum(rows_read) >= 6000 AND sum(rows) > 0 FROM walbrook.backfill_progress"
        until("some rows", partial(first, rig, some))
    note_horizon(rig)
    rig.rows(f"SELECT walbrook.pause_backfill({number})")
    drop_slot(rig)
    rig.database.execute("UPDATE item SET version = 2; DELETE FROM item WHERE id = 20000")
    repaired(rig, "skip")
    held = "SELECT count(*) FROM walbrook.backfill_chunks WHERE state IN ('read', 'delivering')"
    assert rig.rows(held) == [(0,)]
    rig.hurry()
    rig.rows(f"SELECT walbrook.resume_backfill({number})")
    with rig.running():
        assert until_repaired(rig)["tables_whole"] == 1
        rig.until_state(number)
    after = [m for m in rig.messages() if m["action"] in ("gap", "read")]
    at = next(place for place, m in enumerate(after) if m["action"] == "gap")
    assert {m["record"]["version"] for m in after[at + 1 :]} == {2}
    versions = {row["version"] for key, row in rig.table().items() if key != 'item ["20000"]'}
    assert versions == {2}
