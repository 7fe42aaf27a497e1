"""The thread that serves one consumer in event-time order, whatever happens to it.

What must always hold: what cannot be delivered is tried again with a pause, and nothing else waits
for it; whatever an operator does to the consumer's rows is seen within a second, and then it is
taken up anew from what they say.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Final

import psycopg
import structlog
from pyspark.sql import SparkSession

from cdc.config import Config
from cdc.config import Sink as SinkConfig
from cdc.config.event_time import column_in_row
from cdc.connection import Connection, connect
from cdc.decoding.plan import plan_for
from cdc.error_text import public_text
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.log.manifest import read_manifest
from cdc.log.open import open_log
from cdc.replication.partition_roots import partition_roots
from cdc.replication.published import published_relations
from cdc.replication.stop import StopSignal
from cdc.state.event_controls import read_controls
from cdc.state.event_partitions import known_tables
from cdc.state.event_time import look
from cdc.state.gaps import skip_evicted
from cdc.state.health import Condition, Scope, report_conditions
from cdc.state.positions import MovedError, left_behind, report_consumer
from cdc.state.workers import WorkerState, WorkerStatus, show_worker
from spark_pipeline.delivery.isolate import told
from spark_pipeline.delivery.matching import Match
from spark_pipeline.delivery.refusal_log import RefusalLog
from spark_pipeline.eventtime.conditions import failing, full, paused
from spark_pipeline.eventtime.courier import UndeliveredError
from spark_pipeline.eventtime.partitions import StrangeTableError
from spark_pipeline.eventtime.passage import EventPassage
from spark_pipeline.eventtime.windows.due import SparkWindows, Windows
from spark_pipeline.workers.context import RUN
from spark_pipeline.workers.notifications import heard, listen
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.settings import StageSettings
from spark_pipeline.workers.state import Reason

_logger = structlog.get_logger("walbrook.event_time")

_NAME: Final = "event_time"
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_STATE_AWAY_S = 1.0  # between two looks for a state database that does not answer
_TICK_S: Final = 0.1
_LOOK_S: Final = 1.0
_RENEW_S: Final = 60.0
_STUCK_S: Final = 5.0
_CONNECT_S: Final = 5
_LIVE: Final = WorkerStatus(WorkerState.LIVE)


class _AgainError(TransientError):
    """It must be taken up anew: somebody changed its rows."""


class EventStage:
    """Serves a consumer until a stop; ``settings`` by database."""

    def __init__(
        self,
        spark: SparkSession | None,
        config: Config,
        consumer: SinkConfig,
        settings: Mapping[str, StageSettings],
        stop: StopSignal,
    ) -> None:
        self._spark = spark
        self._config = config
        self._consumer = consumer
        self._settings = {name: settings[name] for name in consumer.sources}
        refusals = RefusalLog()
        self._queues = {
            name: RetryQueue(consumer, each, RUN, refusals) for name, each in self._settings.items()
        }
        self._stop = stop
        self._over = threading.Event()
        self._drained_by: float | None = None  # monotonic, once it drains
        self._failures = 0
        self._state_away = False
        self._roots: dict[str, dict[str, str]] = {}
        self._strange: dict[str, set[str]] = {name: set() for name in self._settings}
        self._relations: dict[str, list[bytes]] = {}  # for windows alone
        self._looked = self._renewed = self._moved = 0.0
        self._told_stuck = True  # an earlier process may have told something

    def run(self, drain_timeout_s: float) -> None:
        """Until a stop, then drain."""
        while True:
            try:
                self._serve(drain_timeout_s)
                return
            except (_AgainError, MovedError) as error:
                _logger.info("event_time.again", consumer=self._consumer.name, why=error.what)
            except StrangeTableError as error:
                _logger.info("event_time.again", consumer=self._consumer.name, why=error.what)
                self._strange[error.source].add(error.table)
            except (WalbrookError, psycopg.Error) as error:
                self._failed(error)
                if self._is_over(drain_timeout_s):
                    return
            except Exception as error:
                _logger.exception("event_time.broke", consumer=self._consumer.name)
                self._failed(told(error))
                if self._is_over(drain_timeout_s):
                    return

    def _is_over(self, drain_timeout_s: float) -> bool:
        """Whether a stop was asked for, and the time to drain has passed."""
        if not self._stop.requested:
            return False
        now = time.monotonic()
        self._drained_by = self._drained_by or now + drain_timeout_s
        if now < self._drained_by:
            time.sleep(_TICK_S)  # a stop ends every other pause
        return now >= self._drained_by

    def _serve(self, drain_timeout_s: float) -> None:
        """From what its rows say on, until they are changed or a stop."""
        if not self._wait_for_logs():
            return
        home = next(iter(self._settings))
        with connect(self._state_dsn, name=f"{home}:{_NAME}"[:60]) as state:
            listen(state)
            if not self._wait_while_paused(state):
                return
            self._settings[home].require_fit(self._consumer, state)
            self._pass_evicted(state)
            self._find_tables(state)
            for queue in self._queues.values():
                queue.look(state)
            passage = EventPassage(
                self._consumer,
                {name: self._settings_of(name) for name in self._settings},
                state,
                roots=self._roots,
                queues=self._queues,
                run=RUN,
                over=self._over,
                spark=self._spark,
                windows=self._windows(),
            )
            with closing(passage):
                self._show(state, _LIVE)
                self._renewed = self._moved = time.monotonic()
                while not self._stop.requested:
                    if not self._turn(state, passage):
                        passage.wait()
                if self._drained_by is None:
                    self._drained_by = time.monotonic() + drain_timeout_s
                self._drain(state, passage, self._drained_by)
                passage.settle()
                passage.show(at_once=True)

    def _turn(
        self,
        state: Connection,
        passage: EventPassage,
        *,
        flush: bool = False,
        drained_by: float | None = None,
    ) -> bool:
        """One turn; a failure is followed by a pause, which a stop cuts short."""
        try:
            some = self._deliver_due(state) or passage.turn(flush=flush)
        except UndeliveredError as error:
            deadline = time.monotonic() + self._failed(error)
            while time.monotonic() < min(deadline, drained_by or deadline):
                if drained_by is not None:
                    time.sleep(_TICK_S)
                elif self._stop.wait(_TICK_S):
                    break
                self._look(state, passage)
            return True
        if some:
            self._moved = time.monotonic()
            if self._failures:
                self._failures = 0
                self._show(state, _LIVE)
        passage.show()
        self._tell_stuck(state, passage)
        self._look(state, passage)
        return some

    def _deliver_due(self, state: Connection) -> bool:
        """Deliver what is due for a retry; returns whether there was anything."""
        some = False
        for queue in self._queues.values():
            outcome = queue.deliver_due(state, self._over)
            if outcome is not None and outcome.error is not None:
                raise UndeliveredError(outcome.error)
            some |= outcome is not None
        return some

    def _drain(self, state: Connection, passage: EventPassage, deadline: float) -> None:
        """Deliver what the logs hold and, if that is wanted, what is held back."""
        left_s = max(0.0, deadline - time.monotonic())
        over = threading.Timer(left_s, self._over.set)  # nobody waits for a slot after that
        over.start()
        try:
            self._drain_until(state, passage, deadline)
        finally:
            over.cancel()

    def _drain_until(self, state: Connection, passage: EventPassage, deadline: float) -> None:
        # After any other end the driver is started again, and what is on time may still come.
        flushes = self._consumer.flushes_on_stop and self._stop.by_operator
        while time.monotonic() < deadline:
            if self._turn(state, passage, drained_by=deadline):
                continue
            if not passage.at_end:
                passage.wait()
            elif not flushes or not self._turn(state, passage, flush=True, drained_by=deadline):
                break
        else:
            _logger.warning("event_time.drain_timeout", consumer=self._consumer.name)

    def _look(self, state: Connection, passage: EventPassage) -> None:
        """For what an operator did, at once if it was heard of."""
        now = time.monotonic()
        told = heard(state, *self._settings)
        if not told and now - self._looked < _LOOK_S:
            return
        self._looked = now
        for queue in self._queues.values():
            queue.look(state)
        found = look(state, self._consumer.name, self._settings)
        for name in self._settings:
            each = found.get(name)
            if each is None:
                raise _AgainError(f"its row for {name} is gone")
            if each.paused:
                raise _AgainError("it was paused")
            if each.ledger != passage.ledgers[name] or each.cursor != passage.cursors[name]:
                raise _AgainError(f"its cursor in {name} was moved")
            if each.untold and not passage.tells:
                raise _AgainError("its sink has to be told of a gap")
            passage.finished(name, each.finished)
        passage.follow(read_controls(state, self._consumer.name, self._settings))
        if now - self._renewed >= _RENEW_S:
            self._renewed = now
            before = dict(self._relations), self._times()
            self._find_tables(state)
            if (self._relations, self._times()) != before:
                raise _AgainError("its tables have changed")
            for name, roots in self._roots.items():
                passage.renew(name, roots)

    def _wait_for_logs(self) -> bool:
        """Until their readers have begun them there is nothing to read."""
        while any(read_manifest(s.log_directory) is None for s in self._settings.values()):
            if self._stop.wait(_TICK_S):
                return False
        return True

    def _wait_while_paused(self, state: Connection) -> bool:
        told = False
        while True:
            found = look(state, self._consumer.name, self._settings)
            if not any(each.paused for each in found.values()):
                return True
            if not told:
                told = True
                self._show(state, WorkerStatus(WorkerState.PAUSED, Reason.PAUSED.value))
                held = [name for name, each in found.items() if each.paused]
                self._report(state, [paused(self._consumer, held)], scope="worker_")
            if self._stop.wait(_LOOK_S / 2):
                return False

    def _pass_evicted(self, state: Connection) -> None:
        """Move over what the logs gave up on purpose; gaps are told by the passage."""
        for name, settings in self._settings.items():
            with closing(open_log(settings.log_directory)) as view:
                earliest, evicted = view.floors()
            skip_evicted(state, source=name, term=settings.term, evicted=evicted)
            lost = left_behind(state, name, earliest).get(self._consumer.name)
            if lost is not None:
                raise lost

    def _find_tables(self, state: Connection) -> None:
        """The tables of each database now; one that does not answer has those it had.

        Without its answer nothing can be made of a table that is new.
        """
        for name in self._settings:
            database = self._config.database(name)
            try:
                with connect(database.dsn(), name=_NAME, statement_s=_CONNECT_S) as source:
                    found = partition_roots(source, database.publication.name)
                    if self._consumer.window is not None:
                        published = published_relations(source, database.publication.name)
                        self._relations[name] = published
            except psycopg.Error as error:
                found = self._roots.get(name) or known_tables(state, self._consumer.name, name)
                if self._strange[name] - found.keys():
                    raise
                _logger.warning("event_time.tables_unknown", source=name, error=error)
            # Changes may still come of a table that is no longer there.
            self._roots[name] = {table: table for table in self._strange[name]} | found

    def _windows(self) -> Windows | None:
        """Its windows over the tables as they are now."""
        window, match = self._consumer.window, Match.of(self._consumer)
        if window is None or self._spark is None:
            return None
        tables = {
            name: [
                plan
                for plan in map(plan_for, self._relations.get(name, []))
                if match.takes(plan.relation.namespace, plan.relation.name)
            ]
            for name in self._settings
        }
        origins = [each.origin for each in self._settings.values()]
        return SparkWindows(self._spark, self._consumer.name, window, tables, origins)

    def _settings_of(self, source: str) -> StageSettings:
        return replace(
            self._settings[source],
            consumers=[self._consumer],
            in_event_time=[],
            times=self._times()[source],
        )

    def _times(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """The columns that hold event times, by database, as decode is told of them."""
        config = self._consumer.event_time
        assert config is not None
        found = {}
        for source, roots in self._roots.items():
            default = None if config.column is None else column_in_row(config.column)
            times = {} if default is None else {"": default}
            times |= {str(t.name): column_in_row(t.column) for t in config.tables if t.column}
            for table, root in roots.items():
                timed = config.of_table(*_parts(table), _parts(root))
                if timed is not None and timed.column != default:
                    times[table] = timed.column
            found[source] = tuple(sorted(times.items()))
        return found

    def _failed(self, error: Exception) -> float:
        """Say what keeps it, and wait a little longer each time; gives for how long."""
        self._failures += 1
        longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(self._failures - 1, 20))
        pause_s: float = longest * random.uniform(0.5, 1.0)
        if isinstance(error, psycopg.OperationalError):
            pause_s = min(pause_s, _STATE_AWAY_S)
        what = public_text(error)
        if not self._state_away:
            _logger.warning(
                "event_time.failed", consumer=self._consumer.name, error=what,
                again_in_s=round(pause_s, 1),
            )  # fmt: skip
        try:
            with connect(self._state_dsn, name=f"{_NAME}:failed") as state:
                by_hand = isinstance(error, OperatorError)
                held = WorkerState.FAILED if by_hand else WorkerState.WAITING
                self._show(state, WorkerStatus(held, what, pause_s, failing=True))
                for name in self._settings:
                    report_consumer(state, name, self._consumer.name, error)
            self._state_away = False
        except psycopg.Error as problem:
            if not self._state_away:
                _logger.warning("event_time.state_unreachable", error=problem)
            self._state_away = True
        if not isinstance(error, UndeliveredError):
            self._stop.wait(pause_s)
        return pause_s

    def _tell_stuck(self, state: Connection, passage: EventPassage) -> None:
        """A buffer that is full and cannot be emptied by reading on is told of."""
        stuck = time.monotonic() - self._moved > _STUCK_S and passage.stuck
        if stuck != self._told_stuck:
            self._told_stuck = stuck
            self._report(state, [full(self._consumer)] if stuck else [], scope="event_time_")

    def _show(self, state: Connection, status: WorkerStatus) -> None:
        for name in self._settings:
            show_worker(state, name, self._consumer.name, status)
        if status.state is WorkerState.LIVE:
            self._report(state, [], scope="worker_")
        elif status.failing:
            self._report(state, [failing(self._consumer.name, status)], scope="worker_")

    def _report(self, state: Connection, conditions: list[Condition], *, scope: Scope) -> None:
        for name, settings in self._settings.items():
            report_conditions(
                state, name, settings.term, conditions, consumer=self._consumer.name, scope=scope
            )

    @property
    def _state_dsn(self) -> str:
        return next(iter(self._settings.values())).state_dsn


def _parts(table: str) -> tuple[str, str]:
    schema, _, name = table.partition(".")
    return schema, name
