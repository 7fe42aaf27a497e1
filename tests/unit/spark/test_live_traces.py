"""Live traces take samples beside deliveries, and never in their way."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from spark_pipeline.workers import live
from spark_pipeline.workers.live import LiveTraces


def test_a_sample_that_cannot_be_made_fails_no_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def broken(*given: object) -> list[str]:
        asked.append(given)
        raise pa.ArrowInvalid("a value of a row")

    monkeypatch.setattr(live, "samples_of", broken)
    traces, now = LiveTraces(), time.monotonic()
    traces._watched = {"files": {"id": live._Watch(10, now + 60, 10.0, now)}}
    share: Any = SimpleNamespace(consumer=SimpleNamespace(name="files"))
    nothing: Any = None
    traces.sample(share, list, nothing)
    assert len(asked) == 1
