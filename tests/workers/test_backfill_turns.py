"""Several backfills of one consumer at once: they take turns, and changes go before all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_pipeline.backfill import pieces, runner
from spark_pipeline.stage import worker
from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.waiting import until

pytestmark = pytest.mark.migrated

_TABLES = """
CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL);
INSERT INTO item SELECT i, 1 FROM generate_series(1, {rows}) AS i;
CREATE TABLE other (id int PRIMARY KEY, version int NOT NULL);
INSERT INTO other SELECT i, 1 FROM generate_series(1, 300) AS i
"""


def _tables_in_order(rig: Rig) -> list[str]:
    """Of the messages that a backfill read."""
    return [m["metadata"]["table_name"] for m in rig.messages() if m["action"] == "read"]


def test_a_limit_on_the_rows_of_one_table_holds_no_other_up(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_TABLES.format(rows=1000))
    rig = Rig(database, tmp_path)
    with rig.running():
        limited = rig.start("item", rows_per_second=10)
        until("some rows", rig.messages)
        rig.backfilled("other")
        assert rig.progress(limited)[0] == "running"
        assert _tables_in_order(rig).count("item") < 1000
        rig.rows(f"SELECT walbrook.cancel_backfill({limited})")
        # The limit is kept: ten rows in each second that the backfill took.
        ((rows, most),) = rig.rows(
            "SELECT rows, 10 * (2 + extract(epoch FROM finished_at - started_at))"
            f" FROM walbrook.backfill_progress WHERE id = {limited}"
        )
        assert 0 < rows <= most


def test_a_small_table_does_not_wait_for_the_end_of_a_large_chunk(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_TABLES.format(rows=100_000))
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.pause()
        both = [rig.start("item"), rig.start("other")]
        read = "SELECT count(*) = 2 AND bool_and(state = 'read') FROM walbrook.backfill_chunks"
        until("both chunks to be read", lambda: rig.rows(read)[0][0])
        rig.rows("SELECT walbrook.resume('files')")
        for backfill in both:
            rig.until_state(backfill)
    order = _tables_in_order(rig)
    last_of_other = max(at for at, table in enumerate(order) if table == "other")
    assert last_of_other < len(order) - 1
    assert order[-1] == "item"


def test_the_chunks_that_wait_are_bounded_over_all_backfills(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [f"t{number}" for number in range(6)]
    for table in tables:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, pad text);"
            f"INSERT INTO {table} SELECT i, repeat('x', 300) FROM generate_series(1, 200) AS i"
        )
    monkeypatch.setattr(runner, "_CHUNKS_MAX", 4)
    monkeypatch.setattr(pieces, "_SILENT_S", 1.0)
    rig = Rig(database, tmp_path)
    held = "SELECT count(*) FROM walbrook.backfill_chunks WHERE state IN ('read', 'delivering')"
    with rig.running():
        rig.pause()
        together = " UNION ALL ".join(
            f"SELECT id FROM walbrook.start_backfill('files', '{table}', chunk_bytes => 8192, "
            "connections => 8)"
            for table in tables
        )
        started = [backfill for (backfill,) in rig.rows(together)]
        until("as many chunks as may wait", lambda: rig.rows(held) == [(4,)])
        each = "SELECT count(DISTINCT backfill) FROM walbrook.backfill_chunks WHERE state = 'read'"
        assert rig.rows(each)[0][0] > 1
        paused = "SELECT DISTINCT waits_for FROM walbrook.backfills WHERE state = 'running'"
        until("the reason", lambda: rig.rows(paused) == [("sink",)])
        rig.rows("SELECT walbrook.resume('files')")
        for backfill in started:
            rig.until_state(backfill)
    assert len(rig.table()) == 6 * 200


def test_no_row_is_delivered_while_the_sink_is_behind_with_changes(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(_TABLES.format(rows=1000))
    monkeypatch.setattr(pieces, "_HELD_UP_S", 0.5)
    rig = Rig(database, tmp_path)
    with rig.running():
        with monkeypatch.context() as lagging:
            lagging.setattr(worker, "fits", lambda *_given: False)
            backfill = rig.start("item")
            read = "SELECT count(*) FROM walbrook.backfill_chunks WHERE state = 'read'"
            until("the chunk to be read", lambda: rig.rows(read) == [(1,)])
            for version in (2, 3):
                database.execute(f"UPDATE other SET version = {version} WHERE id = 1")
                rig.until_delivered()
            assert _tables_in_order(rig) == []
            waits = f"SELECT waits_for FROM walbrook.backfill_progress WHERE id = {backfill}"
            until("the reason", lambda: rig.rows(waits) == [("changes",)])
        rig.until_state(backfill)
        assert rig.rows(waits) == [(None,)]
    assert _tables_in_order(rig) == ["item"] * 1000
