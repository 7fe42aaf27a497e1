"""Which sinks have destinations that can be read back, row by row, so that rows can be compared."""

from __future__ import annotations

from cdc.config.destination import (
    KafkaDestination,
    ParquetDestination,
    PostgresDestination,
    RedisStreamDestination,
)
from cdc.config.expression import NONE
from cdc.config.sink import Sink


def unreadable_reason(sink: Sink) -> str | None:
    """Why it is not known which rows a sink's destination holds; None: it can be asked.

    A destination that several tables share is not asked either: it has rows of all of them.
    """
    destination = sink.destination
    readable = PostgresDestination | RedisStreamDestination | ParquetDestination | KafkaDestination
    if not isinstance(destination, readable):
        return f"a destination of the type {destination.type} cannot be read back"
    if sink.transform != NONE or sink.routing != NONE:
        return "a transform or routing changes what its messages are or where they go"
    if sink.claims is not None:
        return "large messages are kept elsewhere (oversize: claim_check)"
    if sink.shape != "sequin":
        return f"its messages have the shape {sink.shape}"
    if isinstance(destination, RedisStreamDestination):
        trimmed = destination.max_length is not None or destination.max_age_s is not None
        return "its stream is trimmed (max_length, max_age_s)" if trimmed else None
    if isinstance(destination, PostgresDestination):
        if destination.mode != "mirror":
            return f"mode: {destination.mode} holds a history, not the rows that are there"
        if "{table}" not in (destination.table or "{table}"):
            return "its tables share one target"
    return None
