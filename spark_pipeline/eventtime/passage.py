"""One consumer's way through event time: read, hold back, release, deliver, settle.

``turn`` does what there is to do now, and says whether there was anything. What must always hold:
nothing is read while a release is under way; a release is stored before it is sent, and settled in
one transaction with the cursors of all its databases; a cursor never passes what is held back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import structlog
from pyspark.sql import SparkSession

from cdc.config import Sink as SinkConfig
from cdc.config.event_time import EventTime
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.eventtime.arrival import Bound
from cdc.eventtime.sequencer import Sequencer, Standing, Step
from cdc.eventtime.times import NO_TIME, as_it_is
from cdc.failpoints import reached
from cdc.log.open import open_log
from cdc.log.segment import high_of
from cdc.state.dead_letters import report_dead_letters
from cdc.state.event_controls import Controls, read_controls
from cdc.state.event_marks import Marks
from cdc.state.event_partitions import read_partitions
from cdc.state.event_time import plan_gaps, plan_release, take_up
from cdc.state.gaps import untold_gaps
from cdc.state.positions import MovedError
from spark_pipeline.delivery.gaps import gap_change
from spark_pipeline.delivery.matching import Match
from spark_pipeline.delivery.outcome import Poison
from spark_pipeline.delivery.value_formats import form_of
from spark_pipeline.eventtime.courier import Courier, UnderWay
from spark_pipeline.eventtime.inflow import Inflow
from spark_pipeline.eventtime.partitions import Partitions, Roots
from spark_pipeline.eventtime.progress import progress_of
from spark_pipeline.eventtime.release import Told, release_of, watermark_row
from spark_pipeline.eventtime.settling import EventSettler, Reached, Share, shares_of
from spark_pipeline.eventtime.windows.due import Windows
from spark_pipeline.workers.retries import RetryQueue
from spark_pipeline.workers.settings import StageSettings

_logger = structlog.get_logger("walbrook.event_time")

_SETTLE_S: Final = 1.0
"""How often cursors move over what was read and is not the consumer's."""

_SHOW_S: Final = 1.0
_QUIET_S: Final = 1.0
_DEAD_MAX: Final = 5_000


class EventPassage:
    """From the rows in Postgres on, until it is closed; ``settings`` and ``roots`` by database."""

    def __init__(
        self,
        consumer: SinkConfig,
        settings: Mapping[str, StageSettings],
        state: Connection,
        *,
        roots: Mapping[str, Roots],
        queues: Mapping[str, RetryQueue],
        run: str,
        over: threading.Event,
        spark: SparkSession | None = None,
        windows: Windows | None = None,
    ) -> None:
        assert consumer.event_time is not None
        self._consumer = consumer
        self._config: EventTime = consumer.event_time
        self._settings = dict(settings)
        self._state = state
        self._windows = windows
        self._terms = {name: each.term for name, each in settings.items()}
        self._marks = Marks.of(consumer)
        self._gaps = [
            (name, gap)
            for name in settings
            for gap in untold_gaps(state, name)
            if gap.consumer == consumer.name
        ]
        standing = take_up(
            state,
            consumer.name,
            self._terms,
            self._marks,
            gaps=[gap for _, gap in self._gaps],
            log_end=lambda: _log_end(settings.values()),
        )
        self._standing = standing.sources
        self._numbering = standing.numbering
        self._redo = standing.planned
        due = as_it_is if windows is None else windows.due
        self._progress = progress_of(consumer, self._standing, self._redo, due)
        self._clocks = self._progress.clocks
        tracker = self._progress.tracker
        self._partitions = Partitions(self._config, tracker, Match.of(consumer))
        before = self._redo.before if self._redo is not None else standing.watermark
        standings = {
            name: Standing(each.cursor, each.read, _time(each.floor), each.cut)
            for name, each in self._standing.items()
        }
        self._sequencer = Sequencer(
            standings,
            tracker,
            max_bytes=self._config.max_buffer_bytes,
            watermark=_time(before),
            followers=windows is None,
            due=due,
        )
        for name, each in self._standing.items():
            self._partitions.begin(name, roots[name], read_partitions(state, each.id))
        generation = next(iter(self._standing.values())).generation
        self._courier = Courier(
            consumer, self._settings, queues, generation=generation, run=run, over=over
        )
        self._settler = EventSettler(consumer.name, self._terms)
        self._under_way: UnderWay | None = None
        self._settled_at = self._shown_at = time.monotonic()
        self._saved: object = None
        self._quiet_until = 0.0  # monotonic
        timings = self._progress.timings(lambda: self._sequencer.watermark)
        self._inflow = Inflow(
            self._settings, standings, self._clocks, self._partitions,
            timings=timings, run=run, spark=spark,
        )  # fmt: skip
        for name, each in self._standing.items():
            if each.finished:
                self._sequencer.complete(name)
        self.follow(read_controls(state, consumer.name, settings))

    @property
    def cursors(self) -> dict[str, Cursor]:
        """Where it stands in each database, as it last wrote it."""
        return {name: each.cursor for name, each in self._standing.items()}

    @property
    def ledgers(self) -> dict[str, str]:
        return {name: each.ledger for name, each in self._standing.items()}

    @property
    def at_end(self) -> bool:
        """Whether all that its logs hold was read, and nothing is on its way."""
        under_way = self._under_way is not None or self._redo is not None
        return self._inflow.at_end and not under_way and not self._gaps

    @property
    def stuck(self) -> bool:
        """Whether nothing it may read can make room in its buffer."""
        return self._under_way is None and self._sequencer.stuck(self._inflow.behind)

    @property
    def tells(self) -> bool:
        """Whether there are gaps that its sink is still to be told of."""
        return bool(self._gaps)

    def wait(self) -> None:
        """Until there may be something to do, or for a moment."""
        self._inflow.wait(self._sequencer)

    def close(self) -> None:
        self._inflow.close()

    def finished(self, source: str, is_finished: bool) -> None:
        """Whether a database has ended: then nobody waits for its time."""
        if is_finished:
            self._quiet_until = 0.0
            self._sequencer.complete(source)
        else:
            self._sequencer.resume(source)

    def follow(self, controls: Controls) -> None:
        """Do what operators say of its watermarks."""
        if self._partitions.follow(controls):
            self._quiet_until = 0.0

    def renew(self, source: str, roots: Roots) -> None:
        """The tables of a database as they are now."""
        self._partitions.renew(source, roots)

    def turn(self, *, flush: bool = False) -> bool:
        """Go on; says whether anything was done. Raises if its destination did not take it.

        With ``flush`` everything that is held back is released.
        """
        if self._under_way is not None:
            self._deliver(self._under_way)
            return True
        if self._redo is None and self._gaps:
            told = [
                Told(gap_change(gap), list(self._settings).index(name), placed=True)
                for name, gap in self._gaps
            ]
            release = release_of(None, None, told, self._numbering, form_of(self._consumer))
            gaps = [gap for _, gap in self._gaps]
            plan_gaps(self._state, self._consumer.name, self._terms, gaps)
            self._send(UnderWay(release, None))
            return True
        until = self._until()
        some = self._inflow.read(self._sequencer, until)
        if self._redo is None or until is None:
            waits = not some and not flush and time.monotonic() < self._quiet_until
            step = None if waits else self._sequencer.step(flush=flush)
        elif all(self._inflow.reads[name] >= end for name, end in until.items()):
            step = self._sequencer.step(to=self._redo.to)
        else:
            step = None
        if step is not None:
            some |= self._release(step)
        elif not some:
            self._inflow.check(until or {n: each.read for n, each in self._standing.items()})
        self._settle_at_times()
        return some

    def show(self, *, at_once: bool = False) -> None:
        """Let SQL say what its partitions are at, once a second."""
        if not at_once and time.monotonic() - self._shown_at < _SHOW_S:
            return
        self._shown_at = time.monotonic()
        for name, each in self._standing.items():
            now_us = self._clocks[name].now
            self._partitions.show(self._state, each.id, name, self._sequencer, now_us)

    def _until(self) -> dict[str, Cursor] | None:
        """Up to where a release under way had read each log; None if there is none."""
        if self._redo is None:
            return None
        return {n: self._redo.reads.get(n, each.read) for n, each in self._standing.items()}

    def _release(self, step: Step) -> bool:
        """Send what a step gives, or settle it where there is nothing to send; says if any did."""
        late = step.late
        if late is None and step.released is None:
            # The watermark goes on with the clock: nobody needs to hear of each microsecond.
            self._quiet_until = time.monotonic() + _QUIET_S
        delivered = late if self._config.late_policy == "deliver" else None
        released, told = step.released, list[Told]()
        if self._windows is not None:
            now = datetime.now(UTC)
            closed = self._windows.results(released, self._sequencer.buffer, step, now)
            self._inflow.add_dead(closed.bad, "expression")
            released, told = None, closed.told
        if self._config.emit_watermarks and step.watermark > step.before:
            told.append(Told(watermark_row(step.watermark, datetime.now(UTC))))
        release = release_of(delivered, released, told, self._numbering, form_of(self._consumer))
        if not len(release):
            some = late is not None or step.released is not None or self._redo is not None
            if some:
                self._settle(UnderWay(release, step))
            return some
        if self._redo is None:
            plan_release(
                self._state,
                self._consumer.name,
                terms=self._terms,
                sources=self._standing,
                marks=self._marks,
                before=_none(step.before),
                to=step.watermark,
                reads=step.reads,
                arrived=self._progress.arrived(self.cursors, step.reads),
            )
            reached("planned")
        self._send(UnderWay(release, step))
        return True

    def _send(self, under_way: UnderWay) -> None:
        self._under_way = under_way
        self._deliver(under_way)

    def _deliver(self, under_way: UnderWay) -> None:
        """A piece of it, from where it is; settled once all of it is there."""
        release = under_way.release
        self._courier.deliver(self._state, under_way, self._ledger, self._bury)
        if under_way.at < len(release):
            if under_way.has_much_aside:
                self._settler.put_aside(self._state, under_way.aside_by_source)
                self._courier.settled(under_way.sent)
                under_way.forget_aside()
            return
        reached("released")
        if under_way.step is not None:
            self._settle(under_way)
            return
        self._settler.tell(self._state, release.after, self._gaps, under_way.aside_by_source)
        self._courier.settled(under_way.sent)
        self._numbering, self._gaps, self._under_way = release.after, [], None

    def _bury(self, source: str, dead: list[Poison]) -> None:
        self._settler.bury(self._state, source, dead, self._inflow.open_log)

    @property
    def _ledger(self) -> str:
        """The name of its ledger: that of the first database."""
        return next(iter(self._standing.values())).ledger

    def _settle_at_times(self) -> None:
        """Move cursors over what was read and is not the consumer's."""
        if not self._may_settle:
            return
        many = sum(map(len, self._inflow.dead.values())) >= _DEAD_MAX
        if many or time.monotonic() - self._settled_at >= _SETTLE_S:
            self._settle(None)

    def settle(self) -> None:
        """Write how far it has come, unless something is on its way."""
        if self._may_settle:
            self._settle(None)

    @property
    def _may_settle(self) -> bool:
        """Not while something is on its way, nor before all that was once read is there again."""
        reads = self._inflow.reads
        there = all(reads[name] >= each.read for name, each in self._standing.items())
        return there and self._under_way is None and self._redo is None

    def _settle(self, under_way: UnderWay | None) -> None:
        """What was released, or, with nothing under way, only how far it has read."""
        step = under_way.step if under_way is not None else None
        self._settled_at = time.monotonic()
        shares = shares_of(self._inflow, self._sequencer, under_way, buries_late=self._buries_late)
        if under_way is None and not self._has_moved(shares):
            return
        numbering = self._numbering if under_way is None else under_way.release.after
        watermark = self._sequencer.watermark if step is None else step.watermark
        if step is not None and step.late is not None:
            self._partitions.count_late(step.late)
        moved = self._settler.settle(
            self._state,
            self._standing,
            Reached(
                numbering, _none(watermark), shares, self._partitions.seen(), self._arrived(shares)
            ),
            ledger=self._courier.ledger_name(self._ledger),
        )
        for name, share in shares.items():
            self._standing[name] = replace(self._standing[name], cursor=share.cursor)
        self._progress.settled(self.cursors)
        self._numbering, self._saved = numbering, self._position(shares)
        self._settled(under_way, shares)
        if moved:
            raise MovedError(self._consumer.name, shares[moved].cursor)

    def _arrived(self, shares: dict[str, Share]) -> dict[str, list[Bound]]:
        cursors = {name: share.cursor for name, share in shares.items()}
        return self._progress.arrived(cursors, {name: s.read for name, s in shares.items()})

    def _settled(self, under_way: UnderWay | None, shares: dict[str, Share]) -> None:
        if under_way is not None:
            self._under_way = self._redo = None
            self._courier.settled(under_way.sent)
        if any(share.dead or share.aside is not None for share in shares.values()):
            for name, term in self._terms.items():
                self._inflow.dead[name] = []
                report_dead_letters(self._state, name, term)

    def _has_moved(self, shares: dict[str, Share]) -> bool:
        """Whether there is anything to write."""
        dead = any(share.dead for share in shares.values())
        return dead or self._position(shares) != self._saved

    def _position(self, shares: dict[str, Share]) -> object:
        places = {name: (share.cursor, share.read) for name, share in shares.items()}
        return places, self._sequencer.watermark

    @property
    def _buries_late(self) -> bool:
        return self._config.late_policy == "dead_letter"


def _log_end(settings: Iterable[StageSettings]) -> int:
    """The LSN of the last change in any of these logs."""
    highest = 0
    for each in settings:
        with closing(open_log(each.log_directory)) as view:
            end = view.next_batch()
            if end > view.first_batch():
                highest = max(highest, high_of(view.entries(end - 1, end)[0]).lsn)
    return highest


def _time(us: int | None) -> int:
    return NO_TIME if us is None else us


def _none(us: int) -> int | None:
    return None if us == NO_TIME else us
