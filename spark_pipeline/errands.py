"""Delivering to all consumers of a micro-batch at once, and not waiting for ever for the slowest.

An errand is what one consumer gets: one share, or two when it has just joined the lane and first
needs what the lane had before. What must always hold: the shares of a consumer go one after
another, each in one thread; an errand that takes much longer than the others, from when it got a
delivery slot, gives the slot back and goes on by itself, and its consumer is served by this lane no
more.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from cdc.cursor import Cursor
from cdc.errors import WalbrookError
from spark_pipeline.delivery import Share, mine
from spark_pipeline.exchange import SliceMarker
from spark_pipeline.forms import view_of
from spark_pipeline.ledgers import ledger_name
from spark_pipeline.outcome import Outcome
from spark_pipeline.plan import Plan
from spark_pipeline.poison import deliver_carefully, told
from spark_pipeline.slots import Slots, Turn

Prepare = Callable[[Share], Share]
"""Does to a share what must be done before it can be delivered."""

_THREADS_MAX = 256
_FEW_ENDED = 5  # times the patience, while less than half have ended
_LOOK_S = 0.5  # how often those who wait see that the lane was given up


@dataclass
class Leg:
    """A share and the plan that delivers it."""

    share: Share
    plan: Plan
    prepare: Prepare  # asked when its turn comes

    def run(self) -> Outcome:
        self.share = self.prepare(self.share)
        outcome = deliver_carefully(self.plan.deliver, self.share, self.cursors)
        return replace(outcome, error=outcome.error or self.share.held)

    def cursors(self, share: Share) -> list[Cursor]:
        """Where the messages of (a piece of) it stand."""
        found: list[Cursor] = []
        for changes in self.plan.changes(share.slices):
            rows = mine(share, view_of(changes, share.wanted, share.consumer))
            columns = (rows.column(name).to_pylist() for name in ("commit_lsn", "commit_idx"))
            found += map(Cursor, *columns)
        return found


@dataclass(frozen=True)
class Errand:
    """All that one consumer gets in a micro-batch, in order."""

    consumer: str
    legs: tuple[Leg, ...]

    @property
    def start(self) -> Cursor:
        return self.legs[0].share.start

    @property
    def end(self) -> Cursor:
        return self.legs[-1].share.end

    @property
    def ledger(self) -> str | None:
        """The name of its ledger in the state database, if it has one there."""
        return ledger_name(self.legs[-1].share.ledger)

    @property
    def slices(self) -> list[SliceMarker]:
        return [piece for leg in self.legs for piece in leg.share.slices]

    @property
    def files(self) -> set[str]:
        """Where all that it needs lies; what went through Spark lies nowhere."""
        verdicts = {leg.share.verdicts for leg in self.legs if leg.share.verdicts}
        return verdicts | {piece.path for piece in self.slices if piece.path}

    def turn(self, slots: Slots, given_up: threading.Event) -> AbstractContextManager[Turn]:
        """Its turn to deliver, among all that are delivered to."""
        share = self.legs[0].share
        size = max(leg.plan.driver_bytes for leg in self.legs)
        return slots.hold(share.origin.name, self.consumer, share.consumer.priority, given_up, size)

    def run(self) -> Outcome:
        """Deliver leg by leg; the first failure, whatever it is, ends it and is its outcome."""
        done = Outcome(self.consumer, self.start)
        for leg in self.legs:
            leg.share = leg.share.behind(done)
            try:
                done = leg.run().after(done)
            except Exception as error:
                return replace(done, error=told(error))
            if done.error is not None:
                break
        return done


Late = Callable[[Errand, Outcome], None]


@dataclass(eq=False)
class _Going:
    """An errand on its way; without a turn it waits for a slot."""

    errand: Errand
    turn: Turn | None = None
    took_s: float = 0.0

    def left_s(self, most_s: float, now: float) -> float:
        """For how long it may still take if it may take ``most_s`` from its turn on."""
        began = None if self.turn is None else self.turn.began
        return math.inf if began is None else began + most_s - now

    def give_back(self) -> None:
        """It goes on by itself, and somebody else may have its slot."""
        if self.turn is not None:
            self.turn.give_back()

    def run(self, slots: Slots, given_up: threading.Event) -> Outcome:
        try:
            with self.errand.turn(slots, given_up) as self.turn:
                began = time.monotonic()
                try:
                    return self.errand.run()
                finally:
                    self.took_s = time.monotonic() - began
        except WalbrookError as error:
            return Outcome(self.errand.consumer, self.errand.start, error=error)


class Deliveries:
    """The threads of one lane; those of errands that take too long outlive their micro-batch."""

    def __init__(self, given_up: threading.Event, slots: Slots) -> None:
        self._given_up = given_up
        self._slots = slots
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="delivery")
        self._lock = threading.Lock()
        self._waiting_for: set[str] = set()

    @property
    def waiting_for(self) -> list[str]:
        """The consumers whose errands of the micro-batch under way have not ended."""
        with self._lock:
            return sorted(self._waiting_for)

    def run(self, errands: Sequence[Errand], late: Late, patience_s: float) -> dict[str, Outcome]:
        """The outcomes of those that ended in time; ``late`` is called for each other, later."""
        with self._lock:
            self._waiting_for = {errand.consumer for errand in errands}
        going = [_Going(errand) for errand in errands]
        running = {self._threads.submit(self._run, each): each for each in going}
        self._wait(running, patience_s)
        outcomes: dict[str, Outcome] = {}
        for future, each in running.items():
            errand = each.errand
            if future.done():
                outcomes[errand.consumer] = future.result()
            else:
                each.give_back()
                future.add_done_callback(lambda done, errand=errand: late(errand, done.result()))  # type: ignore[misc]
        return outcomes

    def close(self) -> None:
        """Take no more; errands under way come to their end."""
        self._threads.shutdown(wait=False)

    def _run(self, going: _Going) -> Outcome:
        try:
            return going.run(self._slots, self._given_up)
        finally:
            with self._lock:
                self._waiting_for.discard(going.errand.consumer)

    def _wait(self, running: Mapping[Future[Outcome], _Going], patience_s: float) -> None:
        """Until each has ended, or takes much longer than those that have.

        When the lane is given up they are not waited for either.
        """
        ended_after: list[float] = []
        half = max(1, len(running) // 2)
        pending = set(running)
        while pending and not self._given_up.is_set():
            allowed = _LOOK_S
            if ended_after:
                # Where most take long, those that have ended may have been quick.
                patience = patience_s * (1 if len(ended_after) >= half else _FEW_ENDED)
                most_s = patience + 2 * statistics.median(ended_after)
                now = time.monotonic()
                left_s = {each: running[each].left_s(most_s, now) for each in pending}
                for late in (each for each in left_s if left_s[each] <= 0):
                    running[late].give_back()
                    pending.discard(late)
                allowed = min(allowed, *(left for left in left_s.values() if left > 0), _LOOK_S)
            done, pending = wait(pending, allowed, return_when="FIRST_COMPLETED")
            ended_after += [running[each].took_s for each in done]
