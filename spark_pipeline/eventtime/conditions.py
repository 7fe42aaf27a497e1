"""What walbrook.health says of consumers in event-time order."""

from __future__ import annotations

from cdc.config import Sink as SinkConfig
from cdc.state.health import Condition
from cdc.state.lanes import Standing


def full(consumer: SinkConfig) -> Condition:
    assert consumer.event_time is not None
    return Condition(
        "event_time_full",
        "error",
        f"{consumer.name} waits: its buffer holds {consumer.event_time.max_buffer_bytes} bytes, as "
        "much as it may, and none of it is due before more is read",
        fix="raise event_time.max_buffer_bytes, or lower late_tolerance or idle_timeout; "
        "walbrook.watermarks shows which table holds the others back",
    )


def failing(consumer: str, standing: Standing) -> Condition:
    return Condition(
        "lane_failing",
        "warning",
        f"{consumer} is not delivered to: {standing.reason}",
        fix="it is tried again with pauses of up to 30 seconds; if the reason stays, mend it at "
        "the destination or in the configuration",
    )


def paused(consumer: str) -> Condition:
    return Condition(
        "lane_paused",
        "warning",
        f"{consumer} is paused: it gets nothing, and the change log keeps what it lacks",
        fix=f"walbrook resume {consumer}, or SELECT walbrook.resume('{consumer}')",
    )
