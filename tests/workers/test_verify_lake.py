"""Verify and repair on Delta and Iceberg tables: what differs is found and delivered again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sinks.lakehouse.names import LakeTarget
from tests.backfill_rig import SOURCE, Rig
from tests.fix_postgres import Database
from tests.lakes import LAKES, Lake
from tests.repairing import drop_slot, note_horizon, repaired, until_repaired

pytestmark = pytest.mark.usefixtures("closed_sinks")

COLUMNS = "id, version, note"
SETUP = (
    "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, note text, at timestamptz);"
    "INSERT INTO item SELECT i, 1, 'note ' || i, now() FROM generate_series(1, 1000) i"
)
_LAST = """
WITH changes AS (
  SELECT id, version, note, walbrook_lsn AS lsn, walbrook_idx AS idx,
         walbrook_action = 'delete' AS gone FROM item
   UNION ALL
  SELECT CAST(walbrook_old_key[3:-3] AS INT), NULL, NULL, walbrook_lsn, walbrook_idx, true
    FROM item WHERE walbrook_old_key IS NOT NULL),
ranked AS (
  SELECT *, row_number() OVER (PARTITION BY id ORDER BY lsn DESC, idx DESC) AS place FROM changes)
SELECT id, version, note FROM ranked WHERE place = 1 AND NOT gone
"""


def _there(lake: Lake) -> list[tuple[object, ...]]:
    """The rows as they are now; of a history what the last change of each key left."""
    now = f"SELECT {COLUMNS} FROM item" if lake.is_merged else _LAST
    return sorted(lake.rows(now, "item"), key=repr)


def _spoil(lake: Lake) -> None:
    """Two rows go, one has another value, and one is there that the source never had."""
    table = lake.tables()(LakeTarget("public", "item"))
    state = table.load()
    assert state is not None
    rows = pa.concat_tables([table.read(file) for file in table.files()])
    ids, at = rows.column("id"), rows.schema.get_field_index("id")
    extra = rows.filter(pc.equal(ids, 1)).set_column(
        at, rows.schema.field(at), pa.array([-5], pa.int32())
    )
    note = pc.if_else(pc.equal(ids, 12), "spoiled", rows.column("note"))
    at = rows.schema.get_field_index("note")
    stay = pc.invert(pc.is_in(ids, value_set=pa.array([7, 999], pa.int32())))
    rows = rows.set_column(at, rows.schema.field(at), note).filter(stay)
    written = table.write(pa.concat_tables([rows, extra]))
    table.replace(written, table.schema, state.moved(state.cursor))


@pytest.fixture(params=[name for name in LAKES if name != "iceberg copy_on_write"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", request.param, f"{SOURCE}/files")


@pytest.fixture
def rig(database: Database, tmp_path: Path, lake: Lake) -> Rig:
    database.execute(SETUP)
    return Rig(database, tmp_path, sink={"destination": lake.settings()})


def _here(database: Database) -> list[tuple[Any, ...]]:
    return sorted(database.execute(f"SELECT {COLUMNS} FROM item"), key=repr)


def test_rows_that_differ_are_found_by_key_and_exactly_these_are_delivered_again(
    database: Database, rig: Rig, lake: Lake
) -> None:
    with rig.running():
        rig.backfilled("item")
        database.execute(
            "UPDATE item SET note = NULL WHERE id % 3 = 0; DELETE FROM item WHERE id % 10 = 0;"
            "UPDATE item SET id = id + 10000 WHERE id % 11 = 0"
        )
        equal = rig.verified()
        rig.until_delivered()
        _spoil(lake)
        row = rig.verified(repair=True)
        again = rig.verified()
    assert (equal.missing, equal.extra, equal.different, equal.changing) == (0, 0, 0, 0)
    ((rows,),) = database.execute("SELECT count(*) FROM item")
    assert equal.source_rows == equal.destination_rows == rows
    assert (row.missing, row.extra, row.different, row.repaired) == (2, 1, 1, 4)
    ((delivered,),) = rig.rows(
        f"SELECT rows FROM walbrook.backfill_progress WHERE id = {row.backfill}"
    )
    assert delivered == 4
    assert (again.missing, again.extra, again.different) == (0, 0, 0)
    assert _there(lake) == _here(database)


def test_a_table_equals_the_source_after_the_repair_of_a_lost_slot(
    database: Database, rig: Rig, lake: Lake
) -> None:
    with rig.running():
        rig.backfilled("item")
        rig.until_delivered()
    note_horizon(rig)
    drop_slot(rig)
    database.execute(
        "DELETE FROM item WHERE id <= 50; UPDATE item SET id = id + 10000 WHERE id = 60;"
        "UPDATE item SET version = 2 WHERE id = 70; INSERT INTO item VALUES (5, 9, 'again')"
    )
    repaired(rig)
    with rig.running():
        done = until_repaired(rig)
        row = rig.verified()
    assert done["deleted"] == 50  # 49 of the first fifty, and the key that one row left
    assert (row.missing, row.extra, row.different) == (0, 0, 0)
    assert _there(lake) == _here(database)
