"""Who is served where, and who waits for what: the decisions, without threads or clocks. Pure.

What must always hold: a consumer has one place at a time, and it changes only when the lane that
served it has said that it left.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cdc.errors import ExpressionError, OperatorError
from cdc.state.lanes import SHARED, Standing
from cdc.state.pressure import DEFERRED
from spark_pipeline.members import Departure, Why
from spark_pipeline.pressure import DEFERRED_MAX_S

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_FORGIVEN_S = 60.0  # without a failure, after which the next one is the first again
_ALONE_FIRST_S, _ALONE_MAX_S = 10.0, 600.0  # how long one that was too slow stays by itself

_REASONS: dict[Why, str] = {
    "failed": "its sink failed",
    "lane_failed": "its lane failed",
    "slow": "it was slower than the others",
    "moved": "its cursor was moved",
    "gap": "it is told of a gap",
    "paused": "it is paused",
    "behind": "it is behind the others",
    "inactive": "it is not active",
    "detached": "it is slower than the others",
    "deferred": DEFERRED,
}


@dataclass
class _Place:
    lane: str | None = None
    why: Why | None = None  # it is not in the shared lane
    error: str | None = None  # what failed, in words
    due_at: float | None = None  # when a lane may be started for it; None: not by itself
    leaving_since: float | None = None  # while its last share in a lane goes on
    failures: int = 0
    failed_at: float = float("-inf")
    failing: bool = False
    slow: int = 0
    rejoin_after: float = 0.0


class Roster:
    """The consumers of one source. Times are those of a monotonic clock, in seconds."""

    def __init__(self, consumers: Iterable[str]) -> None:
        self._places = {name: _Place() for name in consumers}

    def in_lane(self, lane: str) -> list[str]:
        return [name for name, place in self._places.items() if place.lane == lane]

    def put(self, consumer: str, lane: str) -> None:
        """A lane serves it from now on."""
        place = self._places[consumer]
        place.lane, place.due_at = lane, None
        if lane == SHARED:
            place.why, place.error, place.failing = None, None, False

    def wait(self, consumer: str, why: Why, due_at: float) -> None:
        """Nobody serves it; a lane may be started for it at ``due_at``."""
        place = self._places[consumer]
        place.lane, place.why, place.error, place.due_at = None, why, None, due_at

    def departed(self, departure: Departure, now: float) -> None:
        """A lane has let a consumer go."""
        place, why = self._places[departure.consumer], departure.why
        if why == "caught_up":
            self.put(departure.consumer, SHARED)
            place.failures = 0
            return
        self.wait(departure.consumer, why, now)
        place.leaving_since = now if why == "detached" else None
        place.failing = why in ("failed", "lane_failed")
        if why in ("failed", "lane_failed"):
            forgiven = now - place.failed_at > _FORGIVEN_S
            place.failures = 1 if forgiven else place.failures + 1
            place.failed_at = now
            place.due_at = now + _backoff_s(place.failures)
            if departure.error is not None:
                place.error = f"{_what_failed(departure)}: {departure.error}"
        elif why == "slow":
            place.slow = 1 if now - place.rejoin_after > _ALONE_MAX_S else place.slow + 1
            doubled: float = _ALONE_FIRST_S * 2 ** min(place.slow - 1, 10)
            place.rejoin_after = now + min(_ALONE_MAX_S, doubled)
        elif why == "deferred":
            place.due_at = now + DEFERRED_MAX_S
        elif why in ("inactive", "paused", "detached"):
            place.due_at = None

    def deferred(self) -> list[str]:
        """Those that pressure holds back; one that catches up is not."""
        return [name for name in self.waiting() if self._places[name].why == "deferred"]

    def hurry(self, consumer: str, now: float) -> None:
        """Somebody has changed something: it need not wait for the rest of its pause."""
        place = self._places[consumer]
        if place.due_at is not None:
            place.due_at = min(place.due_at, now)

    def hurry_all(self, now: float) -> None:
        """The cause of every pause may be gone: each consumer that waits is tried at once."""
        for consumer in self.waiting():
            if self._places[consumer].why != "deferred":
                self.hurry(consumer, now)

    def waiting(self) -> list[str]:
        """Those that wait for a pause to end, or for a lane."""
        return [name for name, place in self._places.items() if place.due_at is not None]

    def parked(self) -> list[str]:
        """Those that wait to become active, or to be resumed."""
        return [
            name
            for name, place in self._places.items()
            if place.lane is None and place.due_at is None and place.leaving_since is None
        ]

    def leaving(self, now: float) -> dict[str, float]:
        """Those whose last share goes on, and for how long already."""
        return {
            name: now - place.leaving_since
            for name, place in self._places.items()
            if place.leaving_since is not None
        }

    def due(self, now: float) -> list[str]:
        """Those for which a lane may be started, the longest due first."""
        waiting = {
            name: place.due_at
            for name, place in self._places.items()
            if place.due_at is not None and place.due_at <= now
        }
        return sorted(waiting, key=lambda name: (waiting[name], name))

    def rejoin_after(self, consumers: Iterable[str]) -> float:
        """When the last of these may go back to the shared lane."""
        return max(self._places[name].rejoin_after for name in consumers)

    def standings(self, now: float) -> dict[str, Standing]:
        """What SQL is to say of each."""
        return {
            name: Standing(
                place.lane,
                place.error or (_REASONS[place.why] if place.why else None),
                max(0.0, place.due_at - now) if place.due_at is not None else None,
                place.failing,
                place.why == "paused",
            )
            for name, place in self._places.items()
        }


def grouped(
    waiting: Sequence[str], lanes: int, near: Callable[[str, str], bool]
) -> list[list[str]]:
    """Those that wait, in their order, for the lanes that are free: each with those near to it.

    Consumers that stand far from each other share no lane: one would wait for the other.
    """
    groups: list[list[str]] = []
    left = list(waiting)
    while left and len(groups) < lanes:
        first, *others = left
        together = [name for name in others if near(first, name)]
        groups.append([first, *together])
        left = [name for name in others if name not in together]
    return groups


def _what_failed(departure: Departure) -> str:
    if isinstance(departure.error, ExpressionError):
        return "its expressions do not fit"
    if isinstance(departure.error, OperatorError):
        return "it cannot be served"
    return _REASONS[departure.why]


def _backoff_s(failures: int) -> float:
    longest: float = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(failures - 1, 20))
    return longest * random.uniform(0.5, 1.0)
