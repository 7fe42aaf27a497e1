"""Backfill into a lake: merged rows equal the source, and a history has each row once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backfill_rig import SOURCE, Rig
from tests.fix_postgres import Database
from tests.lakes import Lake

pytestmark = [pytest.mark.migrated, pytest.mark.usefixtures("closed_sinks")]

ROWS = 3_000
FURTHER = pytest.mark.sinks
_LAST = """
SELECT id, version FROM item
QUALIFY row_number() OVER (PARTITION BY id ORDER BY walbrook_lsn DESC, walbrook_idx DESC) = 1
ORDER BY id
"""
_BACK = """
SELECT id FROM (SELECT id, version, lag(version) OVER (
    PARTITION BY id ORDER BY walbrook_lsn, walbrook_idx) AS before FROM item) WHERE version < before
"""


@pytest.mark.parametrize(
    "name",
    [
        "delta copy_on_write", "parquet append", pytest.param("delta append", marks=FURTHER),
        pytest.param("iceberg append", marks=FURTHER),
        pytest.param("iceberg merge_on_read", marks=FURTHER),
        pytest.param("iceberg copy_on_write", marks=FURTHER),
    ],
)  # fmt: skip
def test_rows_that_were_there_and_changes_beside_them_end_in_one_table(
    name: str, database: Database, tmp_path: Path
) -> None:
    lake = Lake.of(tmp_path / "lake", name, f"{SOURCE}/files")
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, body text);"
        "ALTER TABLE item ALTER body SET STORAGE EXTERNAL;"
        f"INSERT INTO item SELECT i, 1, repeat('b' || i, 700) FROM generate_series(1, {ROWS}) AS i"
    )
    rig = Rig(database, tmp_path, sink={"destination": lake.settings(max_delay_ms=200)})
    with rig.running():
        database.execute("UPDATE item SET version = 2 WHERE id % 10 = 0")
        number = rig.start("item", chunk_bytes=1 << 20)
        database.execute("UPDATE item SET version = 3 WHERE id % 20 = 0")
    with rig.running():
        rig.until_state(number)
        database.execute("UPDATE item SET version = 4 WHERE id = 7")
        rig.until_delivered()
    if lake.is_merged:
        everything = "SELECT id, version, body FROM item ORDER BY id"
        assert lake.rows(everything, "item") == database.execute(everything)
        return
    here = database.execute("SELECT id, version FROM item ORDER BY id")
    assert lake.rows(_LAST, "item") == here
    twice = "SELECT id FROM item WHERE walbrook_action = 'read' GROUP BY id HAVING count(*) > 1"
    assert lake.rows(twice, "item") == []
    assert lake.rows(_BACK, "item") == []
