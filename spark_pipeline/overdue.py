"""What takes longer than it should, as health conditions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cdc.errors import WalbrookError
from cdc.state.health import Condition
from spark_pipeline.post import Progress

GIVEN_UP_AFTER = 5
"""Deadlines after which a micro-batch is given up."""


def overdue(
    lanes: Mapping[str, Progress | None],
    leaving: Mapping[str, float],
    *,
    deadline_s: float,
    now: float,
) -> Iterator[Condition]:
    """Of micro-batches under way, by lane, and of last deliveries, by consumer and age."""
    for lane, progress in lanes.items():
        if progress is None or now - progress.since < deadline_s:
            continue
        waits = ", ".join(progress.waiting_for)
        yield Condition(
            f"lane_slow_{lane}",
            "warning",
            f"a micro-batch of {progress.rows} changes in lane {lane} has been at "
            f"{progress.step} for {now - progress.since:.0f} s"
            f"{waits and f', waiting for {waits}'}",
            fix="look at the sinks it waits for, at Spark's executors and at the load of the state "
            "database; spark.deadline_s says when this is told",
        )
    for consumer, age_s in leaving.items():
        if age_s >= deadline_s:
            yield Condition(
                f"lane_detached_{consumer}",
                "error" if age_s > deadline_s * GIVEN_UP_AFTER else "warning",
                f"a delivery to {consumer} has been under way for {age_s:.0f} s; nothing else is "
                "delivered to it until it ends",
                fix="look at its destination; if it cannot end, restart the service",
            )


def stopped(source: str, error: WalbrookError | None) -> Condition:
    """The shared lane of a source failed and has delivered nothing since."""
    return Condition(
        "lane_stopped",
        "error",
        f"the shared lane of source {source} cannot run: {error}",
        fix="it is started again with a growing pause, after several failures of Spark in a new "
        "driver process; if that does not help, look at the log of the service for the cause",
    )


def to_be_given_up(progress: Progress | None, *, deadline_s: float, now: float) -> bool:
    return progress is not None and now - progress.since > deadline_s * GIVEN_UP_AFTER
