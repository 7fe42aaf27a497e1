"""A sink behind a worker that reads a written log, with the table ``public.item``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdc.connection import Connection
from tests.integration.test_queue import insert
from tests.lane_on_log import LogLane


def lane_to(
    state: Connection, directory: Path, destination: dict[str, Any], **given: Any
) -> LogLane:
    """The only sink of a lane, whose name is ``out``."""
    lane = LogLane(state, directory, out={"destination": destination, **given})
    state.execute("UPDATE walbrook.consumers SET destination = %s", (destination["type"],))
    return lane


def deliver(lane: LogLane, *numbers: int) -> None:
    """Rows with these ids, each in a transaction of its own."""
    for number in numbers:
        lane.write(*insert(number, (number, f"row {number}")))
        lane.take()
