"""The trace of changes of a consumer in event-time order: held back, released, settled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.log.view import LogView
from cdc.state.traces import known_steps
from cdc.trace.change import TracedChange, find_change
from cdc.trace.conclusion import Conclusion
from cdc.trace.recorded import RecordsOfSource
from cdc.trace.story import ConsumerTrace
from cdc.trace.tracer import consumer_trace
from tests.event_pipeline import NAME, EventPipeline, S
from tests.fix_postgres import Database

pytestmark = pytest.mark.migrated


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


def traced(pipeline: EventPipeline, lsn: int, idx: int = 0) -> ConsumerTrace:
    directory, cursor = pipeline.directory / "a" / "log", Cursor(lsn, idx)
    with closing(LogView(directory)) as log:
        change = find_change(log, cursor)
    assert isinstance(change, TracedChange)
    known = known_steps(pipeline.state, "a", str(cursor))
    recorded = RecordsOfSource(directory).about(cursor)
    return consumer_trace(cursor, NAME, pipeline.sink, change, known, recorded)


def test_a_change_that_is_held_back_is_not_said_to_be_delivered_until_the_cursor_is_beyond_it(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = EventPipeline(state, tmp_path, event_time={"late_tolerance": "2s"})
    pipeline.write("a", (1, 5 * S), (2, 3 * S), (3, 7 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    assert traced(pipeline, 0x100, 0).conclusion is Conclusion.DELIVERED
    assert traced(pipeline, 0x100, 2).conclusion is Conclusion.HELD_OR_DELIVERED
    pipeline.write("a", (4, 30 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    found = traced(pipeline, 0x100, 2)
    assert found.conclusion is Conclusion.DELIVERED
    said = [step.what for step in found.steps]
    assert any(what.startswith("settled; ") for what in said), said
    pipeline.close()


def test_a_late_change_is_never_said_to_be_delivered_where_late_ones_are_dropped(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = EventPipeline(state, tmp_path, event_time={"late_policy": "drop"})
    pipeline.write("a", (1, 10 * S))
    pipeline.turns()
    pipeline.write("a", (2, 4 * S), (3, 11 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    found = traced(pipeline, 0x200, 0)
    assert found.conclusion is Conclusion.DELIVERED_OR_LEFT_OUT
    assert "late changes are dropped" in found.why
    pipeline.close()
