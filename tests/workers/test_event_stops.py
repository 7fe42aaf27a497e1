"""Which stops release what a consumer in event-time order holds back: an operator's, and no other.

A process that failed is started again, and changes that were on time must not come late then.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from cdc.stop import StopReason, StopSignal
from spark_pipeline.eventtime import ordering as ordering_module
from tests.event_pipeline import NAME, EventPipeline, S
from tests.event_stages import Stages
from tests.fix_event_pipeline import MakePipeline
from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.waiting import until

End = Callable[[Stages, StopSignal], None]


def operator_stops(stages: Stages, stop: StopSignal) -> None:
    stop.request(StopReason.OPERATOR)


def feed_fails(stages: Stages, stop: StopSignal) -> None:
    """The feed of the source has no JVM any more: that is for good."""
    stages.by_source["a"]._fatal.append(RuntimeError("no JVM"))


def supervisor_dies(stages: Stages, stop: StopSignal) -> None:
    reading, writing = os.pipe()
    stop.on_parent_death(pipe=reading)
    os.close(writing)


def serve(
    pipeline: EventPipeline, database: Database, monkeypatch: pytest.MonkeyPatch, end: End
) -> list[int]:
    """Serve until something is held back, then until ``end``; returns the ids that arrived."""
    monkeypatch.setattr(ordering_module, "_SHOW_S", 0.05)
    stop = StopSignal()
    stages = Stages(pipeline, database, stop, drain_timeout_s=5.0)
    try:
        held = "SELECT buffered = 1 FROM walbrook.watermarks"
        until("a change to be held back", lambda: pipeline.rows(held) == [(True,)])
        end(stages, stop)
    finally:
        until("a stop", lambda: stop.wait(1))
        stages.join()
    return [message["record"]["id"] for message in arrived(pipeline.directory / NAME)]


@pytest.mark.parametrize(
    ("end", "flushed"), [(operator_stops, True), (feed_fails, False), (supervisor_dies, False)]
)
def test_changes_held_back_are_released_by_an_operators_stop_alone(
    event_pipeline: MakePipeline,
    event_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    end: End,
    flushed: bool,
) -> None:
    pipeline = event_pipeline(event_time={"late_tolerance": "5s", "late_policy": "drop"})
    pipeline.write("a", (1, 20 * S), (2, 10 * S))
    before = serve(pipeline, event_database, monkeypatch, end)
    assert before == ([2, 1] if flushed else [2])
    pipeline.write("a", (3, 17 * S))
    pipeline.start()
    pipeline.write("a", (4, 30 * S))
    pipeline.turns()
    after = [message["record"]["id"] for message in arrived(pipeline.directory / NAME)]
    assert after == ([2, 1] if flushed else [2, 3, 1]), "a change on time was taken for late"
