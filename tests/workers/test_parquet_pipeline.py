"""Typed Parquet tables behind a worker: what waits, what a backfill brings, and rewinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.connection import Connection
from cdc.generation import Generation
from spark_pipeline.delivery.deliver import _open_sinks
from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.parquet_lake import ParquetLake
from tests.queue_pipeline import insert

ITEM = "public/item"
ROWS = 3_000


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


@pytest.fixture(autouse=True)
def _no_open_sinks() -> Iterator[None]:
    yield
    while _open_sinks:
        _open_sinks.popitem()[1][2].close()


def _pipeline(state: Connection, directory: Path, **destination: Any) -> LogPipeline:
    to = {"type": "parquet", "path": str(directory / "lake"), "max_delay_ms": 0, **destination}
    pipeline = LogPipeline(state, directory, out={"destination": to})
    state.execute("UPDATE walbrook.consumers SET destination = 'parquet'")
    return pipeline


def _deliver(pipeline: LogPipeline, *numbers: int) -> None:
    for number in numbers:
        pipeline.write(*insert(number, (number, f"row {number}")))
        pipeline.take()


@pytest.mark.parametrize("way", ["new_generation", "truncate"])
def test_a_rewind_refills_the_tables(way: str, state: Connection, tmp_path: Path) -> None:
    pipeline, lake = _pipeline(state, tmp_path), ParquetLake.on_disk(tmp_path / "lake")
    _deliver(pipeline, 1, 2, 3)
    state.execute("SELECT walbrook.rewind('out', to_earliest => true, destination => %s)", (way,))
    pipeline.start()
    pipeline.take()
    _deliver(pipeline, 4)
    place = Generation(2 if way == "new_generation" else 1)
    ids = "SELECT id FROM t ORDER BY walbrook_lsn"
    assert lake.query(ids, ITEM, place) == [(1,), (2,), (3,), (4,)]
    if way == "new_generation":
        assert lake.query(ids, ITEM) == [(1,), (2,), (3,)]
    pipeline.start()  # as after a crash
    _deliver(pipeline, 5)
    assert lake.query(ids, ITEM, place)[-1] == (5,)
    pipeline.close()


@pytest.mark.parametrize("columns", ["typed", "json"])
def test_a_worker_waits_for_more_and_writes_one_file_when_it_drains(
    columns: str, state: Connection, tmp_path: Path
) -> None:
    pipeline = _pipeline(state, tmp_path, columns=columns, max_delay_ms=3_600_000)
    worker = pipeline.workers["out"]
    for number in (1, 2, 3):
        pipeline.write(*insert(number, (number, "row")))
        assert not worker.serve_next(0.0)
    assert list((tmp_path / "lake").rglob("*.parquet")) == []
    worker.drain(by_operator=True)
    pipeline.take()
    tables = (tmp_path / "lake").glob("public/item" if columns == "typed" else "table=public.item")
    (place,) = tables
    assert len(list(place.rglob("*.parquet"))) == 1
    pipeline.close()


def test_rows_that_were_there_and_changes_beside_them_end_in_one_table(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, body text);"
        f"INSERT INTO item SELECT i, 1, repeat('b' || i, 700) FROM generate_series(1, {ROWS}) AS i"
    )
    destination = {"type": "parquet", "path": str(tmp_path / "lake"), "max_delay_ms": 200}
    rig = Rig(database, tmp_path, sink={"destination": destination})
    with rig.running():
        database.execute("UPDATE item SET version = 2 WHERE id % 10 = 0")
        number = rig.start("item", chunk_bytes=1 << 20)
        database.execute("UPDATE item SET version = 3 WHERE id % 20 = 0")
        rig.until_state(number)
        database.execute("UPDATE item SET version = 4 WHERE id = 7")
        rig.until_delivered()
    lake = ParquetLake.on_disk(tmp_path / "lake")
    last = (
        "SELECT id, version FROM t QUALIFY row_number() OVER (PARTITION BY id "
        "ORDER BY walbrook_lsn DESC, walbrook_idx DESC) = 1 ORDER BY id"
    )
    here = database.execute("SELECT id, version FROM item ORDER BY id")
    assert lake.query(last, ITEM) == here
    twice = "SELECT id FROM t WHERE walbrook_action = 'read' GROUP BY id HAVING count(*) > 1"
    assert lake.query(twice, ITEM) == []
