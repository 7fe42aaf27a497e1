"""One query's way along the log: what is next, who has got how far, what went wrong.

``take`` is called for each micro-batch: decode, restore order by markers, deliver to each consumer,
settle in one transaction. A consumer's cursor moves only over what its sink said is safe. One that
fails, or takes much longer than the others, leaves the lane; nobody else waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime

import psycopg
from pyspark.sql import DataFrame, SparkSession

from cdc.config import Sink as SinkConfig
from cdc.connection import Connection, connect
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError, WalbrookError
from cdc.log.open import open_log
from cdc.log.segment import high_of
from cdc.log.view import LogReader
from cdc.state.dead_letters import report_dead_letters
from cdc.state.lanes import LaneEpoch, Step, open_lane
from cdc.state.positions import (
    left_behind,
    report_consumer,
    restart_cursor,
)
from cdc.state.roll import call_roll
from spark_pipeline.backlog import fits, fitting
from spark_pipeline.delivery import Share
from spark_pipeline.errands import Deliveries, Errand, Leg
from spark_pipeline.exchange import Exchange, PlannedRange, SliceMarker
from spark_pipeline.gaps import pass_gaps
from spark_pipeline.ledgers import Ledgers
from spark_pipeline.members import Departure, Members
from spark_pipeline.outcome import Outcome
from spark_pipeline.plan import Plan, PlanUse
from spark_pipeline.planner import ATTEMPTS_IN_DRIVER, Planner
from spark_pipeline.poison import told
from spark_pipeline.post import Post, Progress
from spark_pipeline.reorder import Reorder
from spark_pipeline.settings import LaneSettings
from spark_pipeline.settling import Settler, as_of

_STARTS_MAX = 10
_NEAR_ENOUGH = 3  # micro-batches in a row after which little was left
_FIRST_PATIENCE = 10
_HEALTH_S = 5.0  # how often acknowledged dead letters are looked for


class Passage:
    """The state of one query; ``next_batch`` is the first that is not settled."""

    def __init__(
        self,
        settings: LaneSettings,
        state: Connection,
        view: LogReader,
        exchange: Exchange,
        run: str,
        post: Post,
        spark: SparkSession | None = None,
    ) -> None:
        self._settings = settings
        self._state = state
        self._exchange = exchange
        self._run = run
        self._post = post
        self._consumers = {consumer.name: consumer for consumer in settings.consumers}
        self.failure: WalbrookError | None = None
        self.ended = threading.Event()  # failed, or nobody is left to be served
        self.history = view.history()
        self.members = Members(post.left)
        self._planner = Planner(settings, exchange, self.history, post.pool, spark)
        self._deliveries = Deliveries(self.ended, settings.slots)
        self._ledgers = Ledgers(settings.source, settings.term, settings.ledger)
        self._settler = Settler(settings.source, settings.term, self._open_log)
        self._reported = -_HEALTH_S  # monotonic
        self._progress: Progress | None = None
        self.taken = 0  # micro-batches that were settled
        self._near = 0
        self.lane: LaneEpoch = open_lane(
            state, settings.source, settings.term, post.name, post.consumers
        )
        self._reorder = Reorder(self._first_batch(view))
        self.next_batch = self._reorder.next_batch

    def _first_batch(self, view: LogReader) -> int:
        """Where the log must be read from, once its members have passed what it gave up.

        Telling sinks of a gap takes time, in which the log may give up more: then once more.
        """
        settings, state = self._settings, self._state
        self._ledgers.join(call_roll(state, settings.source), self._post.consumers)
        shares = {name: self._share(self._consumers[name]) for name in self._post.consumers}
        for _ in range(_STARTS_MAX):
            earliest, evicted = floors = view.floors()
            untold = pass_gaps(
                state, evicted, source=settings.source, term=settings.term, shares=shares
            )
            lost = left_behind(state, settings.source, earliest)
            roll = call_roll(state, settings.source)
            self._ledgers.join(roll, shares)
            refused = {n: error for n, error in (untold | lost).items() if n in shares}
            serving = {n: at for n, at in roll.served.items() if n in shares and n not in refused}
            first = self._start(view, serving, roll.standing)
            if view.floors() == floors:
                break
        else:
            raise TransientError("the log gives up changes faster than its gaps can be told")
        self.members.admit(serving)
        for name, error in refused.items():
            report_consumer(state, settings.source, name, error)
        self.members.leave(Departure(name, "failed", error) for name, error in refused.items())
        self.members.leave(
            Departure(name, roll.absence(name)) for name in shares if name not in roll.served
        )
        return first

    def _start(
        self, view: LogReader, serving: dict[str, Cursor], standing: dict[str, Cursor]
    ) -> int:
        if serving:
            return view.seek(min(serving.values()))
        # All are served elsewhere, and will join where this lane then is.
        if standing and self.lane.reached is not None:
            return view.seek(self.lane.reached)
        return view.seek(restart_cursor(self._state, self._settings.source))

    def take(self, markers: DataFrame | None, _batch_id: int) -> None:
        """One micro-batch as Spark planned it."""
        # A note that is missing for another reason shows at the next one: as a missing range.
        if not self.ended.is_set() and (planned := self._exchange.planned()) is not None:
            self.take_range(planned, markers)

    def take_range(self, planned: PlannedRange, markers: DataFrame | None = None) -> None:
        """Serve a range of the log; without ``markers`` in this process.

        Raising here would make Spark print pages and tell the lane only a text. So a failure is
        kept for the lane, which stops the query; until it has, nothing more is taken.
        """
        if self.ended.is_set():
            return
        try:
            self._take(markers, planned)
        except Exception as error:
            self.fail(error)
        finally:
            self._progress = None
            self.members.end()

    def fail(self, error: Exception) -> None:
        """Take nothing more; the lane is told why."""
        self.failure = told(error)
        self.ended.set()

    @property
    def suspicious(self) -> bool:
        """Whether what comes next may be what ended this process again and again."""
        return self.lane.attempts > ATTEMPTS_IN_DRIVER and not self.taken

    def progress(self) -> Progress | None:
        """What the micro-batch under way is at; None between two."""
        at = self._progress
        return at and replace(at, waiting_for=self._deliveries.waiting_for)

    def give_up(self, why: str) -> None:
        """Take nothing more; what the micro-batch under way still tries to settle is refused."""
        self.failure = self.failure or TransientError(why)
        self.ended.set()

    def widen(self, by: float) -> None:
        """Let micro-batches take that much longer than they should."""
        self._exchange.widen(by)

    def close(self) -> None:
        self._deliveries.close()

    def _take(self, frame: DataFrame | None, planned: PlannedRange) -> None:
        started = time.monotonic()
        self._at("decode", planned, started)
        bridges = self._join(self.members.begin(), planned)
        plan = self._planner.plan(frame, planned, len(self.members.cursors), self.suspicious)
        use = PlanUse(plan)
        try:
            slices = self._reorder.micro_batch(plan.decode())
            errands = self._errands(plan, slices, bridges)
            for errand in errands:
                use.begin()
                self._exchange.hold(errand.files)
            self._at("deliver", planned, started)
            outcomes = self._deliver(errands, as_of(slices), use)
            self._at("settle", planned, started)
            self._post.queues.settling(outcomes.values())
            took_s = time.monotonic() - started
            step = Step(self.lane, self.taken, planned.rows, took_s * 1000)
            moved = self._settler.settle(
                self._state,
                {e.consumer: (e, outcomes[e.consumer]) for e in errands if e.consumer in outcomes},
                read_to=slices[-1].high,
                as_of=as_of(slices),
                step=step,
            )
        finally:
            use.end()
        self.taken += 1
        self._settled(outcomes, moved)
        self._ledgers.report(self._state, outcomes)
        dead = any(outcome.has_dead for outcome in outcomes.values())
        failed = any(leg.share.failed for errand in errands for leg in errand.legs)
        self._report(dead or failed or any(piece.errors for piece in slices))
        for errand in errands:
            if errand.consumer in outcomes:
                self._exchange.release(errand.files)
        self._exchange.clear()
        self.next_batch = self._reorder.next_batch
        self._end_if_caught_up(planned.rows, took_s)

    def _deliver(self, errands: list[Errand], when: datetime, use: PlanUse) -> dict[str, Outcome]:
        """The outcomes of those that ended in time; the others have left the lane."""

        def late(errand: Errand, outcome: Outcome) -> None:
            self._late(errand, outcome, when, use)

        # The first time connections are opened and code is compiled.
        patience_s = self._settings.patience_s * (1 if self.taken else _FIRST_PATIENCE)
        outcomes = self._deliveries.run(errands, late, patience_s)
        for errand in errands:
            if errand.consumer in outcomes:
                use.end()
            else:
                self.members.detach(errand.consumer)
        return outcomes

    def _settled(self, outcomes: dict[str, Outcome], moved: list[str]) -> None:
        for outcome in outcomes.values():
            self._post.queues.settled(outcome)
        self.members.moved({name: outcome.cursor for name, outcome in outcomes.items()})
        self.members.leave(Departure(name, "moved") for name in moved)
        self.members.leave(
            outcome.departure()
            for name, outcome in outcomes.items()
            if outcome.error is not None and name not in moved
        )

    def _late(
        self,
        errand: Errand,
        outcome: Outcome,
        when: datetime,
        use: PlanUse,
    ) -> None:
        """An errand that outlived its micro-batch has ended; its consumer has left."""
        departure = outcome.departure() if outcome.error else Departure(errand.consumer, "slow")
        self._post.queues.settling([outcome])
        try:
            with connect(self._settings.state_dsn, name=f"{self._settings.source}:late") as state:
                results = {errand.consumer: (errand, outcome)}
                if self._settler.settle(state, results, read_to=errand.end, as_of=when):
                    departure = Departure(errand.consumer, "moved")
            self._post.queues.settled(outcome)
        except (WalbrookError, psycopg.Error) as error:
            departure = Departure(errand.consumer, "failed", told(error))
        finally:
            self._exchange.release(errand.files)
            use.end()
            self.members.leave([departure])

    def _end_if_caught_up(self, rows: int, took_s: float) -> None:
        """Let the shared lane have those who are where it is, or almost and stay so."""
        if not self._post.catches_up:
            return
        with closing(self._open_log()) as log:
            end = log.next_batch()
            batches, left = fitting(log, self.next_batch, end, self._settings.bridge)
        all_of_it = self.next_batch + batches >= end
        quick = bool(rows) and left * took_s / rows <= self._settings.patience_s / 2
        self._near = self._near + 1 if all_of_it and quick else 0
        there = self.next_batch >= end or self._near >= _NEAR_ENOUGH
        if there and time.monotonic() >= self._post.rejoin_after:
            self.members.leave(Departure(name, "caught_up") for name in self.members.cursors)
        if not self.members.cursors:
            self.ended.set()

    def _join(self, invited: Sequence[str], planned: PlannedRange) -> dict[str, Leg]:
        """Admit those who were invited; the answer is what they lack of what the lane has had."""
        if not invited:
            return {}
        roll = call_roll(self._state, self._settings.source)
        self._ledgers.join(roll, invited)
        bridges: dict[str, Leg] = {}
        with closing(self._open_log()) as log:
            for name in invited:
                cursor = roll.served.get(name)
                if cursor is None:
                    self.members.leave([Departure(name, roll.absence(name))])
                    continue
                if name in roll.untold:  # before anything that follows the gap
                    self.members.leave([Departure(name, "gap")])
                    continue
                first = log.seek(cursor)
                if not fits(log, first, planned.start, self._settings.bridge):
                    self.members.leave([Departure(name, "behind")])
                    continue
                self.members.admit({name: cursor})
                if first < planned.start:
                    (before,) = log.entries(planned.start - 1, planned.start)
                    share = replace(self._share(self._consumers[name], cursor), end=high_of(before))
                    size = int(log.entries(first, planned.start)["bytes"].sum())
                    bridges[name] = self._planner.bridge(share, first, planned.start, size)
        return bridges

    def _errands(
        self, plan: Plan, slices: list[SliceMarker], bridges: dict[str, Leg]
    ) -> list[Errand]:
        """What each member lacks up to the end of ``slices``."""
        errands: list[Errand] = []
        for name, cursor in self.members.cursors.items():
            legs: list[Leg] = []
            if bridge := bridges.get(name):
                legs.append(bridge)
                cursor = bridge.share.end
            if cursor < slices[-1].high:
                share = self._share(self._consumers[name], cursor, slices)
                legs.append(Leg(share, plan, self._planner.judge))
            if legs:
                for leg in legs:
                    leg.share = self._post.queues.before(self._state, leg.share)
                errands.append(Errand(name, tuple(legs)))
        return errands

    def _report(self, news: bool) -> None:
        """Tell of dead letters at once, of their end soon after an operator deleted them."""
        if news or time.monotonic() - self._reported >= _HEALTH_S:
            report_dead_letters(self._state, self._settings.source, self._settings.term)
            self._reported = time.monotonic()

    def _open_log(self) -> LogReader:
        return open_log(self._settings.log_directory, history=self.history)

    def _at(self, step: str, planned: PlannedRange, since: float) -> None:
        self._progress = Progress(step, since, planned.rows, [])

    def _share(
        self, consumer: SinkConfig, start: Cursor = ORIGIN, slices: Sequence[SliceMarker] = ()
    ) -> Share:
        """What a consumer that stands at ``start`` lacks of these slices."""
        standing = self.members.cursors.get(consumer.name)
        return Share(
            consumer,
            self._settings.origin,
            self._run,
            start,
            slices[-1].high if slices else ORIGIN,
            [piece for piece in slices if piece.rows],
            self._settings.wanted,
            ledger=self._ledgers.place(consumer, standing),
            state_dsn=self._settings.state_dsn,
            standing=standing,
        )
