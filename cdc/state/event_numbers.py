"""The numbers of the messages of a consumer in event-time order. Pure.

Sinks know a message again by its cursor, and here cursors do not rise from message to message.
Invariant: numbers rise, no change has one for its cursor, and none is used for two messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cdc.cursor import Cursor

Integers = npt.NDArray[np.int64]

_PLACES_BITS: Final = 30
OUR_LSN: Final = 3
"""Our numbers modulo eight: commit LSNs are multiples of eight, so no change has such a number."""


def is_number(lsn: Integers) -> npt.NDArray[np.bool_]:
    """For each LSN whether it is one of a sequence number; then it is no position in a log."""
    found: npt.NDArray[np.bool_] = lsn % 8 == OUR_LSN
    return found


@dataclass(frozen=True)
class Numbering:
    """The numbers of a consumer's messages: cursors that no change has, one after another."""

    base: int
    sequence: int

    def place(self, position: int) -> Cursor:
        """That of the message ``position`` from here on."""
        number = self.sequence + position
        high = number >> _PLACES_BITS
        return Cursor(self.base + 8 * high, number & ((1 << _PLACES_BITS) - 1))

    def positions(self, lsn: Integers, idx: Integers) -> Integers:
        """Of messages with these numbers, which they are from here on."""
        high = (lsn - self.base) // 8
        return (high << _PLACES_BITS) + idx - self.sequence

    def places(self, count: int) -> tuple[Integers, Integers]:
        """Those of the next ``count`` messages."""
        numbers = np.arange(self.sequence, self.sequence + count, dtype=np.int64)
        return self.base + 8 * (numbers >> _PLACES_BITS), numbers & ((1 << _PLACES_BITS) - 1)

    def after(self, messages: int) -> Numbering:
        return Numbering(self.base, self.sequence + messages)

    def beyond_used(self) -> Numbering:
        """Past every number that a release under way may have used; it may have begun a range."""
        return Numbering(self.base, ((self.sequence >> _PLACES_BITS) + 2) << _PLACES_BITS)
