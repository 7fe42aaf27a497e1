"""A range of the log's batches, decoded and in order, and the plan that delivers from it.

Invariant: a range has one owner, which closes it once, when no worker delivers from it any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cdc.cursor import Cursor
from cdc.trace.records import DeliveryTiming
from spark_pipeline.feed.plan import DecodingPlan, JoinedPlan, Plan
from spark_pipeline.feed.reorder import Reorder
from spark_pipeline.slices.exchange import SliceMarker


@dataclass(frozen=True, eq=False)
class DecodedRange:
    """The batches ``[start, end)`` of one history of the log."""

    history: int
    start: int
    end: int
    slices: Sequence[SliceMarker]
    plan: Plan
    decoded_at: float = field(default_factory=time.monotonic)
    decoded_from_us: int = 0  # when decoding began and ended, Unix microseconds
    decoded_us: int = 0

    @classmethod
    def decode(cls, history: int, start: int, end: int, plan: DecodingPlan) -> DecodedRange:
        """Run the plan's decode and restore the order; a marker that is missing is an error."""
        began_us = time.time_ns() // 1000
        try:
            slices = Reorder(start).micro_batch(plan.decode())
        except BaseException:
            plan.close()
            raise
        ended_us = time.time_ns() // 1000
        return cls(history, start, end, slices, plan, decoded_from_us=began_us, decoded_us=ended_us)

    @classmethod
    def joined(cls, ranges: Sequence[DecodedRange]) -> DecodedRange:
        """Ranges of one history that follow each other and that the driver decoded, as one.

        Each of them keeps its owner, who closes it.
        """
        if len(ranges) == 1:
            return ranges[0]
        slices = [piece for each in ranges for piece in each.slices]
        plan = JoinedPlan({each.start: each.plan for each in ranges})
        first, last = ranges[0], ranges[-1]
        decoded_us = max(each.decoded_us for each in ranges)
        return cls(
            first.history,
            first.start,
            last.end,
            slices,
            plan,
            decoded_at=first.decoded_at,
            decoded_from_us=first.decoded_from_us,
            decoded_us=decoded_us,
        )

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.slices)

    @property
    def timing(self) -> DeliveryTiming:
        """When it was committed, logged and decoded; none of it has been delivered yet."""
        return DeliveryTiming(
            decoded_from_us=self.decoded_from_us,
            decoded_us=self.decoded_us,
            committed_us=max((piece.commit_us for piece in self.slices), default=0),
            logged_us=max((piece.logged_us for piece in self.slices), default=0),
        )

    @property
    def size(self) -> int:
        """Bytes of decoded rows that the driver's machine holds for it."""
        return self.plan.decoded_bytes

    @property
    def high(self) -> Cursor:
        """Everything of the range lies below it."""
        return self.slices[-1].high

    @property
    def committed_at(self) -> datetime:
        """Up to when a consumer has everything that was committed, once it has this range."""
        committed_us = max((piece.commit_us for piece in self.slices), default=0)
        if not committed_us:  # only idle progress: nothing was committed for us until now
            return datetime.now(UTC)
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=committed_us)

    def close(self) -> None:
        self.plan.close()
