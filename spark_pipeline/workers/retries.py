"""The retry queue of one push consumer: what waits in it, and delivering what is due.

The worker of the consumer asks it before every delivery, and lets it deliver due messages first; so
fresh changes and retries of a group never go out side by side.

Invariants: a message whose group waits is held back. A message leaves the queue only when its
destination has it or when it is a dead letter. A message that ended ``ABANDONED_MAX`` processes
becomes a dead letter. A claim is bounded in rows.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import SinkConfig
from cdc.connection import Connection
from cdc.cursor import END, ORIGIN, Cursor
from cdc.errors import TransientError, WalbrookError
from cdc.queue.claims import ABANDONED, Due, claim, due, settle_claim
from cdc.state.blocked_groups import NOTHING, BlockedGroups
from cdc.state.dead_letters import report_dead_letters
from cdc.state.queued_messages import QUEUE_MAX, as_changes, waiting_for
from cdc.trace.record_log import RecordLog
from cdc.trace.records import RetryClaim, refusals_of, shown
from sinks.ledgered import LedgerPlace
from spark_pipeline.delivery.deliver import Share, ledger_of
from spark_pipeline.delivery.ledgers import ledger_name, needs_ledger
from spark_pipeline.delivery.one_by_one import deliver_messages
from spark_pipeline.delivery.outcome import Outcome, below, together
from spark_pipeline.delivery.refusal_log import RefusalLog
from spark_pipeline.delivery.sender import REFUSALS_MAX, REFUSES_ALL, given_up
from spark_pipeline.delivery.value_formats import shows_before
from spark_pipeline.delivery.verdicts import added_columns
from spark_pipeline.feed.stage_settings import StageSettings

QUEUE_FULL = "queue_full"
"""The kind of the error that says that no more may wait."""

_ALLOWED_MAX = 10_000
_MANY, _LOOK_S = 1_000, 1.0
_EVERY_REFUSAL = 1 << 30  # each of these was refused before: that says nothing of the destination
_PURPOSE = "queue"
_REQUESTS = 10  # of one claim: between two of them fresh changes have a turn
_WORN_OUT = "it was tried as often as max_deliveries allows"
ABANDONED_MAX = 5
"""How many processes may end while they deliver a message alone before it is a dead letter."""
_KILLER = (
    f"{ABANDONED_MAX} processes of the service ended while each was delivering this message alone. "
    "To fix it: look in the service's log for what ended them, and redeliver it then"
)


class RetryQueue:
    """That of one consumer of one source, for one thread; ``note`` may be called from any.

    ``run`` names the stage; ``feed_run`` is its run of the feed: a later one takes over.
    """

    def __init__(
        self,
        consumer: SinkConfig,
        settings: StageSettings,
        run: str,
        refusals: RefusalLog,
        feed_run: int | None = None,
        records: RecordLog | None = None,
    ) -> None:
        self._consumer = consumer
        self._settings = settings
        self._run = run
        self._feed_run = feed_run
        self._holder = f"{settings.source}:{run}"
        self._refusals = refusals
        self._records = records or RecordLog(settings.source, None)
        self._refused = 0  # in a row
        self._allowed = REFUSALS_MAX
        self._looked: tuple[BlockedGroups, float] | None = None  # what waited, and when (monotonic)
        self._lock = threading.Lock()
        self._due: Due | None = None
        self._due_at: float | None = None  # monotonic; None: nothing waits, as far as is known
        self._is_known = False
        self._version = 0  # counts what may have made a look out of date

    @property
    def version(self) -> int:
        """To be read before a look, and given to ``note`` with what it found."""
        with self._lock:
            return self._version

    def note(self, found: Due | None, version: int) -> None:
        """What a look found; nothing, if something was queued since the look began."""
        with self._lock:
            if version == self._version:
                self._due, self._is_known = found, True
                self._due_at = None if found is None else time.monotonic() + found.in_s

    def due_in_s(self) -> float | None:
        """In how many seconds something is due; None if nothing waits, 0 if that is not known."""
        with self._lock:
            if not self._is_known:
                return 0.0
            return None if self._due_at is None else max(0.0, self._due_at - time.monotonic())

    def before(self, state: Connection, share: Share) -> Share:
        """The share as it may be delivered: with what the queue holds back."""
        if not self._consumer.destination.defers:
            return share
        if not self._is_known:
            self.look(state)
        share = replace(share, refusals=self._refused, refusals_max=self._allowed)
        if self._due_at is None:
            return share
        waiting = self._waiting(state)
        if waiting.count < QUEUE_MAX:
            return replace(share, waiting=waiting)
        full = TransientError(
            f"{waiting.count} messages wait in the queue of {self._consumer.name}, as many as may",
            fix="look at walbrook.events for what its destination refuses, and why; it takes new "
            "changes when fewer wait, and the change log keeps them until then",
            kind=QUEUE_FULL,
        )
        return replace(share, end=share.start, slices=[], stop_reason=full)

    def settled(self, outcome: Outcome) -> None:
        """What was settled of fresh changes."""
        self._refusals.note(outcome)
        error = outcome.error
        if outcome.queued is not None:
            self._looked = None
            with self._lock:
                self._is_known = False
                self._version += 1
        self._refused = outcome.refusals
        if outcome.delivered or outcome.absorbed:
            self._allowed = REFUSALS_MAX
        if error is not None and error.kind == REFUSES_ALL:
            # Perhaps there are as many bad messages in a row: each try is allowed more, so the
            # consumer gets past them in the end.
            self._allowed = min(self._allowed * 2, _ALLOWED_MAX)
            self._refused = 0

    def look(self, state: Connection) -> None:
        """Ask what waits, and when the first of it is due."""
        self._looked = None
        with self._lock:
            self._version += 1
            version = self._version
        found = due(state, self._settings.source, self._consumer.name)
        self.note(next(iter(found), None), version)

    def deliver_due(self, state: Connection, over: threading.Event) -> Outcome | None:
        """One claim of what is due, delivered and settled; None if nothing is due."""
        if not self._consumer.destination.defers:
            return None
        if not self._is_known:
            self.look(state)
        found = self._due
        if found is None or found.paused or self.due_in_s() != 0.0:
            return None
        most = _REQUESTS * self._consumer.effective_batch_size
        rows = claim(state, found.id, self._settings.term, self._holder, most)
        if not rows.num_rows:
            self.look(state)
            return None
        settings, consumer = self._settings, self._consumer
        share = self._share(found.ledger)
        with settings.slots.hold(settings.source, consumer.name, consumer.priority, over):
            outcome = self._send(share, rows)
        self._settle(state, share, rows, outcome)
        self._looked = None
        self.look(state)
        return outcome

    def _settle(
        self, state: Connection, share: Share, rows: pa.RecordBatch, outcome: Outcome
    ) -> None:
        settings, done = self._settings, _delivered(rows, outcome)
        self._records.retried(_claim(rows, done, outcome))
        settle_claim(
            state,
            source=settings.source,
            term=settings.term,
            consumer=self._consumer.name,
            holder=self._holder,
            done=done,
            absorbed=outcome.absorbed,
            tried=outcome.queued,
            ledger=ledger_name(share.ledger),
            run=self._feed_run,
        )
        self._refusals.note(outcome)
        self._forget(share, done)
        if outcome.queued is not None and pc.any(outcome.queued.column("dead")).as_py():
            report_dead_letters(state, settings.source, settings.term)

    def _share(self, ledger: str) -> Share:
        address, place = self._settings.ledger, None
        if address is not None and needs_ledger(self._consumer):
            place = LedgerPlace(address, ledger, queued=True)
        return Share(
            self._consumer, self._settings.origin, self._run, ORIGIN, END, [],
            refusals_max=_EVERY_REFUSAL, ledger=place, state_dsn=self._settings.state_dsn,
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
        return replace(outcome, queued=together([*dead, outcome.queued]))

    def _try(self, share: Share, rows: pa.RecordBatch) -> Outcome:
        before = ("before",) if shows_before(share.consumer) else ()
        changes = as_changes(rows, (*before, *added_columns(share.consumer)))
        return deliver_messages(share, changes, END, _PURPOSE)

    def _forget(self, share: Share, done: pa.RecordBatch) -> None:
        """What left the queue cannot come again; a ledger elsewhere may know it a while longer."""
        ledger = ledger_of(share)
        if ledger is None or ledger.with_state or share.ledger is None or not done.num_rows:
            return
        lsn, idx = (done.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
        with suppress(TransientError):
            ledger.drop(share.ledger.ledger, lsn, idx)

    def _waiting(self, state: Connection) -> BlockedGroups:
        """What waits; much of it is looked at once a second at most.

        What has left the queue since is held back once more, and follows at once: that costs
        nothing but time.
        """
        now = time.monotonic()
        waiting, at = self._looked or (NOTHING, 0.0)
        if self._looked is None or waiting.count < _MANY or now - at > _LOOK_S:
            waiting = waiting_for(state, self._settings.source, self._consumer.name)
            self._looked = waiting, now
        return waiting


def _claim(rows: pa.RecordBatch, done: pa.RecordBatch, outcome: Outcome) -> RetryClaim:
    """As it is recorded."""
    refusals, _unnamed = refusals_of(outcome.queued)  # a claim has no more than are named
    delivered = _cursors(done)
    known = {*delivered, *(refusal.cursor for refusal in refusals)}
    left = tuple(cursor for cursor in _cursors(rows) if cursor not in known)
    error = outcome.error if outcome.failed else None
    return RetryClaim(
        outcome.consumer,
        time.time_ns() // 1000,
        delivered,
        refusals,
        left if error is not None else (),
        None if error is None else shown(error),
    )


def _cursors(rows: pa.RecordBatch) -> tuple[Cursor, ...]:
    return tuple(map(Cursor, *(rows.column(n).to_pylist() for n in ("commit_lsn", "commit_idx"))))


def is_failure(error: WalbrookError | None) -> bool:
    """Whether an error means that the destination takes nothing; a full queue only needs time."""
    return error is not None and error.kind != QUEUE_FULL


def _delivered(rows: pa.RecordBatch, outcome: Outcome) -> pa.RecordBatch:
    """Of the rows of a claim those that the destination has."""
    taken = below(rows, outcome.cursor)
    if outcome.queued is None:
        return taken
    lsn, idx = (taken.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
    queued = set(
        zip(
            *(outcome.queued.column(n).to_pylist() for n in ("commit_lsn", "commit_idx")),
            strict=True,
        )
    )
    keep = np.array([pair not in queued for pair in zip(lsn.tolist(), idx.tolist(), strict=True)])
    return taken.filter(pa.array(keep, pa.bool_()))
