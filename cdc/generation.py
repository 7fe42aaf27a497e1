"""Which copy of its messages a destination holds: what a rewind gives to a consumer whose
destination keeps a position of its own.

``number`` counts the places: a rewind into a new generation leaves the old place as it is and
begins another. ``truncation`` counts how often the place of this generation was emptied.

Invariants: ``walbrook.consumers`` owns both numbers, and they grow by ``walbrook.rewind`` alone. A
destination records the truncation that its content belongs to. A sink that finds a lower one
empties the place before it delivers; a sink that finds a higher one is out of date and delivers
nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from cdc.errors import OperatorError


class Generation(NamedTuple):
    """The generation that a sink is opened for."""

    number: int = 1
    truncation: int = 0

    def named(self, place: str) -> str:
        """The name of this generation's place; the first one has the configured name."""
        return place if self.number == 1 else f"{place}.generation-{self.number}"

    def must_empty(self, truncation: int) -> bool:
        """Whether a place that belongs to ``truncation`` has yet to be emptied for this sink.

        Raises OperatorError if it was emptied for a later one.
        """
        if truncation > self.truncation:
            raise OperatorError(
                f"the destination was emptied for truncation {truncation} of its consumer, and "
                f"this sink was opened for truncation {self.truncation}",
                fix="nothing, if the consumer was rewound: it is served again from its new cursor; "
                "if its row in walbrook.consumers was deleted, give it an empty destination",
                kind="truncated_since",
            )
        return truncation < self.truncation


FIRST = Generation()
