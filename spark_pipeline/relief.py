"""Acting on the pressure of a source: measure, widen, defer, let come back, and let SQL say so.

What must always hold: whoever is deferred has left the shared lane as others leave it, between two
micro-batches and with its cursor; a source with nothing to do costs no write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import structlog

from cdc.connection import Connection
from cdc.log.open import open_log
from cdc.state.health import Condition
from cdc.state.pressure import Shown, show_pressure
from spark_pipeline.backlog import Bounds
from spark_pipeline.gauge import Gauge
from spark_pipeline.passage import Passage
from spark_pipeline.pressure import Decision, Load, Pressure, Served
from spark_pipeline.roster import Roster
from spark_pipeline.settings import LaneSettings

_logger = structlog.get_logger("walbrook.lane")
_LOOK_S = 1.0
_now_s = time.monotonic
_SHOW_QUIET_S = 5.0  # how often figures are written while there is no pressure


class Relief:
    """What the lanes of one source do about pressure; one thread calls it."""

    def __init__(self, settings: LaneSettings, roster: Roster, lock: threading.Lock) -> None:
        self._settings = settings
        self._roster, self._lock = roster, lock
        self._priorities = {sink.name: sink.priority for sink in settings.consumers}
        most = Bounds(settings.micro_batch_rows, settings.micro_batch_bytes)
        self._pressure = Pressure(most)
        self._gauge = Gauge()
        self._told: Passage | None = None  # of the widening
        self._widened_by = 1.0
        self._why: dict[str, str] = {}  # of those that are deferred
        self._shown: Shown | None = None
        self._looked_at = self._shown_at = float("-inf")

    def tick(self, shared: Passage | None, connected: Callable[[], Connection]) -> None:
        """Called ten times a second with the shared lane, if there is one at the moment."""
        now = _now_s()
        self._gauge.sample(at_work=shared is not None and shared.progress() is not None)
        if now - self._looked_at < _LOOK_S or shared is None:
            return
        self._looked_at = now
        with closing(open_log(self._settings.log_directory)) as log:
            if log.history() != shared.history:  # the lane is about to end, and says why itself
                return
            load = self._gauge.read(log, shared.next_batch, now)
        decided = self._pressure.tick(load, self._served(shared), now)
        self._do(decided, load, shared, now)
        self._show(decided, load, connected, now)

    def conditions(self) -> list[Condition]:
        """Who is deferred and why, for ``walbrook.health``."""
        with self._lock:
            waits = {name: self._why[name] for name in self._roster.deferred() if name in self._why}
        if not waits:
            return []
        return [
            Condition(
                "lane_pressure",
                "warning",
                "there is more to deliver than can be delivered, so "
                + "; ".join(f"{name} waits: {why}" for name, why in sorted(waits.items())),
                fix="nothing is lost, and it goes on by itself; if it comes again and again, give "
                "slow destinations more room, raise spark.delivery_slots, or raise the priority of "
                "whoever must not wait",
            )
        ]

    def _served(self, shared: Passage) -> dict[str, Served]:
        source, slots = self._settings.source, self._settings.slots
        return {
            name: Served(self._priorities[name], slots.took_s(source, name))
            for name in shared.members.cursors
        }

    def _do(self, decided: Decision, load: Load, shared: Passage, now: float) -> None:
        if decided.widened_by != self._widened_by or (
            shared is not self._told and decided.widened_by > 1
        ):
            shared.widen(decided.widened_by)
            if decided.widened_by > self._widened_by:
                self._log("lane.widened", load, by=decided.widened_by)
            self._widened_by, self._told = decided.widened_by, shared
        for name in decided.defer:
            self._log("lane.deferred", load, consumer=name)
            shared.members.let_go(name, "deferred")
        with self._lock:
            deferred = self._roster.deferred()
            for name in decided.resume:
                if name in deferred:
                    self._roster.hurry(name, now)
        self._why = {
            name: self._why.get(name) or f"its priority is {self._priorities[name]}, {_said(load)}"
            for name in deferred
        }

    def _log(self, event: str, load: Load, **more: object) -> None:
        _logger.warning(
            event,
            source=self._settings.source,
            **more,
            backlog_rows=load.backlog.rows,
            latency_s=load.latency_s,
            busy_ratio=load.busy_ratio,
        )

    def _show(
        self, decided: Decision, load: Load, connected: Callable[[], Connection], now: float
    ) -> None:
        slots = self._settings.slots
        busy, waiting = slots.in_use(self._settings.source)
        shown = Shown(
            level=decided.level,
            backlog_rows=load.backlog.rows,
            backlog_bytes=load.backlog.bytes,
            latency_s=load.latency_s,
            busy_ratio=load.busy_ratio,
            widened_by=decided.widened_by,
            deferred=tuple(sorted(self._why)),
            slots=slots.count,
            slots_busy=busy,
            waiting=waiting,
        )
        before = self._shown
        if shown == before:
            return
        pressing = shown.level or before is None or before.level or shown.deferred
        if pressing or now - self._shown_at >= _SHOW_QUIET_S:
            show_pressure(connected(), self._settings.source, self._settings.term, shown)
            self._shown, self._shown_at = shown, now


def _said(load: Load) -> str:
    return (
        f"and {load.backlog.rows:,} changes waited for up to {load.latency_s:.0f} s "
        "when it was deferred"
    )
