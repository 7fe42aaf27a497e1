"""A lane's place among those of its source, and what it can be seen to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cdc.state.lanes import SHARED
from spark_pipeline.members import Departure
from spark_pipeline.queues import Queues


@dataclass(frozen=True)
class Post:
    """A lane's place among those of its source: its name, whom it serves, who hears of leavers."""

    consumers: tuple[str, ...]
    left: Callable[[Departure], None] = field(default=lambda _departure: None)
    name: str = SHARED
    queues: Queues = field(default_factory=Queues)
    rejoin_after: float = 0.0  # monotonic: before it nobody goes back to the shared lane

    @property
    def catches_up(self) -> bool:
        return self.name != SHARED

    @property
    def pool(self) -> str:
        return "catch_up" if self.catches_up else "shared"


@dataclass(frozen=True)
class Progress:
    """What a lane is at, and since when (monotonic)."""

    step: str
    since: float
    rows: int
    waiting_for: list[str]
