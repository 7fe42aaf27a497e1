"""A log with a tier, and waiting for what moves there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cdc.cursor import ORIGIN
from cdc.log.writer import LogWriter
from tests.unit.log.batches import KEEP_ALL

ALL = list(range(10, 40))


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def moved(log: LogWriter) -> int:
    log.retain(ORIGIN, KEEP_ALL)
    return sum(bool(segment.place) for segment in log.manifest.segments)


def hot_bytes(log: LogWriter) -> int:
    return sum(segment.bytes for segment in log.manifest.segments if not segment.place)


def move_all(log: LogWriter) -> None:
    until(lambda: moved(log) > 0 and hot_bytes(log) <= 3_000)
