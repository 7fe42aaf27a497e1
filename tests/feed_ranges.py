"""Decoded ranges without rows of a log, for tests of what lies between the log and the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cdc.cursor import Cursor
from spark_pipeline.delivery.deliver import Share
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.plan import JoinedPlan
from spark_pipeline.slices.exchange import SliceMarker

HISTORY = 7


@dataclass
class CountedPlan:
    """Holds ``decoded_bytes`` of rows, and counts how often it is closed."""

    decoded_bytes: int = 1
    in_driver: bool = True
    name: str = "driver"
    closed: int = 0

    def deliver(self, share: Share) -> Outcome:
        raise NotImplementedError

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def fetch(self, share: Share) -> Iterator[pa.RecordBatch]:
        return self.changes(share.slices)

    def close(self) -> None:
        self.closed += 1


def high_before(batch: int) -> Cursor:
    """The end of the batch before ``batch``."""
    return Cursor(0x100 + batch, 0)


def decoded_range(
    start: int, end: int, plan: CountedPlan | None = None, history: int = HISTORY
) -> DecodedRange:
    slices = [
        SliceMarker(start, end, at, 0, 1, 1, high_before(at + 1), 1, f"file {at}", 0, 0)
        for at in range(start, end)
    ]
    return DecodedRange(history, start, end, slices, plan or CountedPlan())


def plan_of(decoded: DecodedRange) -> CountedPlan:
    assert isinstance(decoded.plan, CountedPlan)
    return decoded.plan


def plans_in(decoded: DecodedRange) -> list[CountedPlan]:
    """Those of a range, which may be several ranges as one."""
    plan = decoded.plan
    plans = plan.parts.values() if isinstance(plan, JoinedPlan) else [plan]
    return [each for each in plans if isinstance(each, CountedPlan)]
