"""The delta sink behind a worker: dead letters, rewinds, schema changes, and waiting for files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.connection import Connection
from spark_pipeline.delivery.deliver import _open_sinks
from spark_pipeline.stage.status import StatusWriter
from tests import pgoutput
from tests.fix_postgres import Database
from tests.lake import query
from tests.log_pipeline import SOURCE, LogPipeline
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
    to = {"type": "delta", "path": str(directory / "lake"), "max_delay_ms": 0, **destination}
    pipeline = LogPipeline(state, directory, out={"destination": to})
    state.execute("UPDATE walbrook.consumers SET destination = 'delta'")
    return pipeline


def _deliver(pipeline: LogPipeline, *numbers: int) -> None:
    for number in numbers:
        pipeline.write(*insert(number, (number, f"row {number}")))
        pipeline.take()


def _ids(place: Path) -> list[object]:
    return [row[0] for row in query("SELECT id FROM t ORDER BY walbrook_lsn", t=place)]


def test_a_rewind_into_a_new_generation_fills_tables_beside_the_first_ones(
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
    assert _ids(tmp_path / "lake" / "public" / "item") == [1, 2, 3]
    assert _ids(tmp_path / "lake.generation-2" / "public" / "item") == [1, 2, 3, 4]
    pipeline.start()  # as after a crash
    _deliver(pipeline, 5)
    assert _ids(tmp_path / "lake.generation-2" / "public" / "item") == [1, 2, 3, 4, 5]
    pipeline.close()


def test_a_value_without_a_place_is_a_dead_letter_and_the_others_arrive(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = _pipeline(state, tmp_path)
    numeric_of_4_1 = ((4 << 16) | 1) + 4
    columns = [("id", 1700, True), ("name", 25, False), ("owner", 25, False)]
    table = pgoutput.relation(1, "public", "item", columns, typmod=numeric_of_4_1)
    rows = [pgoutput.insert(1, [number, "n", "o"]) for number in ("1", "NaN", "3")]
    pipeline.write(table, *transaction(0x100, *rows))
    pipeline.take()
    pipeline.take()
    found = query("SELECT CAST(id AS INT) FROM t ORDER BY 1", t=tmp_path / "lake/public/item")
    assert found == [(1,), (3,)]
    ((kind, error),) = pipeline.rows("SELECT kind, error FROM walbrook.dead_letters")
    assert kind == "delivery"
    assert "column id of public.item" in error
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
    found = query("SELECT id, more FROM t ORDER BY id", t=tmp_path / "lake/public/item")
    assert found == [(1, None), (2, None), (9, 7)]
    pipeline.close()


def test_changes_of_a_table_that_cannot_be_written_wait_health_says_so_and_the_others_go_on(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = _pipeline(state, tmp_path, mode="upsert")
    _deliver(pipeline, 1)
    worker = pipeline.workers["out"]
    assert worker.conditions == []
    keyless = pgoutput.relation(2, "public", "bag", [("x", 23, False)])
    pipeline.write(keyless, *transaction(0x900, pgoutput.insert(2, ["7"])))
    pipeline.take()
    (condition,) = worker.conditions
    assert (condition.kind, condition.severity) == ("worker_tables_stopped", "error")
    assert "changes of public.bag wait at the destination" in condition.what
    assert "mode: append" in condition.fix
    _deliver(pipeline, 0x10)
    assert query("SELECT id FROM t ORDER BY 1", t=tmp_path / "lake/public/item") == [(1,), (0x10,)]
    ((error,),) = pipeline.rows("SELECT last_error FROM walbrook.consumers")
    assert error is None
    pipeline.close()


def test_tables_whose_changes_wait_are_in_health_after_a_restart_without_changes(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = _pipeline(state, tmp_path, mode="upsert")
    keyless = pgoutput.relation(2, "public", "bag", [("x", 23, False)])
    pipeline.write(keyless, *transaction(0x900, pgoutput.insert(2, ["7"])))
    pipeline.take()

    def reported() -> list[tuple[object, ...]]:
        worker = pipeline.workers["out"]
        shown = StatusWriter(SOURCE, pipeline.settings.term)
        shown.show(state, {"out": worker.current.status()}, (), {"out": worker.conditions})
        return pipeline.rows(
            "SELECT what FROM walbrook.health_events "
            "WHERE kind = 'worker_tables_stopped' AND resolved_at IS NULL"
        )

    ((before,),) = reported()
    assert "public.bag" in str(before)
    pipeline.start_pipeline_again()
    assert reported() == [(before,)]
    pipeline.close()


def test_a_worker_waits_for_more_and_delivers_all_of_it_in_one_commit_when_it_drains(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = _pipeline(state, tmp_path, max_delay_ms=3_600_000)
    worker = pipeline.workers["out"]
    for number in (1, 2, 3):
        pipeline.write(*insert(number, (number, "row")))
        assert not worker.serve_next(0.0)
    place = tmp_path / "lake" / "public" / "item"
    assert not place.exists()
    worker.drain(by_operator=True)
    pipeline.take()
    assert _ids(place) == [1, 2, 3]
    assert len(list(place.rglob("*.parquet"))) == 1
    pipeline.close()
