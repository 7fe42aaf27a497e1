"""What walbrook.health says of consumers in event-time order."""

from __future__ import annotations

from cdc.config import Sink as SinkConfig
from cdc.state.health import Condition
from cdc.state.workers import WorkerStatus


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


def failing(consumer: str, status: WorkerStatus) -> Condition:
    return Condition(
        "worker_failing",
        "warning",
        f"{consumer} is not delivered to: {status.reason}",
        fix="it is tried again with pauses of up to 30 seconds; if the reason stays, mend it at "
        "the destination or in the configuration",
    )


def paused(consumer: SinkConfig, sources: list[str]) -> Condition:
    """``sources`` are the databases in which somebody paused it."""
    one = len(consumer.sources) == 1
    names = [consumer.name] if one else [f"{source}/{consumer.name}" for source in sources]
    commands = " and ".join(f"walbrook resume {name}" for name in names)
    calls = ", ".join(f"walbrook.resume('{name}')" for name in names)
    return Condition(
        "worker_paused",
        "warning",
        f"{consumer.name} is paused: it gets nothing until it is resumed. The change log keeps "
        "what it lacks, within its bounds; walbrook.gaps has what was given up",
        fix=f"{commands}, or SELECT {calls}",
    )
