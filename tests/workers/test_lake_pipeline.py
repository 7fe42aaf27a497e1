"""A lake behind a worker: rewinds, schema changes, dead letters, tables that wait, and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.connection import Connection
from spark_pipeline.stage.status import StatusWriter
from tests import pgoutput
from tests.lakes import Lake
from tests.log_pipeline import SOURCE
from tests.queue_pipeline import insert
from tests.sink_pipeline import deliver, pipeline_to
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

IDS = "SELECT id FROM item ORDER BY walbrook_lsn"
HISTORIES = ("delta append", "iceberg append", "parquet append")


@pytest.fixture
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", getattr(request, "param", "delta copy_on_write"))


@pytest.mark.parametrize("lake", HISTORIES, indirect=True)
def test_a_rewind_into_a_new_generation_fills_tables_beside_the_first_ones(
    lake: Lake, pipeline_state: Connection, tmp_path: Path
) -> None:
    pipeline = pipeline_to(pipeline_state, tmp_path, lake.settings())
    deliver(pipeline, 1, 2, 3)
    pipeline_state.execute(
        "SELECT walbrook.rewind('out', to_earliest => true, destination => 'new_generation')"
    )
    pipeline.start()
    pipeline.take()
    deliver(pipeline, 4)
    assert lake.rows(IDS, "item") == [(1,), (2,), (3,)]
    assert lake.rows(IDS, "item", generation=2) == [(1,), (2,), (3,), (4,)]
    pipeline.start()  # as after a crash
    deliver(pipeline, 5)
    assert lake.rows(IDS, "item", generation=2) == [(1,), (2,), (3,), (4,), (5,)]
    pipeline.close()


@pytest.mark.parametrize("lake", ["delta copy_on_write", "iceberg merge_on_read"], indirect=True)
def test_changes_of_several_deliveries_and_versions_are_in_one_table(
    lake: Lake, pipeline_state: Connection, tmp_path: Path
) -> None:
    pipeline = pipeline_to(pipeline_state, tmp_path, lake.settings())
    deliver(pipeline, 1, 2)
    columns = [("id", 23, True), ("name", 25, False), ("owner", 25, False), ("more", 23, False)]
    wider = pgoutput.relation(1, "public", "item", columns)
    pipeline.write(wider, *transaction(0x900, pgoutput.insert(1, ["9", "nine", "o", "7"])))
    pipeline.take()
    found = lake.rows("SELECT id, more FROM item ORDER BY id", "item")
    assert found == [(1, None), (2, None), (9, 7)]
    pipeline.close()


@pytest.mark.parametrize("lake", HISTORIES, indirect=True)
def test_a_worker_waits_for_more_and_delivers_all_of_it_in_one_commit_when_it_drains(
    lake: Lake, pipeline_state: Connection, tmp_path: Path
) -> None:
    pipeline = pipeline_to(pipeline_state, tmp_path, lake.settings(max_delay_ms=3_600_000))
    worker = pipeline.workers["out"]
    for number in (1, 2, 3):
        pipeline.write(*insert(number, (number, "row")))
        assert not worker.serve_next(0.0)
    assert lake.files("public") == []
    worker.drain(by_operator=True)
    pipeline.take()
    assert lake.rows(IDS, "item") == [(1,), (2,), (3,)]
    assert sum(name.endswith(".parquet") for name in lake.files("public/item")) == 1
    pipeline.close()


@pytest.mark.parametrize("lake", ["delta append"], indirect=True)
def test_a_value_without_a_place_is_a_dead_letter_and_the_others_arrive(
    lake: Lake, pipeline_state: Connection, tmp_path: Path
) -> None:
    pipeline = pipeline_to(pipeline_state, tmp_path, lake.settings())
    numeric_of_4_1 = ((4 << 16) | 1) + 4
    columns = [("id", 1700, True), ("name", 25, False), ("owner", 25, False)]
    table = pgoutput.relation(1, "public", "item", columns, typmod=numeric_of_4_1)
    rows = [pgoutput.insert(1, [number, "n", "o"]) for number in ("1", "NaN", "3")]
    pipeline.write(table, *transaction(0x100, *rows))
    pipeline.take()
    pipeline.take()
    assert lake.rows("SELECT CAST(id AS INT) FROM item ORDER BY 1", "item") == [(1,), (3,)]
    ((kind, error),) = pipeline.rows("SELECT kind, error FROM walbrook.dead_letters")
    assert kind == "delivery"
    assert "column id of public.item" in error
    pipeline.close()


def test_changes_of_a_table_that_cannot_be_written_wait_health_says_so_and_the_others_go_on(
    lake: Lake, pipeline_state: Connection, tmp_path: Path
) -> None:
    pipeline = pipeline_to(pipeline_state, tmp_path, lake.settings())
    deliver(pipeline, 1)
    worker = pipeline.workers["out"]
    assert worker.conditions == []
    keyless = pgoutput.relation(2, "public", "bag", [("x", 23, False)])
    pipeline.write(keyless, *transaction(0x900, pgoutput.insert(2, ["7"])))
    pipeline.take()
    (condition,) = worker.conditions
    assert (condition.kind, condition.severity) == ("worker_tables_stopped", "error")
    assert "changes of public.bag wait at the destination" in condition.what
    assert "mode: append" in condition.fix
    deliver(pipeline, 0x10)
    assert lake.rows("SELECT id FROM item ORDER BY 1", "item") == [(1,), (0x10,)]
    ((error,),) = pipeline.rows("SELECT last_error FROM walbrook.consumers")
    assert error is None
    pipeline.close()


def test_tables_whose_changes_wait_are_in_health_after_a_restart_without_changes(
    lake: Lake, pipeline_state: Connection, tmp_path: Path
) -> None:
    pipeline = pipeline_to(pipeline_state, tmp_path, lake.settings())
    keyless = pgoutput.relation(2, "public", "bag", [("x", 23, False)])
    pipeline.write(keyless, *transaction(0x900, pgoutput.insert(2, ["7"])))
    pipeline.take()

    def reported() -> list[tuple[object, ...]]:
        worker = pipeline.workers["out"]
        shown = StatusWriter(SOURCE, pipeline.settings.term)
        shown.show(pipeline_state, {"out": worker.current.status()}, (), {"out": worker.conditions})
        return pipeline.rows(
            "SELECT what FROM walbrook.health_events "
            "WHERE kind = 'worker_tables_stopped' AND resolved_at IS NULL"
        )

    ((before,),) = reported()
    assert "public.bag" in str(before)
    pipeline.start_pipeline_again()
    assert reported() == [(before,)]
    pipeline.close()
