"""Acting on the pressure of a source: measure, widen micro-batches, defer workers, show it in SQL.

Invariants: a deferred worker leaves the feed between two ranges, with its cursor. A source with
nothing to do costs no write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing

import structlog

from cdc.connection import Connection
from cdc.log.open import open_log
from cdc.state.health import Condition
from cdc.state.pressure import PressureStatus, show_pressure
from spark_pipeline.capacity.backlog import Bounds
from spark_pipeline.capacity.pressure import DEFERRED_MAX_S, Decision, Gauge, Load, Pressure, Served
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.progress import StageProgress
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.slices.exchange import Exchange
from spark_pipeline.workers.base import BaseWorker

_logger = structlog.get_logger("walbrook.worker")
_LOOK_S = 1.0
_now_s = time.monotonic
_SHOW_QUIET_S = 5.0  # how often figures are written while there is no pressure


class Throttle:
    """What one source does about pressure; one thread calls it."""

    def __init__(
        self, settings: StageSettings, feed: Feed, workers: Mapping[str, BaseWorker]
    ) -> None:
        self._settings = settings
        self._feed = feed
        self._workers = workers
        most = Bounds(settings.micro_batch_rows, settings.micro_batch_bytes)
        self._pressure = Pressure(most)
        self._gauge = Gauge()
        self._widened: Exchange | None = None  # of the widening
        self._widened_by = 1.0
        self._why: dict[str, str] = {}  # of those that are deferred
        self._shown: PressureStatus | None = None
        self._looked_at = self._shown_at = float("-inf")

    def tick(
        self,
        progress: StageProgress,
        exchange: Exchange | None,
        connected: Callable[[], Connection],
    ) -> None:
        """Called ten times a second; ``exchange`` is that of the query, if one runs."""
        now = _now_s()
        self._gauge.sample(at_work=progress.step is not None or self._feed.is_busy)
        if now - self._looked_at < _LOOK_S or exchange is None:
            return
        self._looked_at = now
        with closing(open_log(self._settings.log_directory)) as log:
            if log.history() != self._feed.history:  # the query is about to end, and says why
                return
            load = self._gauge.read(log, self._feed.lowest, now)
        decided = self._pressure.tick(load, self._served(), now)
        self._do(decided, load, exchange, now)
        self._show(decided, load, connected, now)

    def conditions(self) -> list[Condition]:
        """Which workers are deferred and why, for ``walbrook.health``."""
        waits = {name: self._why[name] for name in self._deferred() if name in self._why}
        if not waits:
            return []
        return [
            Condition(
                "worker_pressure",
                "warning",
                "there is more to deliver than can be delivered, so "
                + "; ".join(f"{name} waits: {why}" for name, why in sorted(waits.items())),
                fix="nothing is lost, and it goes on by itself; if it comes again and again, give "
                "slow destinations more room, raise spark.delivery_slots, or raise the priority of "
                "whoever must not wait",
            )
        ]

    def _deferred(self) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.is_deferred]

    def _served(self) -> dict[str, Served]:
        source, slots = self._settings.source, self._settings.slots
        return {
            name: Served(self._workers[name].priority, slots.took_s(source, name))
            for name in self._feed.readers
            if name in self._workers
        }

    def _do(self, decided: Decision, load: Load, exchange: Exchange, now: float) -> None:
        if decided.widened_by != self._widened_by or (
            exchange is not self._widened and decided.widened_by > 1
        ):
            exchange.widen(decided.widened_by)
            if decided.widened_by > self._widened_by:
                self._log("feed.widened", load, by=decided.widened_by)
            self._widened_by, self._widened = decided.widened_by, exchange
        for name in decided.defer:
            self._log("worker.deferred", load, consumer=name)
            self._workers[name].defer(now + DEFERRED_MAX_S)
        for name in decided.resume:
            if name in self._workers:
                self._workers[name].resume()
        self._why = {
            name: self._why.get(name)
            or f"its priority is {self._workers[name].priority}, {_said(load)}"
            for name in {*self._deferred(), *decided.defer}
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
        shown = PressureStatus(
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
