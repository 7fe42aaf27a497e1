"""Backfill into Delta tables: merged rows equal the source, and a history has each row once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_pipeline.delivery.deliver import _open_sinks
from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.lake import query

pytestmark = pytest.mark.migrated

ROWS = 3_000
_LAST = """
SELECT id, version FROM t
QUALIFY row_number() OVER (PARTITION BY id ORDER BY walbrook_lsn DESC, walbrook_idx DESC) = 1
ORDER BY id
"""
_BACK = """
SELECT id FROM (SELECT id, version, lag(version) OVER (
    PARTITION BY id ORDER BY walbrook_lsn, walbrook_idx) AS before FROM t) WHERE version < before
"""


@pytest.fixture(autouse=True)
def _no_open_sinks() -> Iterator[None]:
    yield
    while _open_sinks:
        _open_sinks.popitem()[1][2].close()


@pytest.mark.parametrize("mode", ["upsert", pytest.param("append", marks=pytest.mark.sinks)])
def test_rows_that_were_there_and_changes_beside_them_end_in_one_table(
    mode: str, database: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, body text);"
        "ALTER TABLE item ALTER body SET STORAGE EXTERNAL;"
        f"INSERT INTO item SELECT i, 1, repeat('b' || i, 700) FROM generate_series(1, {ROWS}) AS i"
    )
    destination = {
        "type": "delta",
        "path": str(tmp_path / "lake"),
        "mode": mode,
        "max_delay_ms": 200,
    }
    rig = Rig(database, tmp_path, sink={"destination": destination})
    with rig.running():
        database.execute("UPDATE item SET version = 2 WHERE id % 10 = 0")
        number = rig.start("item", chunk_bytes=1 << 20)
        database.execute("UPDATE item SET version = 3 WHERE id % 20 = 0")
    with rig.running():
        rig.until_state(number)
        database.execute("UPDATE item SET version = 4 WHERE id = 7")
        rig.until_delivered()
    place = tmp_path / "lake" / "public" / "item"
    if mode == "upsert":
        said = "SELECT id, version, body FROM {} ORDER BY id"
        assert query(said.format("t"), t=place) == database.execute(said.format("item"))
        return
    here = database.execute("SELECT id, version FROM item ORDER BY id")
    assert query(_LAST, t=place) == here
    twice = "SELECT id FROM t WHERE walbrook_action = 'read' GROUP BY id HAVING count(*) > 1"
    assert query(twice, t=place) == []
    assert query(_BACK, t=place) == []
