"""What the body of a source's query is doing, and what its last range was. For SQL and health."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from cdc.metrics import catalogue
from cdc.metrics.clock import PhaseClock
from spark_pipeline.feed.decoded_range import DecodedRange

_PHASES = {"decode": "decode", "wait": "full"}
"""The phases of the body's time by the steps of a range: it waits for room in the feed."""


@dataclass(frozen=True)
class BodyStep:
    """A step of the body under way since ``since`` (monotonic)."""

    name: str
    since: float
    rows: int


@dataclass(frozen=True)
class LastRange:
    """The range that was decoded last: where, how many rows, how long it took."""

    plan: str
    rows: int
    decode_ms: float


class StageProgress:
    """All methods may be called from any thread."""

    def __init__(self, source: str = "") -> None:
        """``source`` names it in metrics."""
        self._clock = PhaseClock("feed", source)
        self._decode_seconds = catalogue.DECODE_SECONDS.of(source)
        self._messages = catalogue.DECODED_MESSAGES.of(source)
        self._lock = threading.Lock()
        self._step: BodyStep | None = None
        self._last: LastRange | None = None

    @property
    def step(self) -> BodyStep | None:
        """None between two ranges."""
        with self._lock:
            return self._step

    @property
    def last(self) -> LastRange | None:
        with self._lock:
            return self._last and replace(self._last)

    def begin(self, name: str, rows: int) -> None:
        self._end_phase()
        self._clock.begin(_PHASES[name])
        with self._lock:
            self._step = BodyStep(name, time.monotonic(), rows)

    def decoded(self, decoded: DecodedRange) -> None:
        with self._lock:
            began = self._step.since if self._step is not None else time.monotonic()
            took_s = time.monotonic() - began
            self._last = LastRange(decoded.plan.name, decoded.rows, took_s * 1000)
        self._decode_seconds.observe(took_s)
        self._messages.add(decoded.rows)

    def end(self) -> None:
        self._end_phase()
        with self._lock:
            self._step = None

    def _end_phase(self) -> None:
        if self._step is not None:
            self._clock.end(_PHASES[self._step.name])
