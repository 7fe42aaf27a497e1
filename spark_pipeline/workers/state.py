"""What a worker is doing, why, and when it tries again: one typed value per worker.

Invariant: a state changes in one place, ``CurrentState``; texts are made of it only for SQL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from cdc.errors import ExpressionError, OperatorError, WalbrookError
from cdc.metrics.clock import PhaseClock
from cdc.state.pressure import DEFERRED
from cdc.state.workers import WorkerState, WorkerStatus


class Reason(Enum):
    """Why a worker is not live."""

    SINK_FAILED = "its sink failed"
    CANNOT_BE_SERVED = "it cannot be served"
    EXPRESSIONS_UNFIT = "its expressions do not fit"
    STATE_UNREACHABLE = "the state database does not answer"
    BEHIND = "it is behind the others"
    PAUSED = "it is paused"
    INACTIVE = "it is not active"
    DEFERRED = DEFERRED

    @classmethod
    def of(cls, error: WalbrookError) -> Reason:
        if isinstance(error, ExpressionError):
            return cls.EXPRESSIONS_UNFIT
        if isinstance(error, OperatorError):
            return cls.CANNOT_BE_SERVED
        return cls.SINK_FAILED


class Work(Enum):
    """What a worker may be at for too long."""

    READ = "a read of the change log for"
    DELIVERY = "a delivery to"
    SETTLEMENT = "a settlement of"


@dataclass(frozen=True)
class Step:
    """Work under way since ``since`` (monotonic)."""

    work: Work
    since: float


@dataclass(frozen=True)
class _Held:
    state: WorkerState | None = None
    reason: Reason | None = None
    error: WalbrookError | None = None
    retry_at: float | None = None  # monotonic
    failing: bool = False
    since: float = 0.0  # monotonic
    paused: tuple[str, ...] = ()


class CurrentState:
    """That of one worker; its thread writes it, any thread reads it."""

    def __init__(self, clock: PhaseClock | None = None) -> None:
        """``clock``: where the worker's time goes."""
        self._clock = clock or PhaseClock("worker", "")
        self._lock = threading.Lock()
        self._held = _Held()
        self._step: Step | None = None

    @property
    def state(self) -> WorkerState | None:
        return self._held.state

    @property
    def reason(self) -> Reason | None:
        return self._held.reason

    @property
    def error(self) -> WalbrookError | None:
        return self._held.error

    @property
    def is_served(self) -> bool:
        return self._held.state in (WorkerState.LIVE, WorkerState.CATCHING_UP)

    @property
    def is_held(self) -> bool:
        """Whether nothing is delivered until something else happens."""
        waits = (WorkerState.WAITING, WorkerState.PAUSED, WorkerState.FAILED)
        return self._held.state in waits or self._held.reason is Reason.INACTIVE

    @property
    def step(self) -> Step | None:
        """The work under way; None if there is none."""
        return self._step

    @contextmanager
    def doing(self, work: Work) -> Iterator[None]:
        """Work that must end in time; a step within another one is a part of it."""
        before = self._step
        self._step = before or Step(work, time.monotonic())
        self._clock.begin(work.name.lower())
        try:
            yield
        finally:
            self._step = before
            if before is None:
                self._clock.end(work.name.lower())

    def status(self) -> WorkerStatus:
        """As SQL shows it."""
        held, now = self._held, time.monotonic()
        reason = held.reason.value if held.reason is not None else None
        if held.error is not None and held.reason is not None:
            reason = f"{held.reason.value}: {held.error}"
        retry_s = max(0.0, held.retry_at - now) if held.retry_at is not None else None
        return WorkerStatus(held.state, reason, retry_s, held.failing, held.paused)

    def live(self) -> None:
        self._serve(WorkerState.LIVE, None)

    def catching_up(self) -> None:
        self._serve(WorkerState.CATCHING_UP, Reason.BEHIND)

    def waits(self, reason: Reason, until: float, error: WalbrookError | None = None) -> None:
        """Nothing is tried before ``until`` (monotonic)."""
        needs_operator = isinstance(error, OperatorError)
        state = WorkerState.FAILED if needs_operator else WorkerState.WAITING
        with self._lock:
            self._held = _Held(state, reason, error, until, error is not None, time.monotonic())

    def parked(self, reason: Reason, paused: tuple[str, ...] = ()) -> None:
        """Nothing is tried before an operator, or the configuration, says so.

        ``paused`` are the names to resume, for one that is paused in some of several sources.
        """
        state = WorkerState.PAUSED if reason is Reason.PAUSED else None
        with self._lock:
            self._held = _Held(state, reason, since=time.monotonic(), paused=paused)

    def recovered(self) -> None:
        """Something was delivered, or there was nothing to deliver."""
        if not self._held.failing:
            return
        with self._lock:
            if self._held.failing:
                held = self._held
                self._held = _Held(held.state, _plain(held), since=held.since)

    def _serve(self, state: WorkerState, reason: Reason | None) -> None:
        with self._lock:
            held = self._held
            if held.state is state:
                return
            # Until something arrives, what failed last is still shown.
            reason = held.reason if held.failing else reason
            self._held = _Held(
                state, reason, held.error if held.failing else None, failing=held.failing,
                since=time.monotonic(),
            )  # fmt: skip


def _plain(held: _Held) -> Reason | None:
    return Reason.BEHIND if held.state is WorkerState.CATCHING_UP else None
