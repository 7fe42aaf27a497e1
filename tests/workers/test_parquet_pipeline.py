"""What only Parquet files have behind a worker: a rewind that empties them, and JSON columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.connection import Connection
from tests.lakes import Lake
from tests.queue_pipeline import insert
from tests.sink_pipeline import deliver, pipeline_to

pytestmark = pytest.mark.migrated


def test_a_rewind_that_truncates_fills_the_tables_again(
    pipeline_state: Connection, tmp_path: Path
) -> None:
    lake = Lake.of(tmp_path / "lake", "parquet append")
    pipeline = pipeline_to(pipeline_state, tmp_path, lake.settings())
    deliver(pipeline, 1, 2, 3)
    pipeline_state.execute(
        "SELECT walbrook.rewind('out', to_earliest => true, destination => 'truncate')"
    )
    pipeline.start()
    pipeline.take()
    deliver(pipeline, 4)
    ids = "SELECT id FROM item ORDER BY walbrook_lsn"
    assert lake.rows(ids, "item") == [(1,), (2,), (3,), (4,)]
    pipeline.start()  # as after a crash
    deliver(pipeline, 5)
    assert lake.rows(ids, "item")[-1] == (5,)
    pipeline.close()


def test_a_worker_waits_for_more_and_writes_one_file_with_json_when_it_drains(
    pipeline_state: Connection, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    to = {"type": "parquet", "path": str(lake), "columns": "json", "max_delay_ms": 3_600_000}
    pipeline = pipeline_to(pipeline_state, tmp_path, to)
    worker = pipeline.workers["out"]
    for number in (1, 2, 3):
        pipeline.write(*insert(number, (number, "row")))
        assert not worker.serve_next(0.0)
    assert list(lake.rglob("*.parquet")) == []
    worker.drain(by_operator=True)
    pipeline.take()
    (place,) = lake.glob("table=public.item")
    assert len(list(place.rglob("*.parquet"))) == 1
    pipeline.close()
