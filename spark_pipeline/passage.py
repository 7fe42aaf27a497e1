"""One query's way along the log: what is next, who has got how far, what went wrong.

Spark calls ``take`` for each micro-batch: decode, restore order by markers, deliver each consumer's
share, settle in one transaction. A consumer's cursor moves only over what its sink said is safe.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame

from cdc.config import Config, Database
from cdc.config import Sink as SinkConfig
from cdc.connection import Connection
from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.format import Wanted
from cdc.errors import CorruptionError, TransientError, WalbrookError
from cdc.log.open import open_log
from cdc.log.view import LogReader
from cdc.state.dead_letters import DeadLetter, report_dead_letters
from cdc.state.positions import (
    Settlement,
    check_nobody_left_behind,
    consumer_cursors,
    restart_cursor,
    settle,
)
from spark_pipeline.announce import BatchRows
from spark_pipeline.dead import dead_letters
from spark_pipeline.delivery import Origin, Outcome, Share
from spark_pipeline.exchange import Exchange, SliceMarker
from spark_pipeline.forms import wanted_by
from spark_pipeline.gaps import pass_gaps
from spark_pipeline.plan import DRIVER_WORK_MAX, DriverPlan, Plan, SparkPlan
from spark_pipeline.reorder import Reorder
from spark_pipeline.versions import Versions

_STARTS_MAX = 10
_THREADS_MAX = 8
_HEALTH_S = 5.0  # how often acknowledged dead letters are looked for


@dataclass(frozen=True)
class LaneSettings:
    """What a lane needs to know; ``term`` is this start of the service."""

    source: str
    term: int
    origin: Origin
    consumers: list[SinkConfig]
    state_dsn: str
    log_directory: Path
    checkpoint_directory: Path
    micro_batch_rows: int
    micro_batch_bytes: int

    @property
    def wanted(self) -> Wanted:
        """What decode is asked for, so that every consumer finds its own in it."""
        return wanted_by(self.consumers)

    @classmethod
    def of(cls, config: Config, database: Database, term: int) -> LaneSettings:
        parameters = conninfo_to_dict(database.dsn())
        return cls(
            source=database.name,
            term=term,
            origin=Origin(
                database.name, str(parameters.get("host", "")), str(parameters.get("dbname", ""))
            ),
            consumers=[s for s in config.sinks_of(database.name) if s.status == "active"],
            state_dsn=config.state_dsn(),
            log_directory=config.log.directory / database.name,
            checkpoint_directory=config.spark.checkpoint_directory / database.name,
            micro_batch_rows=config.spark.micro_batch_rows,
            micro_batch_bytes=config.spark.micro_batch_bytes,
        )


class Passage:
    """The state of one query; ``next_batch`` is the first that is not settled."""

    def __init__(
        self,
        settings: LaneSettings,
        state: Connection,
        view: LogReader,
        exchange: Exchange,
        run: str,
    ) -> None:
        self._settings = settings
        self._state = state
        self._exchange = exchange
        self._run = run
        self.failure: WalbrookError | None = None
        self.failed = threading.Event()
        self.history = view.history()
        self._cursors: dict[str, Cursor] = {}
        self._reported = -_HEALTH_S  # monotonic
        self._versions = Versions({})
        self._reorder = Reorder(self._first_batch(view))
        self.next_batch = self._reorder.next_batch

    def _first_batch(self, view: LogReader) -> int:
        """Where the log must be read from, once everyone has passed what it gave up.

        Telling sinks of a gap takes time, in which the log may give up more: then once more.
        """
        settings, state = self._settings, self._state
        shares = {consumer.name: self._share(consumer) for consumer in settings.consumers}
        for _ in range(_STARTS_MAX):
            earliest, evicted = floors = view.floors()
            pass_gaps(state, evicted, source=settings.source, term=settings.term, shares=shares)
            check_nobody_left_behind(state, settings.source, earliest)
            self._cursors = consumer_cursors(state, settings.source)
            lowest = min([restart_cursor(state, settings.source), *self._cursors.values()])
            first = view.seek(lowest)
            if view.floors() == floors:
                break
        else:
            raise TransientError("the log gives up changes faster than its gaps can be told")
        if inactive := sorted(set(shares) - set(self._cursors)):
            raise TransientError(
                f"consumers {', '.join(inactive)} are not active in walbrook.consumers",
                fix="set active to true there, or take their sinks out of the configuration",
            )
        self._versions = Versions.load(state, settings.source, lowest)
        return first

    def take(self, markers: DataFrame, _batch_id: int) -> None:
        """One micro-batch, called by Spark.

        Raising here would make Spark print pages and tell the lane only a text. So a failure is
        kept for the lane, which stops the query; until it has, nothing more is taken.
        """
        if self.failure is not None:
            return
        try:
            self._take(markers)
        except Exception as error:
            self.failure = error if isinstance(error, WalbrookError) else told(error)
            self.failed.set()

    def _take(self, frame: DataFrame) -> None:
        plan = self._plan(frame)
        slices = self._reorder.micro_batch(plan.decode())
        end = slices[-1].high
        as_of = _as_of(slices)
        new = self._versions.pass_over(slices, self._cursors.values(), self._look)
        shares = [
            self._share(
                consumer,
                start=self._cursors[consumer.name],
                end=end,
                slices=[piece for piece in slices if piece.rows],
            )
            for consumer in self._settings.consumers
            if self._cursors[consumer.name] < end
        ]
        outcomes = _deliver(plan, shares)
        settle(
            self._state,
            source=self._settings.source,
            term=self._settings.term,
            read_to=end,
            consumers={
                outcome.consumer: _settlement(outcome, share, as_of, self._dead(share, outcome))
                for share, outcome in zip(shares, outcomes, strict=True)
            },
            versions=new,
        )
        self._report(any(piece.errors for piece in slices))
        self._exchange.clear()
        for outcome in outcomes:
            self._cursors[outcome.consumer] = outcome.cursor
            if outcome.error is not None:
                raise TransientError(
                    f"consumer {outcome.consumer} stands at {outcome.cursor}: {outcome.error}"
                ) from outcome.error
        self._versions.forget_below(min(self._cursors.values(), default=end))
        self.next_batch = self._reorder.next_batch

    def _look(self, batch_idx: int) -> BatchRows:
        """A batch of the log; the lane's own view is for another thread."""
        with closing(open_log(self._settings.log_directory, history=self.history)) as log:
            (rows,) = (BatchRows.of(frame) for frame in log.frames(batch_idx, batch_idx + 1))
            return rows

    def _dead(self, share: Share, outcome: Outcome) -> Iterator[DeadLetter]:
        """What a consumer went on without; of most micro-batches nothing, and nothing is read."""
        if any(piece.errors for piece in share.slices):
            with closing(open_log(self._settings.log_directory, history=self.history)) as log:
                yield from dead_letters(share, outcome.cursor, log)

    def _report(self, news: bool) -> None:
        """Tell of dead letters at once, of their end soon after an operator deleted them."""
        if news or time.monotonic() - self._reported >= _HEALTH_S:
            report_dead_letters(self._state, self._settings.source, self._settings.term)
            self._reported = time.monotonic()

    def _plan(self, frame: DataFrame) -> Plan:
        """The cheapest plan for the size: a few rows are not worth a Spark job."""
        planned = self._exchange.planned()
        if planned.rows * max(1, len(self._settings.consumers)) <= DRIVER_WORK_MAX:
            return DriverPlan(
                self._settings.log_directory,
                self._exchange.directory,
                planned,
                self.history,
                self._settings.wanted,
            )
        return SparkPlan(frame)

    def _share(
        self,
        consumer: SinkConfig,
        start: Cursor = ORIGIN,
        end: Cursor = ORIGIN,
        slices: Sequence[SliceMarker] = (),
    ) -> Share:
        settings = self._settings
        told = None
        if "schema_change" in consumer.actions:
            told = self._versions.between(start, end)
        return Share(
            consumer, settings.origin, self._run, start, end, list(slices), settings.wanted, told
        )


def _deliver(plan: Plan, shares: list[Share]) -> list[Outcome]:
    """Each share in a thread of its own: most of the time is spent waiting for destinations."""
    try:
        if len(shares) <= 1:
            return [plan.deliver(share) for share in shares]
        with ThreadPoolExecutor(min(_THREADS_MAX, len(shares))) as threads:
            return list(threads.map(plan.deliver, shares))
    finally:
        plan.close()


def _as_of(slices: list[SliceMarker]) -> datetime:
    """Up to when a consumer has everything that was committed, once it has these slices."""
    committed_us = max(piece.commit_us for piece in slices)
    if not committed_us:  # only idle progress: nothing was committed for us until now
        return datetime.now(UTC)
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=committed_us)


def _settlement(
    outcome: Outcome, share: Share, as_of: datetime, dead: Iterator[DeadLetter]
) -> Settlement:
    failed = outcome.error is not None
    return Settlement(
        since=share.start,
        cursor=outcome.cursor,
        delivered=outcome.delivered,
        absorbed=outcome.absorbed,
        last_commit=outcome.last_commit if failed else as_of,
        error=str(outcome.error) if failed else None,
        dead=dead,
    )


def told(error: Exception) -> WalbrookError:
    """An error that came through Spark: what our own code said in a worker, or its first line.

    Only damage keeps its class: everything else is tried again all the same.
    """
    text = str(error).strip()
    ours = re.findall(r"^cdc\.errors\.(\w+): (.+)$", text, re.MULTILINE)
    if not ours:
        first = next(iter(text.splitlines()), "")
        return TransientError(f"{type(error).__name__}: {first}")
    name, what = ours[-1]
    return CorruptionError(what) if name == CorruptionError.__name__ else TransientError(what)
