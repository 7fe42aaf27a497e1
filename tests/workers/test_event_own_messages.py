"""Watermark and window messages that a destination refuses, or that are too large for it.

They have sequence numbers of their own and no place in a change log, so that the position of a
consumer in its log says nothing of them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

import orjson
import pytest

from cdc.change import synthetic_rows
from cdc.eventtime.buffer import EventTimeBuffer
from cdc.eventtime.released import Released
from cdc.eventtime.sequencer import WatermarkStep
from cdc.metrics.catalogue import WATERMARKS_EMITTED
from spark_pipeline.eventtime.release import WINDOW, OwnRows
from spark_pipeline.eventtime.windows.due import WindowResults
from tests.event_pipeline import NAME, EventPipeline, S
from tests.event_webhook import hook, ids, redeliver, taken
from tests.fix_event_pipeline import MakePipeline
from tests.fix_http import Endpoint

LETTERS = "SELECT action, event ->> 'record' FROM walbrook.dead_letters ORDER BY commit_idx"
FAR = 5
"""Transactions before the first refusal, whose cursors are beyond the sequence numbers then."""


class Windows:
    """One window per second, which counts its rows; ``note`` makes its messages larger."""

    def __init__(self) -> None:
        self.note = ""

    def due(self, times: Any) -> Any:
        return times

    def results(
        self, released: Released | None, buffer: EventTimeBuffer, step: WatermarkStep, now: datetime
    ) -> WindowResults:
        if released is None:
            return WindowResults([], {})
        record = orjson.dumps({"count": released.rows.num_rows, "note": self.note}).decode()
        return WindowResults([OwnRows(synthetic_rows(WINDOW, [record], now))], {})


def advance(pipeline: EventPipeline, first: int, last: int) -> None:
    """One row per transaction and release."""
    for number in range(first, last + 1):
        pipeline.write("a", (number, number * S))
        pipeline.turns()


def refuse(endpoint: Endpoint, action: str) -> None:
    endpoint.refuses = lambda messages: any(m["action"] == action for m in messages)


@pytest.mark.parametrize("action", ["watermark", "window"])
def test_a_refused_message_of_our_own_waits_and_arrives_later(
    event_pipeline: MakePipeline, endpoint: Endpoint, action: str
) -> None:
    windows = Windows() if action == "window" else None
    timed = {"emit_watermarks": action == "watermark"}
    pipeline = event_pipeline(event_time=timed, windows=windows, **hook(endpoint, batch_size=1))
    emitted = WATERMARKS_EMITTED.of(NAME).value
    advance(pipeline, 1, FAR)
    before = taken(endpoint).count(action)
    assert WATERMARKS_EMITTED.of(NAME).value - emitted == taken(endpoint).count("watermark")
    refuse(endpoint, action)
    advance(pipeline, FAR + 1, FAR + 2)
    waiting = pipeline.rows("SELECT action, group_id FROM walbrook.events")
    assert waiting == [(action, None), (action, None)]
    assert taken(endpoint).count(action) == before
    endpoint.refuses = None
    redeliver(pipeline)
    assert taken(endpoint)[-2:] == [action, action]
    keys = [m["metadata"]["idempotency_key"] for m in cast("list[Any]", endpoint.written)]
    assert len(keys) == len(set(keys)), "two messages have one key"


@pytest.mark.parametrize("kind", ["file", "webhook"])
def test_a_window_message_that_is_too_large_is_a_dead_letter(
    event_pipeline: MakePipeline, endpoint: Endpoint, kind: str
) -> None:
    windows = Windows()
    given = hook(endpoint, batch_size=1) if kind == "webhook" else {}
    pipeline = event_pipeline(windows=windows, max_message_bytes=1_000, **given)
    advance(pipeline, 1, FAR)
    windows.note = "x" * 2_000
    advance(pipeline, FAR + 1, FAR + 1)
    windows.note = ""
    advance(pipeline, FAR + 2, FAR + 2)
    found = taken(endpoint) if kind == "webhook" else ids(pipeline)
    assert found == ["window"] * (FAR + 1)
    ((action, record),) = pipeline.rows(LETTERS)
    assert action == "window"
    assert orjson.loads(record) == {"count": 1, "note": "x" * 2_000}
    assert pipeline.rows("SELECT delivered, dead FROM walbrook.consumers") == [(FAR + 1, 1)]
