"""Delivering to all consumers of a micro-batch at once, and not waiting for ever for the slowest.

An errand is what one consumer gets: one share, or two when it has just joined the lane and first
needs what the lane had before. What must always hold: the shares of a consumer go one after
another, each in one thread; an errand that takes much longer than the others goes on by itself, and
its consumer is served by this lane no more.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from cdc.cursor import Cursor
from cdc.queue.ledger import together
from spark_pipeline.delivery import Outcome, Share, mine
from spark_pipeline.exchange import SliceMarker
from spark_pipeline.forms import view_of
from spark_pipeline.plan import Plan
from spark_pipeline.poison import deliver_carefully, told

Prepare = Callable[[Share], Share]
"""Does to a share what must be done before it can be delivered."""

_THREADS_MAX = 256
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
        place = self.legs[-1].share.ledger
        return place.ledger if place is not None and place.address.type == "postgres" else None

    @property
    def slices(self) -> list[SliceMarker]:
        return [piece for leg in self.legs for piece in leg.share.slices]

    @property
    def files(self) -> set[str]:
        """Where all that it needs lies; what went through Spark lies nowhere."""
        verdicts = {leg.share.verdicts for leg in self.legs if leg.share.verdicts}
        return verdicts | {piece.path for piece in self.slices if piece.path}

    def run(self) -> Outcome:
        """Deliver leg by leg; the first failure, whatever it is, ends it and is its outcome."""
        done = Outcome(self.consumer, self.start)
        for leg in self.legs:
            try:
                outcome = leg.run()
            except Exception as error:
                return replace(done, error=told(error))
            done = replace(
                outcome,
                delivered=done.delivered + outcome.delivered,
                absorbed=done.absorbed + outcome.absorbed,
                last_commit=outcome.last_commit or done.last_commit,
                dead=done.dead + outcome.dead,
                ledger=together((done.ledger, outcome.ledger)),
            )
            if done.error is not None:
                break
        return done


Late = Callable[[Errand, Outcome], None]


class Deliveries:
    """The threads of one lane; those of errands that take too long outlive their micro-batch."""

    def __init__(self, given_up: threading.Event) -> None:
        self._given_up = given_up
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
        running = {self._threads.submit(self._run, errand): errand for errand in errands}
        self._wait(set(running), patience_s)
        outcomes: dict[str, Outcome] = {}
        for future, errand in running.items():
            if future.done():
                outcomes[errand.consumer] = future.result()
            else:
                future.add_done_callback(lambda done, errand=errand: late(errand, done.result()))  # type: ignore[misc]
        return outcomes

    def close(self) -> None:
        """Take no more; errands under way come to their end."""
        self._threads.shutdown(wait=False)

    def _run(self, errand: Errand) -> Outcome:
        try:
            return errand.run()
        finally:
            with self._lock:
                self._waiting_for.discard(errand.consumer)

    def _wait(self, running: set[Future[Outcome]], patience_s: float) -> None:
        """Until all have ended, or some take much longer than half of the others did.

        When the lane is given up they are not waited for either.
        """
        started, ended_after = time.monotonic(), list[float]()
        half = max(1, len(running) // 2)
        pending = running
        while pending and not self._given_up.is_set():
            allowed = _LOOK_S
            if len(ended_after) >= half:
                typical = statistics.median(ended_after)
                left_s = started + patience_s + 2 * typical - time.monotonic()
                if left_s <= 0:
                    return
                allowed = min(allowed, left_s)
            done, pending = wait(pending, allowed, return_when="FIRST_COMPLETED")
            ended_after += [time.monotonic() - started] * len(done)
