"""Accepted messages on their way into a ledger: many requests share a note.

So a ledger is written to a few hundred times per second at most, however small the requests are.
Invariants: a note is written at the latest ``NOTE_PACE_S`` after the first request that it is for,
and at once when ``messages_max`` messages wait for it; no request is sent while it is written, and
those under way go on. That takes a fraction of a millisecond: another thread would cost more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from cdc.errors import TransientError
from cdc.queue.ledger.base import Integers, LedgerUse

NOTE_PACE_S: Final = 0.01

Write = Callable[[Integers, Integers], None]
"""Notes the messages with these cursors in a ledger; raises TransientError if it cannot."""


class Notes:
    """Those of one delivery."""

    def __init__(self, write: Write, messages_max: int, *, needed: bool) -> None:
        self._write = write
        self._messages_max = messages_max
        self._needed = needed  # whether a delivery ends when it cannot be noted
        self._waiting: list[tuple[Integers, Integers]] = []
        self._count = 0  # of the messages that wait
        self._timer: asyncio.TimerHandle | None = None
        self._broken: BaseException | None = None  # what ended the timer
        self.error: TransientError | None = None
        self.use = LedgerUse()

    def accepted(self, lsn: Integers, idx: Integers) -> None:
        """A request with these messages was accepted."""
        self._waiting.append((lsn, idx))
        self._count += len(lsn)
        if self._count >= self._messages_max:
            self._note()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTE_PACE_S, self._note_in_time)

    def finish(self) -> None:
        """Everything is noted, or it is known why it cannot be."""
        self._note()
        if self._broken is not None:
            raise self._broken

    def _note_in_time(self) -> None:
        try:
            self._note()
        except BaseException as broken:  # an event loop would only log it
            self._broken = broken
            self.error = TransientError("a note could not be written")

    def _note(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting or self.error is not None:
            return
        lsn, idx = (np.concatenate(column) for column in zip(*self._waiting, strict=True))
        self._waiting, self._count = [], 0
        try:
            self._write(lsn, idx)
        except TransientError as error:
            if self._needed:
                self.error = error
            else:
                self.use = LedgerUse(error.what, self.use.unnoted + len(lsn))
