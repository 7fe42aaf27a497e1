"""What only Parquet files have behind a worker: a rewind that empties them, and JSON columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.connection import Connection
from tests.integration.test_queue import insert
from tests.lakes import Lake
from tests.sink_lane import deliver, lane_to

pytestmark = pytest.mark.migrated


def test_a_rewind_that_truncates_fills_the_tables_again(
    lane_state: Connection, tmp_path: Path
) -> None:
    lake = Lake.of(tmp_path / "lake", "parquet append")
    lane = lane_to(lane_state, tmp_path, lake.settings())
    deliver(lane, 1, 2, 3)
    lane_state.execute(
        "SELECT walbrook.rewind('out', to_earliest => true, destination => 'truncate')"
    )
    lane.start()
    lane.take()
    deliver(lane, 4)
    ids = "SELECT id FROM item ORDER BY walbrook_lsn"
    assert lake.rows(ids, "item") == [(1,), (2,), (3,), (4,)]
    lane.start()  # as after a crash
    deliver(lane, 5)
    assert lake.rows(ids, "item")[-1] == (5,)
    lane.close()


def test_a_worker_waits_for_more_and_writes_one_file_with_json_when_it_drains(
    lane_state: Connection, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    to = {"type": "parquet", "path": str(lake), "columns": "json", "max_delay_ms": 3_600_000}
    lane = lane_to(lane_state, tmp_path, to)
    worker = lane.workers["out"]
    for number in (1, 2, 3):
        lane.write(*insert(number, (number, "row")))
        assert not worker.serve_next(0.0)
    assert list(lake.rglob("*.parquet")) == []
    worker.drain(by_operator=True)
    lane.take()
    (place,) = lake.glob("table=public.item")
    assert len(list(place.rglob("*.parquet"))) == 1
    lane.close()
