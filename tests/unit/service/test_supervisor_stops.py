"""How the supervisor stops the driver: the driver knows whether an operator asked for it."""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from cdc.config import loads
from cdc.errors import NEEDS_OPERATOR
from cdc.service.process.supervisor import Child, Supervisor
from cdc.stop import StopReason, StopSignal

CONFIG = """
databases: [{name: shop, url: postgres://u:p@h/d, slot: {name: s}, publication: {name: p}}]
sinks: []
"""
DRIVER = """
import pathlib, sys
from cdc.stop import StopSignal
stop = StopSignal()
stop.on_signals()
stop.on_parent_death()
pathlib.Path(sys.argv[1]).write_text("started")
stop.wait(30)
pathlib.Path(sys.argv[1]).write_text(f"by_operator={stop.by_operator}")
"""
READER = "import signal; signal.pause()"
FAILING_READER = f"""
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
sys.exit({NEEDS_OPERATOR})
"""


class Source:
    """One that is not ready: the reader is the test's own."""

    term: int | None = None


class Service:
    """A supervisor over a driver that says how it was stopped, and a reader."""

    def __init__(self, directory: Path, reader: str) -> None:
        self._said = directory / "said"
        config = loads(CONFIG, base=directory)
        self.supervisor = Supervisor(config, directory / "walbrook.yaml", {"shop": Source()})
        self._driver = Child("driver", [sys.executable, "-c", DRIVER, str(self._said)])
        self._reader = Child("reader", [sys.executable, "-c", reader, str(self._said)])
        self.supervisor._driver, self.supervisor._readers = self._driver, {"shop": self._reader}

    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""

    def close(self) -> None:
        for child in (self._driver, self._reader):
            child.stop(0.1)


@pytest.mark.parametrize("by_operator", [True, False])
def test_a_driver_is_stopped_by_an_operator_only_if_the_service_is(
    tmp_path: Path, by_operator: bool
) -> None:
    stop = StopSignal()
    with closing(Service(tmp_path, READER if by_operator else FAILING_READER)) as service:

        def keep() -> None:
            if by_operator and service.said() == "started":
                stop.request(StopReason.OPERATOR)

        watchdog = threading.Timer(30, stop.request)
        watchdog.start()
        try:
            assert service.supervisor.run(stop, keep) == (0 if by_operator else 1)
        finally:
            watchdog.cancel()
    assert service.said() == f"by_operator={by_operator}"
