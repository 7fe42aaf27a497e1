"""Rows that are read from a standby, beside transactions that are open on its primary.

In recovery ``pg_current_snapshot()`` lists no open transaction, and yet sees nothing that they
wrote.
"""

from __future__ import annotations

from pathlib import Path

import psycopg

from tests.backfill_rig import stale
from tests.fix_postgres import Database
from tests.service.test_backfill_elsewhere import StandbyRig, pair
from tests.standby import Pair, execute
from tests.waiting import until

__all__ = ["pair"]


def test_a_change_that_was_open_when_a_standby_was_read_is_newer_than_the_row(
    pair: Pair, database: Database, tmp_path: Path
) -> None:
    execute(
        pair.primary.dsn,
        "ALTER TABLE item ADD version int NOT NULL DEFAULT 1, ADD body text;"
        "ALTER TABLE item ALTER body SET STORAGE EXTERNAL;"
        "INSERT INTO item SELECT i, 1, repeat('b' || i, 1000) FROM generate_series(1, 20) AS i",
    )
    rig = StandbyRig(database, tmp_path, pair=pair)
    with rig.running(), psycopg.connect(pair.primary.dsn) as writer:
        writer.execute("DELETE FROM item WHERE id = 15")
        writer.execute("UPDATE item SET version = 2 WHERE id = 16")
        execute(pair.primary.dsn, "INSERT INTO item VALUES (21)")  # a later number has ended
        pair.until_replayed()
        number = rig.start("item", rows_per_second=5)
        until("some rows", lambda: [m for m in rig.messages() if m["action"] == "read"])
        writer.commit()
        until("the delete", lambda: [m for m in rig.messages() if m["action"] == "delete"])
        rig.hurry()
        rig.until_state(number)
    rows = {row["id"]: row for row in rig.table().values()}
    assert set(rows) == {*range(1, 22)} - {15}
    assert (rows[16]["version"], rows[16]["body"]) == (2, "b16" * 1000)
    assert stale(rig.messages()) == []
