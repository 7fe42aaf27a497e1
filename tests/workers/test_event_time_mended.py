"""What docs/operations.md says helps when event time went wrong does help."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.connection import Connection
from tests.event_pipeline import NAME, EventPipeline, S
from tests.log_pipeline import arrived

pytestmark = pytest.mark.migrated


def test_after_a_time_in_the_future_one_moved_back_behind_it_is_in_order_again(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = EventPipeline(state, tmp_path)
    pipeline.write("a", (1, 5 * S), (2, 10**9 * S))
    pipeline.write("a", (3, 7 * S), (4, 6 * S))
    pipeline.turns()
    pipeline.write("a", (5, 8 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    told = arrived(tmp_path / NAME)
    assert [m["record"]["id"] for m in told] == [1, 4, 3, 2, 5], (
        "all but the last were read at once"
    )
    assert [m["metadata"].get("late") for m in told][-1] is True
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/200', cursor_idx = 0")
    pipeline.read_resume_state()
    pipeline.write("a", (6, 9 * S))
    pipeline.turns()
    again = arrived(tmp_path / NAME)[len(told) :]
    assert [m["record"]["id"] for m in again] == [4, 3, 5, 6]
    assert not any(m["metadata"].get("late") for m in again)
    numbers = [
        tuple(map(int, m["metadata"]["sequence"].split("-"))) for m in arrived(tmp_path / NAME)
    ]
    assert numbers == sorted(set(numbers)), "what comes again has new numbers"
    pipeline.close()
