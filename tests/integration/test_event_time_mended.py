"""What docs/operations.md says helps when event time went wrong does help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.connection import Connection
from tests.event_lane import NAME, EventLane, S
from tests.fix_postgres import Database
from tests.lane_on_log import arrived

pytestmark = pytest.mark.migrated


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


def test_after_a_time_in_the_future_one_moved_back_behind_it_is_in_order_again(
    state: Connection, tmp_path: Path
) -> None:
    lane = EventLane(state, tmp_path)
    lane.write("a", (1, 5 * S), (2, 10**9 * S))
    lane.write("a", (3, 7 * S), (4, 6 * S))
    lane.turns()
    lane.write("a", (5, 8 * S))
    lane.turns()
    lane.ordering.settle()
    told = arrived(tmp_path / NAME)
    assert [m["record"]["id"] for m in told] == [1, 4, 3, 2, 5], (
        "all but the last were read at once"
    )
    assert [m["metadata"].get("late") for m in told][-1] is True
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/200', cursor_idx = 0")
    lane.read_resume_state()
    lane.write("a", (6, 9 * S))
    lane.turns()
    again = arrived(tmp_path / NAME)[len(told) :]
    assert [m["record"]["id"] for m in again] == [4, 3, 5, 6]
    assert not any(m["metadata"].get("late") for m in again)
    numbers = [
        tuple(map(int, m["metadata"]["sequence"].split("-"))) for m in arrived(tmp_path / NAME)
    ]
    assert numbers == sorted(set(numbers)), "what comes again has new numbers"
    lane.close()
