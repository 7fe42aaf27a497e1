"""What SQL and health say of the workers and the feed of one source.

Invariant: only what has changed since the last look is written.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

from cdc.connection import Connection
from cdc.errors import WalbrookError
from cdc.state.health import Condition, report_conditions
from cdc.state.workers import WorkerState, WorkerStatus, show_worker
from spark_pipeline.feed.progress import BodyStep
from spark_pipeline.workers.state import Reason, Work

_RETRY_LATER_S = 0.1  # the next try is later than SQL says, so there has been one
GIVEN_UP_AFTER = 5
"""Deadlines after which a Spark job is cancelled."""


_FIXES = {
    Work.READ: "look at Spark's executors, and at the disk or the tier that holds the log",
    Work.DELIVERY: "look at its destination; if it cannot end, restart the service",
    Work.SETTLEMENT: "look at the state database: at its locks, its disk and its load",
}


class StatusWriter:
    """Writes the states of workers, and the health events that follow from them."""

    def __init__(self, source: str, term: int) -> None:
        self._source = source
        self._term = term
        self._shown: dict[str, tuple[WorkerStatus, float]] = {}  # with when (monotonic) it was
        self._reported: dict[str, list[Condition]] = {}

    def show(
        self,
        state: Connection,
        statuses: Mapping[str, WorkerStatus],
        ahead: Collection[str],
        more: Mapping[str, list[Condition]],
    ) -> None:
        """``ahead`` are those beyond the log's end; ``more`` is what else is to be said of them."""
        now = time.monotonic()
        for consumer, status in statuses.items():
            if self._is_news(consumer, status, now):
                show_worker(state, self._source, consumer, status)
                self._shown[consumer] = status, now
            conditions = list(_conditions(consumer, status, consumer in ahead))
            conditions += more.get(consumer, [])
            if conditions != self._reported.get(consumer):
                report_conditions(
                    state, self._source, self._term, conditions, consumer=consumer, scope="worker_"
                )
                self._reported[consumer] = conditions

    def forget(self, state: Connection, consumer: str) -> None:
        """A consumer has no worker any more."""
        if self._shown.pop(consumer, None) is not None:
            show_worker(state, self._source, consumer, WorkerStatus(None, Reason.INACTIVE.value))
        self._reported.pop(consumer, None)

    def _is_news(self, consumer: str, status: WorkerStatus, now: float) -> bool:
        """Whether SQL says something else; a try may be over before it is seen."""
        if consumer not in self._shown:
            return True
        was, at = self._shown[consumer]
        if (was.state, was.reason) != (status.state, status.reason):
            return True
        if was.retry_s is None or status.retry_s is None:
            return was.retry_s is not status.retry_s
        return now + status.retry_s > at + was.retry_s + _RETRY_LATER_S


def slow_step(consumer: str, work: Work, age_s: float, deadline_s: float) -> Condition:
    """Work for a consumer that takes longer than the deadline."""
    # In steps of the deadline: a text that changes each second would be written each second.
    shown_s = age_s // deadline_s * deadline_s
    return Condition(
        "worker_slow",
        "error" if age_s > deadline_s * GIVEN_UP_AFTER else "warning",
        f"{work.value} {consumer} has been under way for more than {shown_s:.0f} s; nothing else "
        "is delivered to it until it ends",
        fix=_FIXES[work],
    )


def slow_feed(step: BodyStep, age_s: float, deadline_s: float) -> Condition:
    """A range of the log that is not decoded, or not taken, within the deadline."""
    shown_s = age_s // deadline_s * deadline_s
    return Condition(
        "feed_slow",
        "warning",
        f"a range of {step.rows} changes has been at the step {step.name} for more than "
        f"{shown_s:.0f} s",
        fix="look at Spark's executors, at the sinks and at the load of the machine; "
        "spark.deadline_s says when this is reported",
    )


def silent_spark(age_s: float, deadline_s: float, given_up_s: float) -> Condition:
    """Spark's JVM has not answered for longer than the deadline."""
    shown_s = age_s // deadline_s * deadline_s
    return Condition(
        "feed_silent",
        "error",
        f"Spark's JVM has not answered for more than {shown_s:.0f} s",
        fix=f"after {given_up_s:.0f} s it is ended, and a new driver process begins; look "
        "at the memory and the load of the machine",
    )


def stopped_feed(source: str, error: WalbrookError | None) -> Condition:
    """The query of a source failed and has decoded nothing since."""
    return Condition(
        "feed_stopped",
        "error",
        f"the feed of source {source} cannot run: {error}",
        fix="it is started again with a growing pause, after several failures of Spark in a new "
        "driver process; if that does not help, look at the log of the service for the cause",
    )


def _conditions(consumer: str, status: WorkerStatus, ahead: bool) -> Iterator[Condition]:
    if status.failing:
        yield Condition(
            "worker_failing",
            "warning",
            f"{consumer} gets nothing at the moment: {status.reason}",
            fix="it is tried again with pauses of up to 30 seconds; if the reason stays, mend it "
            "at the destination or in the configuration",
        )
    if status.state is WorkerState.PAUSED:
        names = status.paused or (consumer,)
        commands = " and ".join(f"walbrook resume {name}" for name in names)
        calls = ", ".join(f"walbrook.resume('{name}')" for name in names)
        yield Condition(
            "worker_paused",
            "warning",
            f"{consumer} is paused: it gets nothing until it is resumed. The change log keeps what "
            "it lacks, within its bounds; walbrook.gaps has what was given up",
            fix=f"{commands}, or SELECT {calls}",
        )
    if ahead:
        yield Condition(
            "worker_ahead",
            "warning",
            f"the cursor of {consumer} stands beyond the end of the change log: it gets nothing "
            "until the log reaches it",
            fix="if that was not meant, move it back: walbrook.cursors shows where the others are",
        )
