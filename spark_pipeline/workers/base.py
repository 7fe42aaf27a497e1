"""What all workers share: begin from the rows in Postgres, serve, fail, wait, and begin again.

``Worker`` delivers in commit order. ``eventtime.worker`` puts the order of event time between
taking a range and delivering it, and may have several inputs.

Invariants: a worker has one thread, which runs ``run``. What fails is tried again with backoff,
which is the circuit breaker of the consumer's sink, and holds no other consumer. After a failure,
and whenever an operator acts (pause, resume, rewind), a worker begins again from its rows in
Postgres.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import psycopg
import structlog

from cdc.backoff import Backoff
from cdc.config import SinkConfig
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.errors import CorruptionError, GapError, TransientError, WalbrookError
from cdc.log.damage_note import report_damage
from cdc.metrics.clock import PhaseClock
from cdc.state.active_consumers import ActiveConsumers
from cdc.state.health import Condition
from cdc.state.positions import report_consumer
from spark_pipeline.delivery.isolate import as_walbrook_error
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.inputs import Input
from spark_pipeline.workers.retries import is_failure
from spark_pipeline.workers.state import CurrentState, Reason, Work

_logger = structlog.get_logger("walbrook.worker")

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_STATE_AWAY_S = 1.0  # at most between two tries of a state database that does not answer
WAIT_S = 0.5
"""How long a worker waits for a range before it looks whether it has to stop."""
ATTEMPTS_IN_DRIVER = 3
"""Processes in a row that settled nothing for a consumer before it is served outside the driver."""


class RestartError(TransientError):
    """The worker must begin again from its rows."""


class UndeliveredError(TransientError):
    """A delivery failed, and what is known of it is noted."""

    def __init__(self, reason: WalbrookError) -> None:
        super().__init__(reason.what, fix=reason.fix, kind=reason.kind, detail=reason.detail)
        self.reason = reason


class BaseWorker(ABC):
    """Serves one consumer; ``contexts`` are those of its sources, the first of them its home.

    ``attempts`` as ``walbrook.consumers`` has it. ``nudge``, ``defer``, ``resume``, ``drain`` and
    all properties may be used from any thread.
    """

    def __init__(
        self, consumer: SinkConfig, contexts: Sequence[WorkerContext], *, attempts: int = 0
    ) -> None:
        self.name = consumer.name
        self.priority = consumer.priority
        self._clock = PhaseClock("worker", contexts[0].settings.source, consumer.name)
        self.current = CurrentState(self._clock)
        self._consumer = self._configured = consumer
        self._nudged = threading.Event()
        self._woken = threading.Event()
        isolate = attempts > ATTEMPTS_IN_DRIVER
        self.inputs = {
            each.settings.source: Input(
                consumer, each, self._woken, self.current, self._note_serving, isolate=isolate
            )
            for each in contexts
        }
        """By source."""
        self._home = contexts[0]
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        self._deferred_until = 0.0  # monotonic
        self._fits = False  # as far as is known
        self._predecessors: list[BaseWorker] = []
        self.finished = threading.Event()
        """Set once its thread delivers nothing any more."""

    @abstractmethod
    def begin(self) -> bool:
        """Read its rows and take its place; returns whether it may be served now."""

    @abstractmethod
    def step(self, wait_s: float) -> bool:
        """What is due for a retry, then the next range; returns whether there was anything."""

    @abstractmethod
    def settled(self, source: str) -> Cursor | None:
        """Where its row of a source stands, as far as this process wrote or read it."""

    @abstractmethod
    def must_look(self, active: ActiveConsumers, settled: Cursor | None) -> bool:
        """Whether, while it is served, it has to begin again because of what its row says."""

    def run(self) -> None:
        """Serve until it is ended; nothing that breaks on the way ends it."""
        try:
            self._await_predecessors()
            self._serve_until_ended()
        finally:
            self.finished.set()

    def succeed(self, other: BaseWorker) -> None:
        """Begin no earlier than another worker of the consumer has finished; before ``run``."""
        self._predecessors.append(other)

    @property
    def consumer(self) -> SinkConfig:
        """What it serves, as it was configured when it was made."""
        return self._configured

    def end(self) -> None:
        """Let it stop after what is under way; it settles that."""
        for each in self.inputs.values():
            each.context.ended.set()
        self.nudge()

    def _await_predecessors(self) -> None:
        """Also while it is ended itself: its own successor waits for all of them."""
        for other in self._predecessors:
            homes = [self._home, *(each.context for each in other.inputs.values())]
            while not other.finished.wait(WAIT_S) and not any(each.over.is_set() for each in homes):
                pass  # what hangs in a stage that has ended is fenced
        self._predecessors.clear()

    def _serve_until_ended(self) -> None:
        while not self.is_ended:
            try:
                self._begin_and_serve()
            except Exception as error:
                until = time.monotonic() + self._backoff.next_s()
                _logger.exception("worker.broke", consumer=self.name)
                self.current.waits(Reason.CANNOT_BE_SERVED, until, as_walbrook_error(error))
                self._wait(until)
        self.finish()

    def _begin_and_serve(self) -> None:
        try:
            if self.begin():
                self._serve()
            else:
                self._wait(None)
        except RestartError as error:
            _logger.debug("worker.again", consumer=self.name, why=error.what)
        except Exception as error:
            if not self.is_ended:
                self._wait(self.failed(error))
        finally:
            self._leave()

    def finish(self) -> None:
        """The last thing that its thread does."""
        self.close()

    def close(self) -> None:
        self._clock.close()
        for each in self.inputs.values():
            each.close()

    def nudge(self) -> None:
        """Let it look at its rows at once."""
        self._nudged.set()
        self.wake()

    def wake(self) -> None:
        """End a wait."""
        self._woken.set()
        for each in self.inputs.values():
            each.context.feed.wake()

    def defer(self, until: float) -> None:
        """Let it wait until then (monotonic), or until it is resumed."""
        self._deferred_until = until
        self.nudge()

    def resume(self) -> None:
        """A deferred worker goes on."""
        if self._deferred_until:
            self._deferred_until = 0.0
            self.nudge()

    def backfill(self) -> None:  # noqa: B027 (rows that exist already have no event-time order)
        """It has backfills that are to be looked at."""

    def verify(self) -> None:  # noqa: B027 (what stands in event-time order cannot be compared)
        """It has verifications that are to be done."""

    def drain(self, *, by_operator: bool) -> None:  # noqa: B027 (most have nothing to do)
        """The service stops: what the logs have is still delivered."""

    def is_drained(self, source: str, end: int) -> bool:
        """Whether it has delivered what the log of a source has below batch ``end``."""
        return self.inputs[source].batch >= end

    @property
    def is_ended(self) -> bool:
        return any(each.context.ended.is_set() for each in self.inputs.values())

    @property
    def is_held(self) -> bool:
        return self.current.is_held

    @property
    def is_deferred(self) -> bool:
        return self.current.reason is Reason.DEFERRED

    @property
    def conditions(self) -> list[Condition]:
        """What health says of it beside its state."""
        return []

    def failed(self, error: Exception) -> float:
        """Note what failed; returns when (monotonic) it is tried again."""
        self._leave()
        pause_s, reason = self._backoff.next_s(), as_walbrook_error(error)
        if isinstance(error, psycopg.Error):
            pause_s = min(pause_s, _STATE_AWAY_S)
            until = time.monotonic() + pause_s
            self.current.waits(Reason.STATE_UNREACHABLE, until)
            return until
        if isinstance(error, UndeliveredError):
            reason = error.reason
        elif not isinstance(error, WalbrookError):
            _logger.exception("worker.broke", consumer=self.name)
        if isinstance(reason, GapError) and self._backoff.failures == 1:
            pause_s = 0.0  # what the log gave up is passed when it begins again
        if isinstance(reason, CorruptionError):
            # The reader looks, and reads again from the slot what is damaged if it can.
            for each in self.inputs.values():
                report_damage(each.settings.log_directory)
        until = time.monotonic() + pause_s
        if is_failure(reason):
            _logger.warning(
                "worker.failed", consumer=self.name, error=reason, again_in_s=round(pause_s, 1)
            )
        self.current.waits(Reason.of(reason), until, reason)
        if not isinstance(error, UndeliveredError):
            self._note_error(reason)
            for each in self.inputs.values():
                each.context.settler.note_failure(self.name, reason)
        return until

    def _note_serving(self) -> None:
        if all(each.is_live for each in self.inputs.values()):
            self.current.live()
        else:
            self.current.catching_up()

    def _require_fit(self, state: Connection) -> None:
        """OperatorError if it cannot be served as it is configured."""
        if not self._fits:
            self._home.settings.require_fit(self._consumer, state)
            self._fits = True

    def _must_wait(self) -> bool:
        """Leave the feeds, and look whether it is deferred: then nothing is begun."""
        self._nudged.clear()
        self._leave()
        if self._deferred_until > time.monotonic():
            self.current.waits(Reason.DEFERRED, self._deferred_until)
            return True
        self._deferred_until = 0.0
        return False

    def _deliver_due(self) -> bool:
        """Deliver what is due for a retry; returns whether there was anything."""
        due = [each for each in self.inputs.values() if each.retries.due_in_s() == 0.0]
        if not self._consumer.destination.defers or not due:
            return False
        return sum(map(self._deliver_claim, due)) > 0

    def _deliver_claim(self, due: Input) -> bool:
        began = time.monotonic()
        with self.current.doing(Work.DELIVERY), self._home.connections.connection() as state:
            outcome: Outcome | None = due.retries.deliver_due(state, self._home.over)
            if outcome is not None:
                due.measures.delivered(outcome, time.monotonic() - began)
            if outcome is not None and outcome.error is not None:
                report_consumer(state, due.source, self.name, outcome.error)
        if outcome is None:
            return False
        if outcome.error is not None:
            raise UndeliveredError(outcome.error)
        self._succeeded()
        return True

    def _leave(self) -> None:
        for each in self.inputs.values():
            each.leave()

    def _serve(self) -> None:
        while not self.is_ended and not self._nudged.is_set():
            self._woken.clear()
            self.step(WAIT_S)

    def _wait(self, until: float | None) -> None:
        """Until a nudge, the end of the stage, or ``until`` (monotonic)."""
        if until is None and self._deferred_until:
            until = self._deferred_until
        while not self.is_ended:
            left_s = WAIT_S if until is None else min(WAIT_S, until - time.monotonic())
            if left_s <= 0 or self._nudged.wait(left_s):
                return

    def _note_error(self, error: WalbrookError) -> None:
        try:
            with self._home.connections.connection() as state:
                for source in self.inputs:
                    report_consumer(state, source, self.name, error)
        except psycopg.Error as problem:
            _logger.debug("worker.state_unreachable", consumer=self.name, error=problem)

    def _succeeded(self) -> None:
        self._backoff.reset()
        self.current.recovered()
