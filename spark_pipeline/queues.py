"""For whom messages wait, as the lanes of one source know it, and how much refusing is allowed.

What must always hold: a consumer with rows in its queue is known to have some, so that a lane looks
there before it delivers. One that is known for nothing costs a look, no more.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from cdc.connection import Connection
from cdc.errors import TransientError
from cdc.queue.claims import Due, due
from cdc.queue.events import QUEUE_MAX, waiting_for
from spark_pipeline.delivery import Share
from spark_pipeline.desk import REFUSES_ALL, STRIKES
from spark_pipeline.outcome import Outcome

_STRIKES_MAX = 10_000
_FULL = "queue_full"


class Queues:
    """All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, int] | None = None  # by consumer: how often something was put aside
        self._refused: dict[str, int] = {}  # in a row
        self._allowed: dict[str, int] = {}
        self._failing: set[str] = set()
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
        waiting = waiting_for(state, source, name)
        if waiting.count < QUEUE_MAX:
            return replace(share, waiting=waiting)
        full = TransientError(
            f"{waiting.count} messages wait in the queue of {name}, as many as may",
            fix="look at walbrook.events for what its destination refuses, and why; it takes new "
            "changes when fewer wait, and the change log keeps them until then",
            kind=_FULL,
        )
        return replace(share, end=share.start, slices=[], announcements=None, held=full)

    def settled(self, outcome: Outcome) -> None:
        """What a lane has settled for a consumer."""
        name, error = outcome.consumer, outcome.error
        with self._lock:
            if outcome.aside is not None:
                known = self._known = self._known or {}
                known[name] = known.get(name, 0) + 1
                self.news.set()
            self._refused[name] = outcome.strikes
            if error is None:
                self._allowed.pop(name, None)
                self._failing.discard(name)
                return
            if error.kind == REFUSES_ALL:
                # Perhaps there are as many bad messages in a row: each try is allowed more, so the
                # consumer gets past them in the end.
                allowed = self._allowed.get(name, STRIKES) * 2
                self._allowed[name] = min(allowed, _STRIKES_MAX)
                self._refused[name] = 0
            elif (
                outcome.delivered
                or outcome.dead
                or outcome.aside is not None
                or error.kind == _FULL
            ):
                return
            self._failing.add(name)

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
                if name not in names and known.get(name) == count:
                    del known[name]
        return found
