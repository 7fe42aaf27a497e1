"""Sources of a driver that follow the configuration, with stages that do nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cdc.config import loads
from cdc.stop import StopSignal
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.stage import sources as module
from spark_pipeline.stage.sources import Sources
from tests.waiting import until

_CONFIG = """
databases:
  - {name: shop, url: "postgres://u@h/d", slot: {name: s}, publication: {name: p}}
sinks:
  - {name: NAME, destination: {type: file, path: lines}}
"""


def test_a_configuration_that_comes_while_a_stage_begins_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, has_come = threading.Event(), threading.Event()

    class Stage:
        def __init__(
            self, _spark: Any, settings: StageSettings, stop: StopSignal, event_time: Any
        ) -> None:
            self.settings, self._stop = settings, stop
            made.append(self)
            begins.set()
            has_come.wait(0.3)

        def take(self, settings: StageSettings) -> None:
            self.settings = settings

        def run(self, _drain_s: float) -> None:
            self._stop.wait(60)

    made: list[Stage] = []
    monkeypatch.setattr(module, "SourceStage", Stage)
    before, after = (loads(_CONFIG.replace("NAME", name), tmp_path) for name in ("a", "b"))
    stop = StopSignal()
    sources = Sources(Any, before, stop)  # type: ignore[arg-type]
    sources.begin("shop", 1)
    try:
        assert begins.wait(10)
        sources.take(after, 2)
        has_come.set()
        until("the change", lambda: [sink.name for sink in made[0].settings.consumers] == ["b"], 5)
    finally:
        stop.request()
