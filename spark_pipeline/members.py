"""Whom a lane serves. Consumers come and go between its micro-batches, never in one.

What must always hold: a consumer that has left is served by this lane no more, and nobody else may
serve it before its departure says that its last share here has come to its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from cdc.cursor import Cursor
from cdc.errors import WalbrookError

Why = Literal[
    "caught_up", "failed", "slow", "moved", "gap", "paused", "inactive", "behind", "lane_failed",
    "detached", "deferred",
]  # fmt: skip


@dataclass(frozen=True)
class Departure:
    """A consumer that a lane no longer serves, and why.

    One that was detached has a last share under way; another departure says how that ended.
    """

    consumer: str
    why: Why
    error: WalbrookError | None = None


class Members:
    """The consumers of one lane with their cursors; all methods may be called from any thread.

    ``left`` is told of departures in their order; it must not call back.
    """

    def __init__(self, left: Callable[[Departure], None]) -> None:
        self._left = left
        self._lock = threading.Lock()
        self._cursors: dict[str, Cursor] = {}
        self._invited: set[str] = set()
        self._asked_to_go: dict[str, Why] = {}
        self._busy = False

    @property
    def cursors(self) -> dict[str, Cursor]:
        """Where each member stands, as far as it is settled."""
        with self._lock:
            return dict(self._cursors)

    @property
    def invited(self) -> list[str]:
        """Those that may join at the next micro-batch."""
        with self._lock:
            return sorted(self._invited)

    def admit(self, cursors: dict[str, Cursor]) -> None:
        """Serve these from now on."""
        with self._lock:
            self._cursors |= cursors

    def moved(self, cursors: dict[str, Cursor]) -> None:
        """These members have settled more."""
        with self._lock:
            self._cursors |= {name: at for name, at in cursors.items() if name in self._cursors}

    def invite(self, consumer: str) -> None:
        """Let a consumer join at the next micro-batch."""
        with self._lock:
            self._invited.add(consumer)

    def let_go(self, consumer: str, why: Why) -> None:
        """Serve a consumer no more: now, or once the micro-batch in flight has ended."""
        with self._lock:
            if consumer not in self._cursors and consumer not in self._invited:
                return
            self._asked_to_go[consumer] = why
        self._apply()

    def begin(self) -> list[str]:
        """A micro-batch begins; the answer are those who were invited and may join it."""
        with self._lock:
            self._busy = True
            invited, self._invited = sorted(self._invited), set()
            return invited

    def end(self) -> None:
        """A micro-batch has ended."""
        with self._lock:
            self._busy = False
        self._apply()

    def leave(self, departures: Iterable[Departure]) -> None:
        """These have had their last share."""
        for departure in departures:
            with self._lock:
                self._cursors.pop(departure.consumer, None)
                self._invited.discard(departure.consumer)
                self._asked_to_go.pop(departure.consumer, None)
                self._left(departure)

    def detach(self, consumer: str) -> None:
        """Serve it no more, though its last share goes on: ``leave`` follows."""
        with self._lock:
            if self._cursors.pop(consumer, None) is not None:  # else it has ended meanwhile
                self._left(Departure(consumer, "detached"))

    def close(self) -> None:
        """The lane is no more: nobody is served by it, and nobody is told to leave it."""
        with self._lock:
            self._cursors.clear()
            self._invited.clear()
            self._asked_to_go.clear()

    def _apply(self) -> None:
        with self._lock:
            if self._busy:
                return
            gone = [
                Departure(name, why)
                for name, why in self._asked_to_go.items()
                if name in self._cursors or name in self._invited
            ]
            self._asked_to_go.clear()
        self.leave(gone)
