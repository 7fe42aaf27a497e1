"""For whom messages wait, as the lanes of one source know it, and how much refusing is allowed.

What must always hold: a consumer with rows in its queue is known to have some, so that a lane looks
there before it delivers. One that is known for nothing costs a look, no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace

import pyarrow.compute as pc

from cdc.connection import Connection
from cdc.errors import TransientError
from cdc.queue.claims import Due, due
from cdc.queue.events import QUEUE_MAX, waiting_for
from cdc.queue.waiting import NOTHING, Waiting
from spark_pipeline.delivery import Share
from spark_pipeline.desk import REFUSES_ALL, STRIKES
from spark_pipeline.outcome import Outcome
from spark_pipeline.refusal_log import RefusalLog

_STRIKES_MAX = 10_000
_MANY, _LOOK_S = 1_000, 1.0
_FULL = "queue_full"


class Queues:
    """All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, int] | None = None  # by consumer: how often something was put aside
        self._refused: dict[str, int] = {}  # in a row
        self._allowed: dict[str, int] = {}
        self._unsure: set[str] = set()  # for whom something was being put aside when last heard of
        self._failing: set[str] = set()
        self._looked: dict[str, tuple[Waiting, float]] = {}  # what waited, and when (monotonic)
        self.refusals = RefusalLog()
        self.news = threading.Event()
        """Set when something was put aside."""

    def before(self, state: Connection, share: Share) -> Share:
        """The share as it may be delivered: with what its consumer's queue holds back."""
        name, source = share.consumer.name, share.origin.name
        if not share.consumer.destination.defers:
            return share
        if self._known is None:
            self.look(state, source)
        with self._lock:
            some_wait = name in (self._known or {})
            share = replace(
                share,
                strikes=self._refused.get(name, 0),
                strikes_max=self._allowed.get(name, STRIKES),
            )
        if not some_wait:
            return share
        waiting = self._waiting(state, source, name)
        if waiting.count < QUEUE_MAX:
            return replace(share, waiting=waiting)
        full = TransientError(
            f"{waiting.count} messages wait in the queue of {name}, as many as may",
            fix="look at walbrook.events for what its destination refuses, and why; it takes new "
            "changes when fewer wait, and the change log keeps them until then",
            kind=_FULL,
        )
        return replace(share, end=share.start, slices=[], held=full)

    def settling(self, outcomes: Iterable[Outcome]) -> None:
        """Before it is tried: whether it succeeded may never be known."""
        for outcome in outcomes:
            if outcome.aside is None:
                continue
            name = outcome.consumer
            alive = outcome.aside.filter(pc.invert(outcome.aside.column("dead")))
            with self._lock:
                self._unsure.add(name)
                known = self._known = self._known or {}
                known.setdefault(name, 0)
                if name in self._looked:
                    waiting, at = self._looked[name]
                    self._looked[name] = waiting.with_these(alive), at

    def settled(self, outcome: Outcome) -> None:
        """What a lane has settled for a consumer."""
        name, error = outcome.consumer, outcome.error
        self.refusals.note(outcome)
        if outcome.aside is not None:
            self.news.set()
        with self._lock:
            self._unsure.discard(name)
            if outcome.aside is not None and self._known is not None:
                self._known[name] = self._known.get(name, 0) + 1
            self._refused[name] = outcome.strikes
            if outcome.delivered or outcome.absorbed:
                self._allowed.pop(name, None)
            if error is not None and error.kind == REFUSES_ALL:
                # Perhaps there are as many bad messages in a row: each try is allowed more, so the
                # consumer gets past them in the end.
                allowed = self._allowed.get(name, STRIKES) * 2
                self._allowed[name] = min(allowed, _STRIKES_MAX)
                self._refused[name] = 0
            # One whose queue is full can only go on if that is tried.
            if outcome.failed and error is not None and error.kind != _FULL:
                self._failing.add(name)
            else:
                self._failing.discard(name)

    def failing(self, consumer: str) -> bool:
        """Whether its last share failed as a whole: what waits need not be tried then."""
        with self._lock:
            return consumer in self._failing

    def look(self, state: Connection, source: str) -> list[Due]:
        """For whom something waits, and when the first of it is due."""
        with self._lock:
            before = dict(self._known or {})
        found = due(state, source)
        names = {each.consumer for each in found}
        with self._lock:
            known = self._known = self._known or {}
            for name in names:
                known.setdefault(name, 0)
            for name, count in before.items():
                # Unless something was put aside since we asked.
                gone = name not in names and name not in self._unsure
                if gone and known.get(name) == count:
                    del known[name]
        return found

    def _waiting(self, state: Connection, source: str, name: str) -> Waiting:
        """What waits for a consumer; much of it is looked at once a second at most.

        What has left the queue since is held back once more, and follows at once: that costs
        nothing but time.
        """
        with self._lock:
            waiting, at = self._looked.get(name, (NOTHING, 0.0))
        if waiting.count < _MANY or time.monotonic() - at > _LOOK_S:
            at = time.monotonic()
            waiting = waiting_for(state, source, name)
            with self._lock:
                self._looked[name] = waiting, at
        return waiting
