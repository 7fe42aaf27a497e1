"""The worker of a consumer in event-time or processing-time order, with one input per source.

It is served like any other worker. Between taking a range and delivering it stands ``Ordering``.

Invariants: a release that its destination did not take stays, and is tried again with backoff,
without being read again. Whatever an operator does to the consumer's rows is seen within a second;
the worker then begins again from what they say. The stages of its sources call ``must_look`` for
that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

import psycopg
import structlog

from cdc.config import SinkConfig
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.errors import WalbrookError
from cdc.state.active_consumers import ActiveConsumers
from cdc.state.event_controls import read_controls
from cdc.state.event_time import Look, look
from cdc.state.gaps import skip_evicted
from cdc.state.health import Condition
from cdc.state.positions import MovedError, left_behind
from spark_pipeline.eventtime.ordering import Ordering
from spark_pipeline.eventtime.partitions import UnknownTableError
from spark_pipeline.eventtime.tables import SourceTables
from spark_pipeline.workers.base import BaseWorker, RestartError, UndeliveredError
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.inputs import POLL_S, Input
from spark_pipeline.workers.state import Reason

_logger = structlog.get_logger("walbrook.event_time")

_RENEW_S: Final = 60.0
_STUCK_S: Final = 5.0
_IDLE_S: Final = 0.2  # at most between two looks at the clock


class EventTimeWorker(BaseWorker):
    """Serves one consumer; ``contexts`` by source, in the order of its configuration."""

    def __init__(
        self,
        consumer: SinkConfig,
        contexts: Mapping[str, WorkerContext],
        *,
        attempts: int = 0,
        tables: SourceTables | None = None,
    ) -> None:
        super().__init__(consumer, [*contexts.values()], attempts=attempts)
        self.home = self._home.settings.source
        """The source whose stage runs its thread."""
        self.ordering: Ordering | None = None
        self._tables = tables or SourceTables(consumer, contexts)
        self._held = ExitStack()  # what an ordering needs
        self._state: Connection | None = None
        self._settled: dict[str, Cursor] = {}
        self._look_soon = True
        self._renewed = self._moved = 0.0  # monotonic
        self._goes_on = False  # with a release that its destination did not take
        self._is_stuck = False
        self._is_drained = True
        self._flushes = False

    @property
    def conditions(self) -> list[Condition]:
        if not self._is_stuck:
            return []
        assert self._consumer.event_time is not None
        most = self._consumer.event_time.max_buffer_bytes
        return [
            Condition(
                "worker_full",
                "error",
                f"{self.name} waits: its buffer holds {most} bytes, as much as it may, and none of "
                "it is due before more is read",
                fix="raise event_time.max_buffer_bytes, or lower late_tolerance or idle_timeout; "
                "walbrook.watermarks shows which table holds the others back",
            )
        ]

    def settled(self, source: str) -> Cursor | None:
        return self._settled.get(source)

    def must_look(self, active: ActiveConsumers, settled: Cursor | None) -> bool:
        """Its own thread looks, at all of its rows at once."""
        self._look_soon = True
        self.wake()
        return False

    def drain(self, *, by_operator: bool) -> None:
        # After any other end the driver is started again, and what is on time may still come.
        self._is_drained = False
        self._flushes = by_operator and self._consumer.flushes_on_stop
        self.wake()

    def is_drained(self, source: str, end: int) -> bool:
        return self._is_drained and super().is_drained(source, end)

    def begin(self) -> bool:
        goes_on, self._goes_on = self._goes_on, False
        if goes_on and not self._nudged.is_set():
            return True
        self._settle()
        self._end_ordering()
        if self._must_wait():
            return False
        with self._home.connections.connection() as state:
            if not self._may_serve(look(state, self.name, self.inputs)):
                return False
            self._require_fit(state)
            for each in self.inputs.values():
                each.open()
            self._pass_evicted(state)
            self._tables.find(state)
            for each in self.inputs.values():
                each.retries.look(state)
        self._state = self._held.enter_context(self._home.connections.connection())
        self.ordering = Ordering(
            self._consumer,
            self.inputs,
            self._state,
            self.current,
            roots=self._tables.roots,
            windows=self._tables.windows(),
        )
        self._settled = self.ordering.cursors
        self._renewed = self._moved = time.monotonic()
        return True

    def step(self, wait_s: float) -> bool:
        ordering, state = self.ordering, self._state
        assert ordering is not None
        assert state is not None
        try:
            if self._look_soon:
                self._look(state, ordering)
            some = self._deliver_due() | ordering.turn()
            if not some and self._flushes and ordering.at_end:
                some = ordering.turn(flush=True)
        except UndeliveredError:
            self._goes_on = True
            raise
        except Exception as error:
            self._end_ordering()  # a range may be half pushed: nothing more may be settled of it
            if isinstance(error, UnknownTableError):
                self._tables.add_unknown(error.source, error.table)
            if isinstance(error, UnknownTableError | MovedError):
                raise RestartError(error.what) from None
            raise
        self._settled = ordering.cursors
        self._note(ordering, some)
        if not some:
            self._is_drained = ordering.at_end
            in_feeds = all(each.is_live for each in self.inputs.values())
            self._woken.wait(min(wait_s, _IDLE_S if in_feeds else POLL_S))
        return some

    def finish(self) -> None:
        """Write how far it has come."""
        self._settle()
        self.close()

    def _settle(self) -> None:
        """Write how far it has come, unless that broke."""
        try:
            if self.ordering is not None:
                self.ordering.settle()
                self.ordering.show(at_once=True)
        except (WalbrookError, psycopg.Error) as error:
            _logger.warning("event_time.unsettled", consumer=self.name, error=error)

    def _deliver_claim(self, due: Input) -> bool:
        assert self.ordering is not None
        self.ordering.settle_delivered()
        return super()._deliver_claim(due)

    def close(self) -> None:
        self._end_ordering()
        super().close()

    def _end_ordering(self) -> None:
        self.ordering = self._state = None
        self._is_stuck = False
        self._held.close()

    def _note(self, ordering: Ordering, some: bool) -> None:
        if some:
            self._moved = time.monotonic()
            self._succeeded()
            for each in self.inputs.values():
                each.isolate = False
        ordering.show()
        self._is_stuck = time.monotonic() - self._moved > _STUCK_S and ordering.is_stuck

    def _may_serve(self, found: Mapping[str, Look]) -> bool:
        if found.keys() < self.inputs.keys():
            self.current.parked(Reason.INACTIVE)
            return False
        paused = [name for name, each in found.items() if each.paused]
        if paused:
            several = len(self.inputs) > 1
            names = [f"{source}/{self.name}" if several else self.name for source in paused]
            self.current.parked(Reason.PAUSED, tuple(names))
        return not paused

    def _look(self, state: Connection, ordering: Ordering) -> None:
        """For what an operator did."""
        ordering.settle_delivered()
        self._look_soon, now = False, time.monotonic()
        found = look(state, self.name, self.inputs)
        for name in self.inputs:
            each = found.get(name)
            if each is None or each.paused:
                raise RestartError(f"its row for {name} is gone, or it was paused")
            if (each.ledger, each.cursor) != (ordering.ledgers[name], ordering.cursors[name]):
                raise RestartError(f"its cursor in {name} was moved")
            if each.unreported and not ordering.has_gaps:
                raise RestartError("its sink has to hear of a gap")
            ordering.finished(name, each.finished)
        ordering.follow(read_controls(state, self.name, self.inputs))
        if now - self._renewed >= _RENEW_S:
            self._renewed = now
            if self._tables.find(state):
                raise RestartError("its tables have changed")
            for name, roots in self._tables.roots.items():
                ordering.renew(name, roots)

    def _pass_evicted(self, state: Connection) -> None:
        """Move over what the logs gave up on purpose; its sink hears of gaps from the ordering."""
        for name, each in self.inputs.items():
            earliest, evicted = each.log.floors()
            skip_evicted(state, source=name, term=each.settings.term, evicted=evicted)
            lost = left_behind(state, name, earliest).get(self.name)
            if lost is not None:
                raise lost
