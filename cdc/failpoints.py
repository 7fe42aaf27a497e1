"""Dying on purpose, at a named step, so that tests can see what a crash there leaves behind.

``WALBROOK_FAILPOINT=appended`` kills the process (SIGKILL: no clean-up, no flush) when it first
reaches that step, ``appended:3`` when it does so for the third time. Unarmed, a step costs one
comparison. The names are those of docs/guarantees.md.
"""

from __future__ import annotations

import os
import signal
from typing import Final, Literal

from cdc.errors import ConfigError

Step = Literal[
    "received",
    "recorded",
    "appended",
    "synced",
    "stored",
    "confirmed",
    "settled",
    "planned",
    "released",
    "truncating",
    "truncated",
    "produced",
    "enclosed",
    "committed",
    "applied",
    "moved",
    "written",
    "slot_dropped",
    "slot_made",
]

STEPS: Final[tuple[Step, ...]] = (
    "received",  # messages came off the wire, none of them is in the log
    "recorded",  # the table versions of a batch are recorded, it is not in the log yet
    "appended",  # a batch is in the log, perhaps only in the page cache
    "synced",  # the log is on disk up to here, Postgres does not know it yet
    "stored",  # the reader's row in Postgres says so
    "confirmed",  # a position was confirmed to the slot
    "settled",  # a micro-batch is settled
    "planned",  # a release in event-time order is stored, nothing of it was sent
    "released",  # all of it was sent, nothing of it is settled
    "truncating",  # a rewound destination says that it is being emptied, and is not yet
    "truncated",  # it is empty and says so, nothing was delivered since
    "produced",  # messages of a Kafka transaction were sent, its cursor was not
    "enclosed",  # its cursor was sent, too; it is not committed
    "committed",  # it, or the rows of a lakehouse table, is committed, nothing of it is settled
    "applied",  # a destination that is a database has the rows, its position has not moved
    "moved",  # both are committed there
    "written",  # files of a lakehouse table are written, no commit names them
    "slot_dropped",  # a repair has dropped the slot, the new one is not there yet
    "slot_made",  # the new slot is there, no consumer has moved to it
)
VARIABLE: Final = "WALBROOK_FAILPOINT"


def _armed(setting: str) -> tuple[str, int]:
    name, _, count = setting.partition(":")
    if setting and (name not in STEPS or not (count or "1").isdigit()):
        raise ConfigError(
            f"{VARIABLE} names no step: {setting}",
            fix=f"use one of {', '.join(STEPS)}, with :N for the N-th time, or unset it",
        )
    return name, int(count or 1)


_step, _left = _armed(os.environ.get(VARIABLE, ""))


def reached(step: Step) -> None:
    """Die here if this step is armed and its time has come."""
    global _left
    if step != _step:
        return
    _left -= 1
    if _left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
