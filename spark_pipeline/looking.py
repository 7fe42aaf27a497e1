"""What follows from a look at the consumers' rows, which anybody may have changed. Pure.

What must always hold: whom somebody moved, paused or took out leaves its lane, and whoever may be
served again waits for one.
"""

from __future__ import annotations

from collections.abc import Mapping

from cdc.cursor import ORIGIN, Cursor
from cdc.state.roll import Roll
from spark_pipeline.members import Departure, Members
from spark_pipeline.roster import Roster


def dismiss(members: Members, serving: Mapping[str, Cursor], roll: Roll) -> None:
    """Let those of a lane go that it must not serve on; ``serving`` was asked before the roll.

    Those that are invited have not joined, which they do at the cursor that they then have.
    """
    for consumer, cursor in [*serving.items(), *((name, ORIGIN) for name in members.invited)]:
        if consumer not in roll.served:
            members.let_go(consumer, roll.absence(consumer))
        elif roll.served[consumer] < cursor:
            members.let_go(consumer, "moved")
        elif consumer in roll.untold:
            # Gaps are told where a lane begins.
            members.let_go(consumer, "gap")


def reconsider(roster: Roster, roll: Roll, seen: Mapping[str, Cursor], now: float) -> None:
    """Those in no lane: who comes back, who is held back, and who need not wait any longer.

    ``seen`` are the cursors at the look before.
    """
    for consumer in roster.parked():
        if consumer in roll.served:
            roster.wait(consumer, "behind", due_at=now)
        else:
            roster.departed(Departure(consumer, roll.absence(consumer)), now)
    for consumer in roster.waiting():
        if consumer not in roll.served:
            roster.departed(Departure(consumer, roll.absence(consumer)), now)
        elif seen.get(consumer, roll.served[consumer]) != roll.served[consumer]:
            roster.hurry(consumer, now)
