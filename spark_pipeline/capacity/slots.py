"""The delivery slots of the driver: how many shares are delivered at once, of all its workers.

Who gets one is decided by ``slot_queue``; here are the threads that wait. Invariant: a
slot that was taken is given back once, however its delivery ends; no wait outlives its
stage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cdc.errors import TransientError
from spark_pipeline.capacity.slot_queue import SlotQueue, Ticket, Who

_LOOK_S = 0.5  # how often one that waits sees a slot held too long, or that its stage has ended


class Turn:
    """A delivery that has come to its turn; ``began`` is when (monotonic)."""

    def __init__(self, slots: Slots, ticket: Ticket) -> None:
        self._slots = slots
        self._ticket = ticket

    @property
    def began(self) -> float | None:
        return self._ticket.held_since

    def give_back(self) -> None:
        """Give the slot to another consumer; the delivery may go on beside. Again does nothing."""
        self._slots._give_back(self._ticket)


class Slots:
    """All methods may be called from any thread."""

    def __init__(self, slots: int) -> None:
        self._queue = SlotQueue(slots)
        self._entered: set[Ticket] = set()  # and not given back yet
        self._took_s: dict[Who, float] = {}
        self._lock = threading.Lock()
        self._granted = threading.Condition(self._lock)

    @property
    def count(self) -> int:
        return self._queue.slots

    @contextmanager
    def hold(
        self, source: str, consumer: str, weight: int, given_up: threading.Event, size: int = 0
    ) -> Iterator[Turn]:
        """Wait for a slot and hold it; raises if ``given_up`` comes first.

        ``size`` is how many decoded bytes the delivery keeps in this process.
        """
        with self._lock:
            ticket = self._queue.enter((source, consumer), weight, time.monotonic(), size)
            turn = Turn(self, ticket)
            self._entered.add(ticket)
            self._grant()
        try:
            while ticket.held_since is None:
                with self._lock:
                    if ticket.held_since is None:
                        self._granted.wait(_LOOK_S)
                        self._grant()
                if ticket.held_since is None and given_up.is_set():
                    raise TransientError("the service stopped before its turn to deliver came")
            yield turn
        finally:
            turn.give_back()

    def in_use(self, source: str) -> tuple[int, int]:
        """How many slots the deliveries of a source hold, and how many of them wait for one."""
        with self._lock:
            return _of(source, self._queue.holding), _of(source, self._queue.waiting)

    def took_s(self, source: str, consumer: str) -> float:
        """How long its last delivery held a slot."""
        with self._lock:
            return self._took_s.get((source, consumer), 0.0)

    def _give_back(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket not in self._entered:
                return
            self._entered.remove(ticket)
            now = time.monotonic()
            if ticket.held_since is not None:
                self._took_s[ticket.consumer] = now - ticket.held_since
            self._queue.leave(ticket, now)
            self._grant()

    def _grant(self) -> None:
        while self._queue.next(time.monotonic()) is not None:
            self._granted.notify_all()


def _of(source: str, tickets: list[Ticket]) -> int:
    return sum(ticket.consumer[0] == source for ticket in tickets)
