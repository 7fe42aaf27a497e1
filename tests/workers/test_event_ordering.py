"""Consumers in event-time order on hand-written logs: released, late, held back, taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cdc.connection import Connection
from cdc.cursor import Cursor
from tests import pgoutput
from tests.event_pipeline import ITEM, NAME, EventPipeline, S
from tests.log_pipeline import arrived

pytestmark = pytest.mark.migrated


def ids(pipeline: EventPipeline) -> list[Any]:
    return [m["record"].get("id", m["action"]) for m in arrived(pipeline.directory / NAME)]


def test_changes_go_out_in_the_order_of_their_times_and_the_rest_is_held_back(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = EventPipeline(state, tmp_path, event_time={"late_tolerance": "2s"})
    pipeline.write("a", (1, 5 * S), (2, 3 * S), (3, 7 * S))
    pipeline.write("a", (4, 4 * S))
    pipeline.turns()
    assert ids(pipeline) == [2, 4, 1], "all up to 7 s less the tolerance, by time"
    pipeline.ordering.settle()
    assert pipeline.cursors() == {"a": Cursor(0x100, 2)}, "it passed what is held back"
    (message, *_) = arrived(tmp_path / NAME)
    assert message["metadata"]["event_time"] == "1970-01-01T00:00:03.000000Z"
    assert message["metadata"]["commit_lsn"] == 0x100
    pipeline.close()


def test_delivered_rows_are_not_repeated_and_rows_held_back_are_not_lost(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = EventPipeline(state, tmp_path, event_time={"late_tolerance": "2s"})
    pipeline.write("a", (1, 9 * S), (2, 3 * S), (3, 5 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    assert ids(pipeline) == [2, 3]
    pipeline.start()
    pipeline.turns()
    assert ids(pipeline) == [2, 3]
    pipeline.write("a", (4, 8 * S), (5, 30 * S))
    pipeline.turns()
    assert ids(pipeline) == [2, 3, 4, 1]
    pipeline.close()


@pytest.mark.parametrize(
    ("policy", "arrive", "dead"),
    [("deliver", [1, 2, 3], 0), ("drop", [1, 3], 0), ("dead_letter", [1, 3], 1)],
)
def test_a_late_one_follows_the_policy_and_is_counted(
    state: Connection, tmp_path: Path, policy: str, arrive: list[int], dead: int
) -> None:
    pipeline = EventPipeline(state, tmp_path, event_time={"late_policy": policy})
    pipeline.write("a", (1, 10 * S))
    pipeline.turns()
    pipeline.write("a", (2, 4 * S), (3, 11 * S))
    pipeline.turns()
    assert ids(pipeline) == arrive
    late = [m["metadata"].get("late") for m in arrived(tmp_path / NAME)]
    assert late == [True if number == 2 else None for number in arrive]
    assert pipeline.rows("SELECT kind, event IS NOT NULL FROM walbrook.dead_letters") == (
        [("late", True)] * dead
    )
    pipeline.ordering._shown_at = 0.0
    pipeline.ordering.show()
    assert pipeline.rows('SELECT "table", buffered, late_count FROM walbrook.watermarks') == [
        ("public.item", 0, 1)
    ]
    pipeline.start()
    pipeline.turns()
    assert ids(pipeline) == arrive
    pipeline.close()


def test_a_value_that_is_no_time_is_a_dead_letter_and_the_stream_goes_on(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = EventPipeline(state, tmp_path, event_time={"type": "iso8601"})
    column = ("at", 25)
    text = pgoutput.relation(1, "public", "item", [("id", 23, True), column])
    rows = ["2026-01-02T03:04:05Z", "yesterday", "2026-01-02T03:04:06Z"]
    changes = [pgoutput.insert(1, [str(n), at]) for n, at in enumerate(rows)]
    pipeline.write_messages("a", text, *changes)
    pipeline.turns()
    pipeline.ordering.settle()
    assert ids(pipeline) == [0, 2]
    ((kind, error),) = pipeline.rows("SELECT kind, error FROM walbrook.dead_letters")
    assert kind == "event_time"
    assert "'yesterday'" in error
    assert "public.item" in error
    assert "'at'" in error
    pipeline.close()


def test_changes_without_a_time_follow_what_came_before_them_in_their_table(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = EventPipeline(state, tmp_path, event_time={"late_tolerance": "2s"})
    insert = pgoutput.insert(1, ["1", str(9 * S)])
    gone = pgoutput.delete(1, key=["1", None])
    pipeline.write_messages("a", ITEM, insert, gone, pgoutput.insert(1, ["2", None]))
    pipeline.turns()
    assert ids(pipeline) == [], "the delete went before what it deletes"
    pipeline.write("a", (3, 20 * S))
    pipeline.turns()
    messages = arrived(tmp_path / NAME)
    assert [m["action"] for m in messages] == ["insert", "delete", "insert"]
    assert [m["record"]["id"] for m in messages] == [1, 1, 2]
    pipeline.close()


@pytest.mark.parametrize("column", ["commit_timestamp", "metadata.commit_timestamp"])
def test_the_time_of_the_commit_is_the_event_time_of_every_change(
    state: Connection, tmp_path: Path, column: str
) -> None:
    timed = {"column": column, "type": None, "late_tolerance": "2s"}
    pipeline = EventPipeline(state, tmp_path, event_time=timed)
    pipeline.write("a", (1, None), at_us=10 * S)
    pipeline.write("a", (2, None), at_us=9 * S)
    gone = pgoutput.delete(1, key=["1", None])
    pipeline.write_messages("a", ITEM, gone, at_us=11 * S)
    pipeline.write("a", (3, None), at_us=20 * S)
    pipeline.turns()
    pipeline.write("a", (4, None), at_us=15 * S)
    pipeline.write("a", (5, None), at_us=18 * S)
    pipeline.turns()
    messages = arrived(tmp_path / NAME)
    assert [
        (m["action"], m["record"]["id"], m["metadata"]["event_time"], "late" in m["metadata"])
        for m in messages
    ] == [
        ("insert", 2, "1970-01-01T00:00:09.000000Z", False),
        ("insert", 1, "1970-01-01T00:00:10.000000Z", False),
        ("delete", 1, "1970-01-01T00:00:11.000000Z", False),
        ("insert", 4, "1970-01-01T00:00:15.000000Z", True),
        ("insert", 5, "1970-01-01T00:00:18.000000Z", True),
    ]
    assert pipeline.rows("SELECT count(*) FROM walbrook.dead_letters") == [(0,)]
    pipeline.close()


def test_two_databases_come_in_one_order_and_each_keeps_its_cursor(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = EventPipeline(state, tmp_path, sources=("a", "b"))
    pipeline.write("a", (1, 1 * S), (3, 3 * S))
    pipeline.turns()
    assert ids(pipeline) == [], "the other database has said nothing yet"
    pipeline.write("b", (2, 2 * S), (4, 4 * S))
    pipeline.turns()
    assert ids(pipeline) == [1, 2, 3]
    assert pipeline.cursors() == {"a": Cursor(0x101, 0), "b": Cursor(0x100, 1)}
    names = [m["metadata"]["database_name"] for m in arrived(tmp_path / NAME)]
    assert names == ["a", "b", "a"]
    keys = {m["metadata"]["idempotency_key"] for m in arrived(tmp_path / NAME)}
    assert len(keys) == 3, "two databases share cursors"
    pipeline.start()
    pipeline.write("a", (6, 6 * S))
    pipeline.turns()
    assert ids(pipeline) == [1, 2, 3, 4]
    pipeline.close()


def test_parquet_holds_the_cursors_of_the_source_and_absorbs_by_number(
    state: Connection, tmp_path: Path
) -> None:
    place = {
        "type": "parquet",
        "columns": "json",
        "max_delay_ms": 0,
        "path": tmp_path / "rows",
        "partition_by": ["table"],
    }
    pipeline = EventPipeline(state, tmp_path, destination=place)
    pipeline.write("a", (1, 5 * S), (2, 3 * S))
    pipeline.write("a", (3, 9 * S))
    pipeline.turns()
    pipeline.start()
    pipeline.turns()
    files = [
        pq.read_table(file, partitioning=None) for file in (tmp_path / "rows").rglob("*.parq*")
    ]
    cursors = [(row["commit_lsn"], row["commit_idx"]) for f in files for row in f.to_pylist()]
    assert sorted(cursors) == [(0x100, 0), (0x100, 1), (0x200, 0)]
    pipeline.close()
