"""The postgres sink behind a worker: rewinds, dead letters, schema changes, filters and routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from cdc.connection import Connection
from tests import pgoutput
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.queue_pipeline import insert
from tests.walbrook_service import _url
from tests.wire_messages import transaction

pytestmark = [pytest.mark.migrated, pytest.mark.usefixtures("no_open_sinks")]

HISTORY = "SELECT walbrook_generation, id FROM item ORDER BY 1, walbrook_lsn"


def pipeline_to(there: Database, state: Connection, directory: Path, **given: Any) -> LogPipeline:
    destination = {"type": "postgres", "url": _url(there.dsn), **given.pop("destination", {})}
    pipeline = LogPipeline(state, directory, out={"destination": destination, **given})
    state.execute("UPDATE walbrook.consumers SET destination = 'postgres'")
    return pipeline


def deliver(pipeline: LogPipeline, *numbers: int) -> None:
    for number in numbers:
        pipeline.write(*insert(number, (number, f"row {number}")))
        pipeline.take()


@pytest.mark.parametrize("on_rewind", ["generation", "replace"])
def test_a_rewind_brings_the_changes_again_as_it_is_configured(
    on_rewind: str, state: Connection, there: Database, tmp_path: Path
) -> None:
    pipeline = pipeline_to(
        there, state, tmp_path, destination={"mode": "append", "on_rewind": on_rewind}
    )
    deliver(pipeline, 1, 2, 3)
    assert there.execute(HISTORY) == [(1, 1), (1, 2), (1, 3)]
    ((second,),) = there.execute("SELECT walbrook_lsn::text FROM item WHERE id = 2")
    state.execute(sql.SQL("SELECT walbrook.rewind('out', {})").format(f"{second}:0"))
    pipeline.start()
    pipeline.take()
    deliver(pipeline, 4)
    kept = [(1, 1), (1, 2), (1, 3)] if on_rewind == "generation" else [(1, 1)]
    assert there.execute(HISTORY) == [*kept, (2, 2), (2, 3), (2, 4)]
    pipeline.start()  # as after a crash: the same epoch goes on
    deliver(pipeline, 5)
    assert there.execute(HISTORY)[-1] == (2, 5)
    assert pipeline.rows("SELECT absorbed, lost_at FROM walbrook.consumers") == [(0, None)]
    pipeline.close()


def test_a_row_that_is_refused_is_a_dead_letter_and_the_others_arrive(
    state: Connection, there: Database, tmp_path: Path
) -> None:
    there.execute(
        "CREATE TABLE item (id int PRIMARY KEY, name text CHECK (name <> 'row 2'), owner text)"
    )
    pipeline = pipeline_to(there, state, tmp_path)
    pipeline.write(*insert(1, *((n, f"row {n}") for n in range(1, 6))))
    pipeline.take()
    pipeline.take()
    assert there.execute("SELECT id FROM item ORDER BY id") == [(1,), (3,), (4,), (5,)]
    ((kind, error),) = pipeline.rows("SELECT kind, error FROM walbrook.dead_letters")
    assert kind == "delivery"
    assert "item_name_check" in error
    pipeline.close()


def test_a_schema_change_alters_the_table_before_its_first_row(
    state: Connection, there: Database, tmp_path: Path
) -> None:
    pipeline = pipeline_to(there, state, tmp_path)
    deliver(pipeline, 1)
    columns = [("id", 23, True), ("name", 25, False), ("owner", 25, False), ("more", 23, False)]
    wider = pgoutput.relation(1, "public", "item", columns)
    pipeline.write(wider, *transaction(0x900, pgoutput.insert(1, ["9", "nine", "o", "7"])))
    pipeline.take()
    assert there.execute("SELECT id, more FROM item ORDER BY id") == [(1, None), (9, 7)]
    pipeline.close()


def test_only_what_passes_the_filter_arrives_where_the_routing_says(
    state: Connection, there: Database, tmp_path: Path, spark: Any
) -> None:
    pipeline = pipeline_to(
        there, state, tmp_path, filter="record.id <> 2",
        routing="CASE WHEN record.id > 2 THEN 'late.item' END",
    )  # fmt: skip
    pipeline.spark = spark
    pipeline.start()
    deliver(pipeline, 1, 2, 3)
    assert there.execute("SELECT id FROM item") == [(1,)]
    assert there.execute("SELECT id FROM late.item") == [(3,)]
    pipeline.close()
