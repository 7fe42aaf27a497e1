"""The lanes of one source: the shared one, and those in which single consumers catch up.

Every consumer begins in the shared lane, unless it is far behind the others. One that leaves it
(its sink failed, it was too slow, its cursor was moved) is served by a lane of its own from its
cursor on, and goes back when it has caught up. What must always hold: a consumer is in one lane at
a time; there are never more lanes than configured; what a lane could not do is tried again with a
pause.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import psycopg
import structlog
from pyspark.sql import SparkSession

from cdc.connection import Connection, connect
from cdc.errors import CorruptionError, GapError, OperatorError, WalbrookError
from cdc.log.damage import report_damage
from cdc.log.manifest import read_manifest
from cdc.log.open import open_log
from cdc.replication.stop import StopSignal
from cdc.state.health import Condition, report_conditions
from cdc.state.lanes import (
    SHARED,
    Standing,
    clear_lanes,
    close_lane,
    report_lane,
    show_members,
    show_standing,
)
from cdc.state.positions import consumer_cursors, restart_cursor
from spark_pipeline.backlog import rows_between
from spark_pipeline.lane import Begun, Lane
from spark_pipeline.members import Departure
from spark_pipeline.passage import Passage
from spark_pipeline.poison import told
from spark_pipeline.post import Post
from spark_pipeline.roster import Roster, grouped
from spark_pipeline.settings import LaneSettings

_logger = structlog.get_logger("walbrook.lane")
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_TICK_S = 0.1
_LOOK_S = 1.0  # how often cursors are looked at for somebody else's moves
_GIVEN_UP_AFTER = 5  # deadlines


class SourceLanes:
    """Serves a source's consumers until told to stop."""

    def __init__(self, spark: SparkSession, settings: LaneSettings, stop: StopSignal) -> None:
        self._spark = spark
        self._settings = settings
        self._stop = stop
        self._roster = Roster(consumer.name for consumer in settings.consumers)
        self._departures: queue.SimpleQueue[Departure] = queue.SimpleQueue()
        self._passages: dict[str, Passage] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()  # around the roster and the passages
        self._fatal: list[Exception] = []
        self._state: Connection | None = None
        self._looked = 0.0
        self._shown: tuple[dict[str, Standing], dict[str, list[str]]] = ({}, {})
        self._told_slow = True  # an earlier process may have told something

    def run(self, drain_timeout_s: float) -> None:
        """Until a stop, then drain; raises what only a person can mend."""
        self._wait_for_log()
        self._place()
        self._begin(SHARED, partial(self._run_shared, drain_timeout_s))
        while not self._stop.wait(_TICK_S) and not self._fatal:
            self._tick()
        if self._fatal:
            self._stop.request()
        for thread in list(self._threads.values()):
            thread.join()
        if self._state is not None:
            self._state.close()
        if self._fatal:
            raise self._fatal[0]

    def _wait_for_log(self) -> None:
        """Until its reader has begun it there is no history to follow."""
        while read_manifest(self._settings.log_directory) is None:
            if self._stop.wait(_TICK_S):
                return

    def _place(self) -> None:
        """Those that are far behind the first catch up by themselves, all others go together."""
        behind: list[str] = []
        try:
            standing = consumer_cursors(self._connected(), self._settings.source)
            clear_lanes(self._connected(), self._settings.source)
            with closing(open_log(self._settings.log_directory)) as log:
                top = log.seek(max(standing.values())) if standing else 0
                most = self._settings.micro_batch_rows
                for name, cursor in standing.items():
                    if rows_between(log, log.seek(cursor), top, most) > most:
                        behind.append(name)
        except (WalbrookError, psycopg.Error) as error:
            # Where all begin together nothing is lost; whoever is behind is then waited for.
            _logger.warning("lane.not_placed", source=self._settings.source, error=str(error))
        for consumer in self._settings.consumers:
            if consumer.name in behind:
                self._roster.wait(consumer.name, "behind", due_at=time.monotonic())
            else:
                self._roster.put(consumer.name, SHARED)

    def _run_shared(self, drain_timeout_s: float) -> None:
        """Query after query, with a pause after a failure, until a stop; then drain."""
        backoff_s = _BACKOFF_FIRST_S
        # A stop may come before Spark is up; what the log holds is delivered all the same.
        while not self._stop.requested or (drain_timeout_s and self._behind()):
            started = time.monotonic()
            self._place_departed()
            with self._lock:
                members = self._roster.in_lane(SHARED)
            post = Post(tuple(members), self._departures.put)
            try:
                self._lane(post).serve(self._begun(post), drain_timeout_s)
                return
            except Exception as error:
                if self._is_fatal(SHARED, error):
                    return
            if time.monotonic() - started > _BACKOFF_MAX_S:
                backoff_s = _BACKOFF_FIRST_S
            if self._stop.wait(backoff_s):
                return
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    def _run_catch_up(self, post: Post) -> None:
        """One query; whoever is left in it when it fails waits for another."""
        try:
            self._lane(post).serve(self._begun(post))
        except Exception as error:
            self._is_fatal(post.name, error)
            passage = self._passages.get(post.name)
            left = passage.members.cursors if passage else post.consumers
            for name in left:
                self._departures.put(Departure(name, "lane_failed", told(error)))
        finally:
            self._end(post.name)

    def _lane(self, post: Post) -> Lane:
        settings = self._settings
        if post.catches_up:
            served = [c for c in settings.consumers if c.name in post.consumers]
            settings = replace(settings, consumers=served)
        return Lane(self._spark, settings, self._stop, post)

    def _begun(self, post: Post) -> Begun:
        def begun(passage: Passage) -> None:
            with self._lock:
                self._passages[post.name] = passage
                for name in set(self._roster.in_lane(post.name)) - set(post.consumers):
                    passage.members.invite(name)

        return begun

    def _end(self, name: str) -> None:
        with self._lock:
            passage = self._passages.pop(name, None)
            self._threads.pop(name, None)
        if passage is not None:
            try:
                with connect(self._settings.state_dsn, name=f"{self._settings.source}:lanes") as db:
                    close_lane(db, self._settings.source, passage.lane)
            except psycopg.Error as error:
                _logger.warning("lane.state_unreachable", error=str(error).strip())

    def _is_fatal(self, name: str, error: Exception) -> bool:
        """Say in the log and in SQL what keeps a lane from moving, and whether trying is no use."""
        what = str(told(error)).strip()
        _logger.warning("lane.failed", source=self._settings.source, lane=name, error=what)
        try:
            with connect(self._settings.state_dsn, name=f"{self._settings.source}:lanes") as state:
                report_lane(state, self._settings.source, self._settings.term, what, name)
        except psycopg.Error as problem:
            _logger.warning("lane.state_unreachable", error=str(problem).strip())
        if isinstance(error, CorruptionError):
            # The reader looks, and reads again from the slot what is damaged if it can.
            report_damage(self._settings.log_directory)
        # A log that was cut or evicted below a lane is no reason to stop: what that means for each
        # consumer is decided at the start, where cursors and floors are compared. What nobody
        # foresaw, such as a JVM that is gone, is mended by a new process.
        foreseen = isinstance(error, WalbrookError | psycopg.Error)
        if not foreseen or (isinstance(error, OperatorError) and not isinstance(error, GapError)):
            self._fatal.append(error)
            return True
        return False

    def _behind(self) -> bool:
        """Whether the log holds something that is not settled; not if nobody can say."""
        try:
            with connect(self._settings.state_dsn, name=f"{self._settings.source}:lanes") as state:
                lowest = restart_cursor(state, self._settings.source)
            with closing(open_log(self._settings.log_directory)) as view:
                return view.seek(lowest) < view.next_batch()
        except (WalbrookError, psycopg.Error):
            return False

    def _tick(self) -> None:
        try:
            self._place_departed()
            if time.monotonic() - self._looked >= _LOOK_S:
                self._looked = time.monotonic()
                self._look()
            self._start_lanes()
            self._show()
        except psycopg.Error as error:
            _logger.warning("lane.state_unreachable", error=str(error).strip())
            self._state = None
            self._stop.wait(_LOOK_S)
        except WalbrookError as error:
            if self._is_fatal(SHARED, error):
                return

    def _place_departed(self) -> None:
        while True:
            try:
                departure = self._departures.get_nowait()
            except queue.Empty:
                return
            told_of = {"consumer": departure.consumer, "why": departure.why}
            if departure.error is None:
                _logger.info("lane.left", source=self._settings.source, **told_of)
            else:
                _logger.warning(
                    "lane.left", source=self._settings.source, **told_of, error=str(departure.error)
                )
            with self._lock:
                self._roster.departed(departure, time.monotonic())
                if departure.why == "caught_up" and SHARED in self._passages:
                    self._passages[SHARED].members.invite(departure.consumer)

    def _look(self) -> None:
        """For cursors that somebody else moved, consumers that come and go, and lanes that hang."""
        with self._lock:
            passages = dict(self._passages)
        # Theirs first: what a lane says it has settled is in Postgres by then.
        serving = {name: passage.members.cursors for name, passage in passages.items()}
        standing = consumer_cursors(self._connected(), self._settings.source)
        for lane, cursors in serving.items():
            for consumer, cursor in cursors.items():
                if consumer not in standing:
                    passages[lane].members.let_go(consumer, "inactive")
                elif standing[consumer] < cursor:
                    passages[lane].members.let_go(consumer, "moved")
        with self._lock:
            for consumer in self._roster.parked():
                if consumer in standing:
                    self._roster.wait(consumer, "behind", due_at=time.monotonic())
        self._check_deadlines(passages)

    def _check_deadlines(self, passages: dict[str, Passage]) -> None:
        conditions: list[Condition] = []
        for lane, passage in passages.items():
            progress = passage.progress()
            age_s = time.monotonic() - progress.since if progress else 0.0
            if progress is None or age_s < self._settings.deadline_s:
                continue
            waits = (
                f", waiting for {', '.join(progress.waiting_for)}" if progress.waiting_for else ""
            )
            conditions.append(
                Condition(
                    f"lane_slow_{lane}",
                    "warning",
                    f"a micro-batch of {progress.rows} changes in lane {lane} has been at "
                    f"{progress.step} for {age_s:.0f} s{waits}",
                    fix="look at the sinks it waits for, at Spark's executors and at the load of "
                    "the state database; spark.deadline_s says when this is told",
                )
            )
            if age_s > self._settings.deadline_s * _GIVEN_UP_AFTER:
                passage.give_up(f"a micro-batch had not ended after {age_s:.0f} s")
        if conditions or self._told_slow:
            report_conditions(
                self._connected(),
                self._settings.source,
                self._settings.term,
                conditions,
                scope="lane_",
            )
            self._told_slow = bool(conditions)

    def _start_lanes(self) -> None:
        """Lanes for those that wait and are due, as many as are free."""
        with self._lock:
            due = self._roster.due(time.monotonic())
            names = [f"catch_up_{n}" for n in range(1, self._settings.catch_up_lanes + 1)]
            free = [name for name in names if name not in self._threads]
        if not due or not free:
            return
        standing = consumer_cursors(self._connected(), self._settings.source)
        served = [name for name in due if name in standing]
        for lane, consumers in zip(free, grouped(served, standing, len(free)), strict=False):
            with self._lock:
                for consumer in consumers:
                    self._roster.put(consumer, lane)
                rejoin_after = self._roster.rejoin_after(consumers)
            post = Post(tuple(consumers), self._departures.put, lane, rejoin_after)
            _logger.info(
                "lane.catching_up", source=self._settings.source, lane=lane, consumers=consumers
            )
            self._begin(lane, partial(self._run_catch_up, post))

    def _begin(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"lane-{self._settings.source}-{name}")
        with self._lock:
            self._threads[name] = thread
        thread.start()

    def _show(self) -> None:
        """Let SQL say who is served where, when that has changed."""
        with self._lock:
            standings = self._roster.standings(time.monotonic())
            members = {name: sorted(p.members.cursors) for name, p in self._passages.items()}
        shown_standings, shown_members = self._shown
        state, source = self._connected(), self._settings.source
        for consumer, standing in standings.items():
            was = shown_standings.get(consumer)
            if was is None or (was.lane, was.reason) != (standing.lane, standing.reason):
                show_standing(state, source, consumer, standing)
        for lane, names in members.items():
            if shown_members.get(lane) != names:
                show_members(state, source, lane, names)
        self._shown = (standings, members)

    def _connected(self) -> Connection:
        if self._state is None or self._state.closed:
            self._state = connect(self._settings.state_dsn, name=f"{self._settings.source}:lanes")
        return self._state


def run_lanes(
    sources: list[SourceLanes], drain_timeout_s: float, stop: StopSignal
) -> list[Exception]:
    """Run the lanes of every source in threads; the first that fails for good stops all."""
    failures: list[Exception] = []

    def run(lanes: SourceLanes) -> None:
        try:
            lanes.run(drain_timeout_s)
        except Exception as error:
            failures.append(error)
            stop.request()

    threads = [threading.Thread(target=run, args=(lanes,)) for lanes in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
