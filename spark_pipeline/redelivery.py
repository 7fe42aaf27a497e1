"""Delivering what waits in the queues of a source's push consumers, beside its lanes.

A thread looks for messages that are due; each consumer's are delivered by one worker at a time. A
lane holds back whatever belongs to a group that waits, so the two never send changes of one group.
What must always hold: a message leaves the queue only when its destination has it or when it is a
dead letter; no consumer has a worker for longer than one claim takes.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc.config import Sink as SinkConfig
from cdc.connection import Connection, connect
from cdc.connection_pool import ConnectionPool
from cdc.cursor import END, ORIGIN
from cdc.errors import TransientError, WalbrookError
from cdc.queue.claims import ABANDONED, Due, claim, settle_claim
from cdc.queue.events import as_changes
from cdc.queue.report import report_queues
from cdc.replication.stop import StopSignal
from cdc.state.dead_letters import report_dead_letters
from cdc.state.lost_destinations import report_lost_destinations
from cdc.state.positions import report_consumer
from sinks.ledgered import LedgerPlace
from spark_pipeline.delivery import Share, desk_for, ledger_of
from spark_pipeline.desk import Desk, given_up
from spark_pipeline.expressions.verdicts import added_columns
from spark_pipeline.forms import shows_before
from spark_pipeline.ledgers import ledger_name, needs_ledger
from spark_pipeline.one_by_one import OneByOne
from spark_pipeline.outcome import Outcome, below, together
from spark_pipeline.poison import is_suspect, told
from spark_pipeline.queues import Queues
from spark_pipeline.settings import LaneSettings

_logger = structlog.get_logger("walbrook.queue")

_LOOK_S = 1.0
_REPORT_S = 5.0
_WORKERS = 16
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.5, 30.0
_EVERY_REFUSAL = 1 << 30  # each of these was refused before: that says nothing of the destination
_PURPOSE = "queue"
_REQUESTS = 10  # of one claim: between two of them somebody else has a turn, and a stop is heard
_WORN_OUT = "it was tried as often as max_deliveries allows"
ABANDONED_MAX = 5
"""How many processes may end while they deliver a message alone before it is a dead letter."""
_KILLER = (
    f"{ABANDONED_MAX} processes of the service ended while each was delivering this message alone. "
    "To fix it: look in the service's log for what ended them, and redeliver it then"
)


class Redelivery:
    """Serves the queues of one source until told to stop."""

    def __init__(self, settings: LaneSettings, queues: Queues, stop: StopSignal, run: str) -> None:
        self._settings = settings
        self._queues = queues
        self._stop = stop
        self._run = run
        self._holder = f"{settings.source}:{run}"
        self._consumers = {
            each.name: each for each in (*settings.consumers, *settings.in_event_time)
        }
        self._connections = ConnectionPool(settings.state_dsn, name=f"{settings.source}:queue")
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}  # monotonic
        self._failures: dict[str, int] = {}
        self._reported = 0.0  # monotonic
        self._over = threading.Event()  # nobody waits for a delivery slot any more

    def serve(self) -> None:
        """Look, hand out what is due, wait; a state database that is away is waited for."""
        state: Connection | None = None
        is_away = False
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="redelivery") as workers:
            while not self._stop.requested:
                pause_s = _LOOK_S
                try:
                    if state is None or state.closed:
                        state = self._connect()
                    pause_s = self._look(state, workers)
                    self._report(state)
                    is_away = False
                except psycopg.Error as error:
                    if not is_away:
                        _logger.warning("queue.state_unreachable", error=error)
                    state, is_away = None, True
                self._queues.news.wait(pause_s)
                self._queues.news.clear()
            self._over.set()
        self._connections.close()
        if state is not None:
            state.close()

    def _look(self, state: Connection, workers: ThreadPoolExecutor) -> float:
        """Hand out what is due; says after how long to look again."""
        pause_s, now = _LOOK_S, time.monotonic()
        for each in self._queues.look(state, self._settings.source):
            if each.paused or each.consumer not in self._consumers:
                continue
            with self._lock:
                held_back = self._not_before.get(each.consumer, 0.0) > now
                if each.consumer in self._busy or held_back or self._queues.failing(each.consumer):
                    continue
                if each.in_s > 0:
                    pause_s = min(pause_s, each.in_s)
                    continue
                self._busy.add(each.consumer)
            workers.submit(self._serve, each)
        with self._lock:
            if not self._busy:
                self._connections.close()
        return max(pause_s, 0.02)

    def _report(self, state: Connection) -> None:
        """Now and then let health say what waits."""
        if time.monotonic() - self._reported >= _REPORT_S:
            self._reported = time.monotonic()
            report_queues(state, self._settings.source, self._settings.term)
            report_lost_destinations(state, self._settings.source, self._settings.term)

    def _serve(self, due: Due) -> None:
        """One claim of one consumer; if there was anything, somebody looks again at once."""
        name, some = due.consumer, False
        try:
            with self._connections.connection() as state:
                some = self._deliver(state, due)
        except (WalbrookError, psycopg.Error) as error:
            self._failed(name, error)
        except Exception as error:
            _logger.exception("queue.broke", consumer=name)
            self._failed(name, error)
        finally:
            with self._lock:
                self._busy.discard(name)
            if some:
                self._queues.news.set()

    def _deliver(self, state: Connection, due: Due) -> bool:
        """One claim; says whether there was anything."""
        name, consumer = due.consumer, self._consumers[due.consumer]
        most = _REQUESTS * consumer.effective_batch_size
        rows = claim(state, due.id, self._settings.term, self._holder, most)
        if not rows.num_rows:
            return False
        share = self._share(consumer, due.ledger)
        slots, source = self._settings.slots, self._settings.source
        with slots.hold(source, name, consumer.priority, self._over):
            outcome = self._send(share, rows)
        done = _delivered(rows, outcome)
        settle_claim(
            state,
            source=self._settings.source,
            term=self._settings.term,
            consumer=name,
            holder=self._holder,
            done=done,
            absorbed=outcome.absorbed,
            tried=outcome.aside,
            ledger=ledger_name(share.ledger),
        )
        self._queues.refusals.note(outcome)
        self._forget(share, done)
        if outcome.aside is not None and pc.any(outcome.aside.column("dead")).as_py():
            report_dead_letters(state, self._settings.source, self._settings.term)
        if outcome.error is not None:
            report_consumer(state, self._settings.source, name, outcome.error)
            self._failed(name, outcome.error)
            return False
        with self._lock:
            self._failures.pop(name, None)
            self._not_before.pop(name, None)
        return True

    def _share(self, consumer: SinkConfig, ledger: str) -> Share:
        address = self._settings.ledger
        place = None
        if address is not None and needs_ledger(consumer):
            place = LedgerPlace(address, ledger, queued=True)
        return Share(
            consumer, self._settings.origin, self._run, ORIGIN, END, [],
            strikes_max=_EVERY_REFUSAL, ledger=place,
        )  # fmt: skip

    def _send(self, share: Share, rows: pa.RecordBatch) -> Outcome:
        """Deliver what may still be tried; the rest is given up.

        A message that is refused too often is dead at once. What is left for here are messages on
        which processes ended, and a configuration that allows less than before.
        """
        killers = pc.greater_equal(rows.column(ABANDONED), ABANDONED_MAX)
        worn_out = pc.and_not(
            pc.greater_equal(rows.column("deliveries"), share.consumer.max_deliveries), killers
        )
        if not killers.true_count and not worn_out.true_count:
            return self._try(share, rows)
        dead = [
            given_up(rows.filter(killers), _KILLER),
            given_up(rows.filter(worn_out), _WORN_OUT),
        ]
        rest = rows.filter(pc.invert(pc.or_(killers, worn_out)))
        outcome = self._try(share, rest) if rest.num_rows else Outcome(share.consumer.name, END)
        return replace(outcome, aside=together([*dead, outcome.aside]))

    def _try(self, share: Share, rows: pa.RecordBatch) -> Outcome:
        """Deliver; if that breaks in a way nobody foresaw, message by message."""
        before = ("before",) if shows_before(share.consumer) else ()
        changes = as_changes(rows, (*before, *added_columns(share.consumer)))
        try:
            return _taken(desk_for(share, _PURPOSE), changes)
        except Exception as error:
            if not is_suspect(error):
                raise
            _logger.warning("queue.broke", consumer=share.consumer.name, error=told(error))
            return _taken(desk_for(share, _PURPOSE, OneByOne), changes)

    def _forget(self, share: Share, done: pa.RecordBatch) -> None:
        """What left the queue cannot come again; a ledger elsewhere may know it a while longer."""
        ledger = ledger_of(share)
        if ledger is None or ledger.with_state or share.ledger is None or not done.num_rows:
            return
        lsn, idx = (done.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
        with suppress(TransientError):
            ledger.drop(share.ledger.ledger, lsn, idx)

    def _failed(self, name: str, error: Exception) -> None:
        """The destination as a whole: it is left alone for a while."""
        with self._lock:
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(failures - 1, 20))
            pause_s = longest * random.uniform(0.5, 1.0)
            self._not_before[name] = time.monotonic() + pause_s
        _logger.warning("queue.failed", consumer=name, error=error, again_in_s=round(pause_s, 1))

    def _connect(self) -> Connection:
        return connect(self._settings.state_dsn, name=f"{self._settings.source}:queue")


def _taken(desk: Desk, changes: pa.RecordBatch) -> Outcome:
    return desk.finish(END) if desk.take(changes) else desk.outcome


def _delivered(rows: pa.RecordBatch, outcome: Outcome) -> pa.RecordBatch:
    """Of the rows of a claim those that the destination has."""
    taken = below(rows, outcome.cursor)
    if outcome.aside is None:
        return taken
    lsn, idx = (taken.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
    aside = set(
        zip(
            *(outcome.aside.column(n).to_pylist() for n in ("commit_lsn", "commit_idx")),
            strict=True,
        )
    )
    keep = np.array([pair not in aside for pair in zip(lsn.tolist(), idx.tolist(), strict=True)])
    return taken.filter(pa.array(keep, pa.bool_()))
