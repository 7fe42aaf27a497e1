"""What of a consumer's configuration the stored state of its event time hangs on. Pure.

Invariant: configurations with the same marks give the same rows the same times
(``order``), and of the same rows the same messages in the same order (``release``). What says only
how long is waited, or how messages look, is in neither.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import orjson

from cdc.config import SinkConfig


@dataclass(frozen=True)
class EventFingerprint:
    """Short texts that are equal if what they stand for is."""

    order: str
    release: str
    ordering: str = "event_time"

    @classmethod
    def of(cls, sink: SinkConfig) -> EventFingerprint:
        timed, window = sink.event_time, sink.window
        assert timed is not None
        order = [
            sink.ordering,
            timed.column,
            timed.type,
            [[table.name, table.column, table.type] for table in timed.tables],
            timed.leaf_partitions,
            None if window is None else [window.size_us, window.slide_us],
        ]
        release = [
            order,
            sink.sources,
            sink.source.model_dump(),
            sink.actions,
            sink.expressions,
            timed.late_policy,
            timed.emit_watermarks,
            None if window is None else [window.group_by, window.aggregates],
        ]
        return cls(mark_of(order), mark_of(release), sink.ordering)


def mark_of(value: object) -> str:
    """A short text that is another for another value."""
    return hashlib.blake2b(orjson.dumps(value, default=str), digest_size=8).hexdigest()
