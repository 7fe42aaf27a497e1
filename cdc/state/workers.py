"""What each consumer's worker is doing, as columns of ``walbrook.consumers``. They only inform."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cdc.connection import Connection

_SHOW = """
UPDATE walbrook.consumers
   SET state = %(state)s, state_reason = %(reason)s, breaker = %(breaker)s,
       retry_at = clock_timestamp() + make_interval(secs => %(retry_s)s)
 WHERE source = %(source)s AND name = %(consumer)s
"""


class WorkerState(StrEnum):
    """What a worker does."""

    LIVE = "live"
    """It is at the head of the log."""
    CATCHING_UP = "catching_up"
    """It reads the log by itself."""
    WAITING = "waiting"
    """It tries again later."""
    PAUSED = "paused"
    """An operator holds it back."""
    FAILED = "failed"
    """It is tried again, but only an operator can remove the cause."""


@dataclass(frozen=True)
class WorkerStatus:
    """What SQL says of a worker: its state, why, and in how many seconds it tries again."""

    state: WorkerState | None
    reason: str | None = None
    retry_s: float | None = None
    failing: bool = False
    """Whether its destination, or what it needs, failed last."""
    paused: tuple[str, ...] = ()
    """The names to resume, if it is paused in some of several sources."""

    @property
    def breaker(self) -> str:
        """The circuit breaker of its sink: open while nothing is sent, half open while tried."""
        if not self.failing:
            return "closed"
        serves = self.state in (WorkerState.LIVE, WorkerState.CATCHING_UP)
        return "half_open" if serves else "open"


def show_worker(connection: Connection, source: str, consumer: str, status: WorkerStatus) -> None:
    """Let SQL say what a worker does."""
    connection.execute(
        _SHOW,
        {
            "source": source,
            "consumer": consumer,
            "state": status.state,
            "reason": status.reason,
            "retry_s": status.retry_s,
            "breaker": status.breaker,
        },
    )
