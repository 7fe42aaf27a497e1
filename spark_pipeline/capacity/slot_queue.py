"""Who is next to deliver when there are more that would than may: by weight, with ageing. Pure.

Each consumer's use of the slots is counted in time divided by its weight; the consumer that has
used least goes first (start-time fair queueing). One that comes late begins where the others are:
time in which it wanted nothing is no credit. Deliveries also share a bound of bytes, because each
holds copies of what it delivers; a delivery above the bound goes alone, for ``COUNTED_S``.
Invariant: no slot is free while a delivery waits whose bytes fit; as long as all want more than
they get, each gets slot time in proportion to its weight; and a consumer that ``k`` others came
before waits no longer than ``longest_wait_s(k, slots)``, whatever its weight, or
``longest_wait_s(k, 1)`` where sizes let only one deliver at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Who = tuple[str, str]
"""A source, and a consumer of it."""

AGED_S = 10.0
"""A consumer that has waited this long is aged: every second turn goes to the first that came."""

HELD_MAX_S = 30.0
"""A slot is held for no longer: who takes longer goes on without it, and it goes to the next."""


BYTES_MAX = 64 << 20
"""How many decoded bytes the deliveries that hold a slot may have together."""

COUNTED_S = 2.0
"""A delivery that takes longer waits for its destination: its bytes hold back no other."""

BACK_S = 5.0
"""A worker that comes back within this wanted to all along: it settles between two deliveries."""


def longest_wait_s(ahead: int, slots: int) -> float:
    """The longest wait of a delivery that ``ahead`` others came before.

    Once it is aged, at most two turns are given for each of those and for itself; every slot gives
    one at least every ``HELD_MAX_S``.
    """
    return AGED_S + HELD_MAX_S * -(-2 * (ahead + 1) // slots)


@dataclass(eq=False)
class Ticket:
    """One delivery that waits for a slot, or holds one."""

    consumer: Who
    weight: int
    entered_at: float
    start: float  # how much its consumer has used by then, by weight
    held_since: float | None = None
    size: int = 0  # decoded bytes that it keeps in memory


class SlotQueue:
    """The slots and those who wait for one. Times are those of a monotonic clock, in seconds."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.waiting: list[Ticket] = []  # in the order they came
        self.holding: list[Ticket] = []
        self._used: dict[Who, tuple[float, float]] = {}  # how much, and when it last left
        self._virtual = 0.0
        self._turn_of_the_aged = False

    def enter(self, consumer: Who, weight: int, now: float, size: int = 0) -> Ticket:
        """Wait for a slot."""
        used, left_at = self._used.get(consumer, (0.0, -math.inf))
        start = used if now - left_at <= BACK_S else max(self._virtual, used)
        ticket = Ticket(consumer, weight, now, start, size=size)
        self.waiting.append(ticket)
        return ticket

    def next(self, now: float) -> Ticket | None:
        """Returns the consumer that gets a slot now; to be called until it returns None."""
        if not self.waiting:
            return None
        for ticket in [t for t in self.holding if now - _since(t) >= HELD_MAX_S]:
            self.leave(ticket, now)
        if len(self.holding) >= self.slots:
            return None
        first = self.waiting[0]
        aged = self._turn_of_the_aged and now - first.entered_at >= AGED_S
        fitting = [t for t in ([first] if aged else self.waiting) if self._fits(t, now)]
        if not fitting:  # an aged one waits for the others to end, and none overtakes it
            return None
        chosen = min(fitting, key=lambda ticket: ticket.start)
        self._turn_of_the_aged = not aged
        self.waiting.remove(chosen)
        chosen.held_since = now
        self.holding.append(chosen)
        self._advance(now)
        return chosen

    def _fits(self, ticket: Ticket, now: float) -> bool:
        held = sum(each.size for each in self.holding if now - _since(each) < COUNTED_S)
        return not held or not ticket.size or held + ticket.size <= BYTES_MAX

    def leave(self, ticket: Ticket, now: float) -> None:
        """Give a slot back, or wait no more; again does nothing."""
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        elif ticket in self.holding:
            self.holding.remove(ticket)
            used = ticket.start + (now - _since(ticket)) / ticket.weight
            self._used[ticket.consumer] = (used, now)
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Virtual time is where the least served of those present is; never back."""
        present = [ticket.start for ticket in (*self.waiting, *self.holding)]
        self._virtual = max(self._virtual, min(present, default=0.0))
        self._used = {
            who: (used, left_at)
            for who, (used, left_at) in self._used.items()
            if used > self._virtual or now - left_at <= BACK_S
        }


def _since(ticket: Ticket) -> float:
    return ticket.entered_at if ticket.held_since is None else ticket.held_since
