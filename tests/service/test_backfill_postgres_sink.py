"""Backfill into the postgres sink: a mirror equals its source, and histories have each row once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import _url

pytestmark = [pytest.mark.migrated, pytest.mark.usefixtures("no_open_sinks")]

ROWS = 5_000


def backfilled(database: Database, there: Database, directory: Path, mode: str) -> None:
    """Existing rows are delivered in two starts, with changes before, between and after."""
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, body text);"
        "ALTER TABLE item ALTER body SET STORAGE EXTERNAL;"
        f"INSERT INTO item SELECT i, 1, repeat('b' || i, 700) FROM generate_series(1, {ROWS}) AS i"
    )
    destination = {"type": "postgres", "url": _url(there.dsn), "mode": mode}
    rig = Rig(database, directory, sink={"destination": destination})
    with rig.running():
        database.execute("UPDATE item SET version = 2 WHERE id % 10 = 0")
        number = rig.start("item", chunk_bytes=1 << 20)
        database.execute("UPDATE item SET version = 3 WHERE id % 20 = 0")
    with rig.running():
        rig.until_state(number)
        database.execute("UPDATE item SET version = 4 WHERE id = 7")
        rig.until_delivered()


def test_a_mirror_equals_its_source(database: Database, there: Database, tmp_path: Path) -> None:
    backfilled(database, there, tmp_path, "mirror")
    query = "SELECT id, version, body FROM item ORDER BY id"
    assert there.execute(query) == database.execute(query)


def test_rows_that_the_target_has_already_are_replaced(
    database: Database, there: Database, tmp_path: Path
) -> None:
    there.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, body text);"
        "INSERT INTO item SELECT i, 0, 'old' FROM generate_series(50, 3000, 7) AS i"
    )
    backfilled(database, there, tmp_path, "mirror")
    query = "SELECT id, version, body FROM item ORDER BY id"
    assert there.execute(query) == database.execute(query)


@pytest.mark.parametrize("mode", ["append", "events"])
def test_a_history_ends_with_the_rows_of_its_source(
    mode: str, database: Database, there: Database, tmp_path: Path
) -> None:
    backfilled(database, there, tmp_path, mode)
    if mode == "append":
        said = (
            "SELECT id, version, walbrook_action AS act, walbrook_lsn AS lsn, walbrook_idx AS idx"
            " FROM item"
        )
    else:
        said = (
            "SELECT (record->>'id')::int AS id, (record->>'version')::int AS version,"
            " action AS act, commit_lsn AS lsn, commit_idx AS idx FROM walbrook_events"
        )
    last = f"SELECT DISTINCT ON (id) id, version FROM ({said}) s ORDER BY id, lsn DESC, idx DESC"
    assert there.execute(last) == database.execute("SELECT id, version FROM item ORDER BY id")
    twice = f"SELECT id FROM ({said}) s WHERE act = 'read' GROUP BY id HAVING count(*) > 1"
    assert there.execute(twice) == []
    back = (
        f"SELECT id FROM (SELECT id, version, lag(version) OVER (PARTITION BY id ORDER BY lsn, idx)"
        f" AS before FROM ({said}) s) t WHERE version < before"
    )
    assert there.execute(back) == []


def test_read_events_stay_when_a_rewind_replaces_what_comes_again(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int);"
        "INSERT INTO item SELECT i, 1 FROM generate_series(1, 100) i"
    )
    url, how = _url(there.dsn), {"mode": "events", "on_rewind": "replace"}
    given = {"destination": {"type": "postgres", "url": url, **how}}
    rig = Rig(database, tmp_path, publication="FOR TABLE item", sink=given)
    with rig.running():
        database.execute("UPDATE item SET version = 2 WHERE id = 1")
        rig.until_delivered()
        rig.backfilled("item")
        rig.until_delivered()
        rig.rows("SELECT walbrook.rewind('files', to_earliest => true)")
        database.execute("UPDATE item SET version = 3 WHERE id = 1")
        rig.until_delivered()
    counted = "SELECT action, count(*) FROM walbrook_events GROUP BY 1 ORDER BY 1"
    assert there.execute(counted) == [("read", 100), ("update", 2)]


def test_a_chunk_whose_table_the_mirror_cannot_have_is_read_again_when_it_can(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (n int); INSERT INTO item SELECT generate_series(1, 9)")
    destination = {"type": "postgres", "url": _url(there.dsn), "mode": "mirror"}
    rig = Rig(database, tmp_path, sink={"destination": destination})
    with rig.running():
        number = rig.start("item")
        until("the refusal", lambda: "has no key" in (rig.progress(number)[1] or ""))
        database.execute("ALTER TABLE item REPLICA IDENTITY FULL")
        rig.until_state(number)
    assert there.execute("SELECT n FROM item ORDER BY n") == [(n,) for n in range(1, 10)]
