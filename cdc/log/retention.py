"""Which sealed segments may go, and why: a decision without side effects.

Settled segments go when they are older than ``settled_s``, when together they exceed
``settled_bytes``, or when the log is at ``bytes_max``. Unsettled ones go only at ``bytes_max`` and
only with ``on_full`` set to ``evict``. What goes is always the oldest: the log has no holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cdc.cursor import Cursor
from cdc.log.manifest import SegmentInfo

OnFull = Literal["pause", "evict"]


@dataclass(frozen=True)
class Retention:
    """How long and how much is kept beyond what is needed, and the limit for all of it."""

    settled_s: float
    settled_bytes: int
    bytes_max: int
    on_full: OnFull = "pause"


@dataclass(frozen=True)
class RetentionResult:
    """Segments that went because they were settled, those given up, and whether it is full."""

    removed: int
    evicted: int
    full: bool


def decide(
    segments: Sequence[SegmentInfo],
    active_bytes: int,
    settled: Cursor,
    now: float,
    retention: Retention,
) -> RetentionResult:
    """How many of the oldest ``segments`` go: first the settled, then those given up."""
    total = active_bytes + sum(segment.bytes for segment in segments)
    done = [segment for segment in segments if segment.high <= settled]
    kept_settled = sum(segment.bytes for segment in done)
    removed = 0
    for segment in done:
        too_old = now - segment.sealed_at > retention.settled_s
        if not too_old and kept_settled <= retention.settled_bytes and total < retention.bytes_max:
            break
        removed += 1
        kept_settled -= segment.bytes
        total -= segment.bytes
    evicted = 0
    if retention.on_full == "evict" and removed == len(done):
        for segment in segments[removed:]:
            if total < retention.bytes_max:
                break
            evicted += 1
            total -= segment.bytes
    return RetentionResult(removed, evicted, full=total >= retention.bytes_max)
