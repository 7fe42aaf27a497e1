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
from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.connection import Connection, connect
from cdc.cursor import Cursor
from cdc.errors import CorruptionError, GapError, OperatorError, TransientError, WalbrookError
from cdc.log.damage import report_damage
from cdc.log.manifest import read_manifest
from cdc.log.open import open_log
from cdc.replication.stop import StopSignal
from cdc.state.health import report_conditions
from cdc.state.lanes import SHARED, clear_lanes, close_lane, report_lane
from cdc.state.positions import restart_cursor
from cdc.state.roll import Roll, call_roll
from spark_pipeline.backlog import beyond, fits
from spark_pipeline.exchange import Exchange
from spark_pipeline.hearing import heard, listen
from spark_pipeline.lane import RUN, Begun, Lane
from spark_pipeline.looking import dismiss, reconsider
from spark_pipeline.members import Departure
from spark_pipeline.overdue import GIVEN_UP_AFTER, overdue, stopped, to_be_given_up
from spark_pipeline.passage import Passage
from spark_pipeline.poison import told
from spark_pipeline.post import Post
from spark_pipeline.queues import Queues
from spark_pipeline.redelivery import Redelivery
from spark_pipeline.relief import Relief
from spark_pipeline.roster import Roster, grouped
from spark_pipeline.settings import LaneSettings
from spark_pipeline.showing import Showing

_logger = structlog.get_logger("walbrook.lane")
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 30.0
_TICK_S = 0.1
_LOOK_S = 1.0  # how often cursors are looked at for somebody else's moves, if none is heard of
_TURN_S = 30.0  # how long a lane catches up while others wait for one
_AHEAD_S = 5.0  # how long a cursor may stand beyond the end of the log before health says so
_SPARK_FAILURES_MAX = 5  # in a row, after which a new driver process is the remedy
_SERVING_AFTER_S = 10.0  # without a micro-batch: a lane that runs this long is not failing


class SourceLanes:
    """Serves a source's consumers until told to stop."""

    def __init__(
        self,
        spark: SparkSession,
        settings: LaneSettings,
        stop: StopSignal,
        queues: Queues | None = None,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._stop = stop
        self._roster = Roster(consumer.name for consumer in settings.consumers)
        self._departures: queue.SimpleQueue[Departure] = queue.SimpleQueue()
        self._passages: dict[str, Passage] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._names = [f"catch_up_{n}" for n in range(1, settings.catch_up_lanes + 1)]
        self._begun_at: dict[str, float] = {}  # lanes that catch up
        self._lock = threading.Lock()  # around the roster, the passages and the threads
        self._fatal: list[Exception] = []
        self._shared_error: WalbrookError | None = None  # while the shared lane cannot run
        self._shared_since = 0.0  # monotonic
        self._state_away = False
        self._recoveries = 0  # of the state database
        self._state: Connection | None = None
        self._looked = 0.0
        self.queues = queues or Queues()
        self._showing = Showing(settings.source, settings.term)
        self._relief = Relief(settings, self._roster, self._lock)
        self._ahead: dict[str, float] = {}  # since when (monotonic) beyond the end of the log
        self._seen: dict[str, Cursor] = {}
        self._told_slow = True  # an earlier process may have told something

    def run(self, drain_timeout_s: float) -> None:
        """Until a stop, then drain; raises what only a person can mend."""
        self._wait_for_log()
        self._place()
        self._begin(SHARED, partial(self._run_shared, drain_timeout_s))
        self._begin("queue", Redelivery(self._settings, self.queues, self._stop, RUN).serve)
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
        behind, roll = list[str](), Roll({}, {})
        for lane in (SHARED, *self._names):
            Exchange.create(self._settings.checkpoint_directory / lane / "exchange").remove()
        try:
            roll = call_roll(self._connected(), self._settings.source)
            clear_lanes(self._connected(), self._settings.source)
            with closing(open_log(self._settings.log_directory)) as log:
                top = log.seek(max(roll.served.values())) if roll.served else 0
                for name, cursor in roll.served.items():
                    if not fits(log, log.seek(cursor), top, self._settings.bridge):
                        behind.append(name)
        except (WalbrookError, psycopg.Error) as error:
            # Where all begin together nothing is lost; whoever is behind is then waited for.
            _logger.warning("lane.not_placed", source=self._settings.source, error=error)
        for consumer in self._settings.consumers:
            if consumer.name in roll.paused:
                self._roster.departed(Departure(consumer.name, "paused"), time.monotonic())
            elif consumer.name in behind:
                self._roster.wait(consumer.name, "behind", due_at=time.monotonic())
            else:
                self._roster.put(consumer.name, SHARED)

    def _run_shared(self, drain_timeout_s: float) -> None:
        """Query after query, with a pause after a failure, until a stop; then drain."""
        backoff_s, spark_failures = _BACKOFF_FIRST_S, 0
        # A stop may come before Spark is up; what the log holds is delivered all the same.
        while not self._stop.requested or (drain_timeout_s and self._behind()):
            started = self._shared_since = time.monotonic()
            recoveries = self._recoveries
            try:
                self._place_departed()
                with self._lock:
                    # An earlier one serves nobody any more; what it told was heard.
                    if (earlier := self._passages.pop(SHARED, None)) is not None:
                        earlier.members.close()
                    members = self._roster.in_lane(SHARED)
                post = Post(tuple(members), self._departures.put, queues=self.queues)
                self._lane(post).serve(self._begun(post), drain_timeout_s)
                return
            except Exception as error:
                self._shared_error = told(error)
                if self._is_fatal(SHARED, error) or self._stop.requested:
                    return
                if isinstance(error, CorruptionError):
                    self._let_those_behind_go(error)
                if time.monotonic() - started > _BACKOFF_MAX_S:
                    backoff_s, spark_failures = _BACKOFF_FIRST_S, 0
                of_spark = isinstance(error, PySparkException | Py4JJavaError)
                spark_failures = spark_failures + 1 if of_spark else 0
                if spark_failures >= _SPARK_FAILURES_MAX:
                    self._fatal.append(error)
                    return
            if self._pause(backoff_s, recoveries):
                backoff_s = _BACKOFF_FIRST_S
            else:
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    def _let_those_behind_go(self, error: CorruptionError) -> None:
        """Damage concerns the consumers before it alone: all but the first go on by themselves."""
        with self._lock:
            passage = self._passages.get(SHARED)
        cursors = {} if passage is None else passage.members.cursors
        for name, cursor in cursors.items():
            if cursor < max(cursors.values()):
                self._departures.put(Departure(name, "lane_failed", error))

    def _pause(self, pause_s: float, recoveries: int) -> bool:
        """Wait before the next try, at most until a stop or a recovery of the state database.

        ``recoveries`` is their number before the try that failed. Returns whether there was one.
        """
        until = time.monotonic() + pause_s
        while self._recoveries == recoveries and time.monotonic() < until:
            if self._stop.wait(_TICK_S):
                break
        return self._recoveries != recoveries

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
        try:
            with connect(self._settings.state_dsn, name=f"{self._settings.source}:lanes") as state:
                close_lane(state, self._settings.source, name)
        except psycopg.Error as error:
            _logger.warning("lane.state_unreachable", error=error)
        with self._lock:
            passage = self._passages.pop(name, None)
            self._begun_at.pop(name, None)
            self._threads.pop(name, None)
        if passage is not None:
            passage.members.close()

    def _is_fatal(self, name: str, error: Exception) -> bool:
        """Say in the log and in SQL what keeps a lane from moving, and whether trying is no use."""
        what = told(error)
        if isinstance(error, OSError | Py4JNetworkError):
            what = TransientError(f"Spark does not answer, its JVM may be gone: {what.what}")
        _logger.warning("lane.failed", source=self._settings.source, lane=name, error=what)
        try:
            with connect(self._settings.state_dsn, name=f"{self._settings.source}:lanes") as state:
                report_lane(state, self._settings.source, self._settings.term, what, name)
        except psycopg.Error as problem:
            _logger.warning("lane.state_unreachable", error=problem)
        if isinstance(error, CorruptionError):
            # The reader looks, and reads again from the slot what is damaged if it can.
            report_damage(self._settings.log_directory)
        # A log that was cut or evicted below a lane is no reason to stop: what that means for each
        # consumer is decided at the start, where cursors and floors are compared. What nobody
        # foresaw, such as a JVM that is gone, is mended by a new process.
        foreseen = isinstance(
            error, WalbrookError | psycopg.Error | PySparkException | Py4JJavaError
        )
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
            state = self._connected()
            self._note_recovery()
            told = heard(state, self._settings.source)
            if told or time.monotonic() - self._looked >= _LOOK_S:
                self._looked = time.monotonic()
                self._look()
            self._relief.tick(self._passages.get(SHARED), self._connected)
            self._start_lanes()
            self._show()
        except psycopg.Error as error:
            if not self._state_away:
                _logger.warning("lane.state_unreachable", error=error)
            self._state, self._state_away = None, True
            self._stop.wait(_LOOK_S)
        except WalbrookError as error:
            if self._is_fatal(SHARED, error):
                return

    def _note_recovery(self) -> None:
        """The state database answers again: nobody waits out a pause that it was the cause of."""
        if self._state_away:
            self._state_away = False
            self._recoveries += 1
            _logger.info("lane.state_reachable", source=self._settings.source)
            with self._lock:
                self._roster.hurry_all(time.monotonic())

    def _place_departed(self) -> None:
        heard: list[Departure] = []
        with self._lock:  # around both, so that what was told is placed in its order
            while True:
                try:
                    departure = self._departures.get_nowait()
                except queue.Empty:
                    break
                heard.append(departure)
                self._roster.departed(departure, time.monotonic())
                if departure.why == "caught_up" and SHARED in self._passages:
                    self._passages[SHARED].members.invite(departure.consumer)
        for departure in heard:
            told_of = {"source": self._settings.source, "consumer": departure.consumer}
            if departure.why == "caught_up":
                _logger.info("lane.caught_up", **told_of)
            elif departure.error is None:
                _logger.info("lane.left", **told_of, why=departure.why)
            else:
                _logger.warning("lane.left", **told_of, why=departure.why, error=departure.error)

    def _look(self) -> None:
        """For cursors that somebody else moved, consumers that come and go, and lanes that hang."""
        with self._lock:
            passages = dict(self._passages)
        # Theirs first: what a lane says it has settled is in Postgres by then.
        serving = {name: passage.members.cursors for name, passage in passages.items()}
        roll = call_roll(self._connected(), self._settings.source)
        for lane, cursors in serving.items():
            dismiss(passages[lane].members, cursors, roll)
        with self._lock:
            reconsider(self._roster, roll, self._seen, time.monotonic())
            # What its last micro-batch settled is nobody's move: looked at from the next look on.
            waiting = self._roster.waiting()
            self._seen = {name: at for name, at in roll.served.items() if name in waiting}
        with closing(open_log(self._settings.log_directory)) as log:
            now = time.monotonic()
            self._ahead = {name: self._ahead.get(name, now) for name in beyond(log, roll.standing)}
        self._check_deadlines(passages)

    def _check_deadlines(self, passages: dict[str, Passage]) -> None:
        now, deadline_s = time.monotonic(), self._settings.deadline_s
        progress = {lane: passage.progress() for lane, passage in passages.items()}
        with self._lock:
            leaving = self._roster.leaving(now)
        for lane, passage in passages.items():
            if to_be_given_up(progress[lane], deadline_s=deadline_s, now=now):
                passage.give_up(f"a micro-batch had not ended after {GIVEN_UP_AFTER} deadlines")
        conditions = list(overdue(progress, leaving, deadline_s=deadline_s, now=now))
        conditions += self._relief.conditions()
        if self._is_shared_stopped(passages.get(SHARED), now):
            conditions.append(stopped(self._settings.source, self._shared_error))
        if conditions or self._told_slow:
            report_conditions(
                self._connected(),
                self._settings.source,
                self._settings.term,
                conditions,
                scope="lane_",
            )
            self._told_slow = bool(conditions)

    def _is_shared_stopped(self, passage: Passage | None, now: float) -> bool:
        """Whether the shared lane failed and has done nothing since."""
        if passage is None or passage.ended.is_set():
            return self._shared_error is not None
        if passage.taken or now - self._shared_since > _SERVING_AFTER_S:
            self._shared_error = None
        return self._shared_error is not None

    def _start_lanes(self) -> None:
        """Lanes for those that wait and are due, as many as are free."""
        now = time.monotonic()
        with self._lock:
            due = self._roster.due(now)
            free = [name for name in self._names if name not in self._threads]
        if due and not free:
            self._take_turns(now)
        if not due or not free:
            return
        standing = call_roll(self._connected(), self._settings.source).served
        served = [name for name in due if name in standing]
        with closing(open_log(self._settings.log_directory)) as log:
            places = {name: log.seek(standing[name]) for name in served}

            def near(one: str, other: str) -> bool:
                low, high = sorted((places[one], places[other]))
                return fits(log, low, high, self._settings.bridge)

            groups = grouped(served, len(free), near)
        for lane, consumers in zip(free, groups, strict=False):
            with self._lock:
                for consumer in consumers:
                    self._roster.put(consumer, lane)
                rejoin_after = self._roster.rejoin_after(consumers)
            post = Post(tuple(consumers), self._departures.put, lane, self.queues, rejoin_after)
            _logger.info(
                "lane.catching_up", source=self._settings.source, lane=lane, consumers=consumers
            )
            self._begin(lane, partial(self._run_catch_up, post))

    def _take_turns(self, now: float) -> None:
        """Somebody waits and no lane is free: the oldest one lets its consumers go, and they wait.

        So nobody waits longer than it takes for all to have had their turn.
        """
        with self._lock:
            if not any(now - since > _TURN_S for since in self._begun_at.values()):
                return
            oldest = min(self._begun_at, key=self._begun_at.__getitem__)
            passage = self._passages.get(oldest)
            self._begun_at[oldest] = now
        if passage is not None:
            for consumer in passage.members.cursors:
                passage.members.let_go(consumer, "behind")

    def _begin(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"lane-{self._settings.source}-{name}")
        with self._lock:
            self._threads[name] = thread
            if name in self._names:
                self._begun_at[name] = time.monotonic()
        thread.start()

    def _show(self) -> None:
        now = time.monotonic()
        ahead = [name for name, since in self._ahead.items() if now - since >= _AHEAD_S]
        with self._lock:
            standings = self._roster.standings(now)
            members = {name: sorted(p.members.cursors) for name, p in self._passages.items()}
        self._showing.show(self._connected(), standings, members, ahead)

    def _connected(self) -> Connection:
        if self._state is None or self._state.closed:
            name = f"{self._settings.source}:lanes"
            self._state = listen(connect(self._settings.state_dsn, name=name))
        return self._state
