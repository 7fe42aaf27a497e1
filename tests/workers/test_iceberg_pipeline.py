"""The iceberg sink behind a worker: its catalog in the state database, rewinds, schema changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.connection import Connection
from spark_pipeline.delivery.deliver import _open_sinks
from tests import pgoutput
from tests.fix_postgres import Database
from tests.lake import query_iceberg
from tests.log_pipeline import LogPipeline
from tests.queue_pipeline import insert
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


@pytest.fixture(autouse=True)
def _no_open_sinks() -> Iterator[None]:
    """A process keeps its sinks; a test must not leave a thread behind."""
    yield
    while _open_sinks:
        _open_sinks.popitem()[1][2].close()


def _pipeline(state: Connection, directory: Path, **destination: Any) -> LogPipeline:
    to = {"type": "iceberg", "path": str(directory / "lake"), "max_delay_ms": 0, **destination}
    pipeline = LogPipeline(state, directory, out={"destination": to})
    state.execute("UPDATE walbrook.consumers SET destination = 'iceberg'")
    return pipeline


def _deliver(pipeline: LogPipeline, *numbers: int) -> None:
    for number in numbers:
        pipeline.write(*insert(number, (number, f"row {number}")))
        pipeline.take()


def _rows(state: Connection, sql: str, namespace: str = "public") -> list[tuple[object, ...]]:
    ((place,),) = state.execute(
        "SELECT metadata_location FROM walbrook.iceberg_tables "
        "WHERE (catalog_name, table_namespace, table_name) = ('out', %s, 'item')",
        (namespace,),
    ).fetchall()
    return query_iceberg(sql, t=str(place))


def test_a_rewind_into_a_new_generation_fills_tables_of_another_namespace(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = _pipeline(state, tmp_path)
    _deliver(pipeline, 1, 2, 3)
    state.execute(
        "SELECT walbrook.rewind('out', to_earliest => true, destination => 'new_generation')"
    )
    pipeline.start()
    pipeline.take()
    _deliver(pipeline, 4)
    ids = "SELECT id FROM t ORDER BY walbrook_lsn"
    assert _rows(state, ids) == [(1,), (2,), (3,)]
    assert _rows(state, ids, "public_generation_2") == [(1,), (2,), (3,), (4,)]
    pipeline.start()  # as after a crash
    _deliver(pipeline, 5)
    assert _rows(state, ids, "public_generation_2") == [(1,), (2,), (3,), (4,), (5,)]
    assert list((tmp_path / "lake.generation-2").rglob("*.parquet"))
    pipeline.close()


def test_changes_of_several_deliveries_and_versions_are_in_one_table(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = _pipeline(state, tmp_path, mode="upsert")
    _deliver(pipeline, 1, 2)
    columns = [("id", 23, True), ("name", 25, False), ("owner", 25, False), ("more", 23, False)]
    wider = pgoutput.relation(1, "public", "item", columns)
    pipeline.write(wider, *transaction(0x900, pgoutput.insert(1, ["9", "nine", "o", "7"])))
    pipeline.take()
    found = _rows(state, "SELECT id, more FROM t ORDER BY id")
    assert found == [(1, None), (2, None), (9, 7)]
    pipeline.close()
