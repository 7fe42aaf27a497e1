"""The order of event time, as a step of a worker: read, hold back, release, send, settle.

``turn`` does what there is to do now. Invariants: nothing is read while a release is being sent. A
release is stored before it is sent, and settled in one transaction with the cursors of all its
sources. A cursor never passes what is held back. A release that was sent is settled together with
the plan of the next one, or, if nothing follows at once, alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from cdc.config import SinkConfig
from cdc.config.event_time import EventTime
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.eventtime.arrival import Bound
from cdc.eventtime.sequencer import SavedPosition, Sequencer, WatermarkStep
from cdc.eventtime.times import NO_TIME, as_it_is
from cdc.failpoints import reached
from cdc.log.open import open_log
from cdc.log.segment import high_of
from cdc.state.dead_letters import report_dead_letters
from cdc.state.event_controls import Controls, read_controls
from cdc.state.event_fingerprint import EventFingerprint
from cdc.state.event_partitions import read_partitions
from cdc.state.event_time import SourceResumeState, plan_gaps, plan_release, read_resume_state
from cdc.state.gaps import unreported_gaps
from cdc.state.positions import MovedError
from spark_pipeline.delivery.gaps import gap_change
from spark_pipeline.delivery.matching import Match
from spark_pipeline.delivery.outcome import Poison
from spark_pipeline.delivery.value_formats import form_of, time_columns
from spark_pipeline.eventtime.partitions import Partitions, Roots
from spark_pipeline.eventtime.reading import Reading
from spark_pipeline.eventtime.release import OwnRows, Release, watermark_row
from spark_pipeline.eventtime.sending import ReleaseSender, Sending
from spark_pipeline.eventtime.settlement import (
    EventSettler,
    Plan,
    SettledPosition,
    SourceSettlement,
    Unsettled,
    shares_of,
)
from spark_pipeline.eventtime.timing import RowTiming, Timing, progress_of
from spark_pipeline.eventtime.windows.due import Windows
from spark_pipeline.workers.inputs import Input
from spark_pipeline.workers.state import CurrentState

_SETTLE_S: Final = 1.0
"""How often cursors move over what was read and is not the consumer's."""

_SHOW_S: Final = 1.0
_QUIET_S: Final = 1.0
_DEAD_MAX: Final = 5_000


class Ordering:
    """From the rows in Postgres on; ``inputs``, whose logs are open, and ``roots`` by source.

    It is used by the worker's thread alone, and so is ``state``.
    """

    def __init__(
        self,
        consumer: SinkConfig,
        inputs: Mapping[str, Input],
        state: Connection,
        current: CurrentState,
        *,
        roots: Mapping[str, Roots],
        windows: Windows | None = None,
    ) -> None:
        assert consumer.event_time is not None
        self._consumer = consumer
        self._config: EventTime = consumer.event_time
        self._inputs = inputs
        self._state = state
        self._windows = windows
        self._terms = {name: each.settings.term for name, each in inputs.items()}
        self._marks = EventFingerprint.of(consumer)
        self._gaps = [
            (name, gap)
            for name in inputs
            for gap in unreported_gaps(state, name)
            if gap.consumer == consumer.name
        ]
        resume = read_resume_state(
            state,
            consumer.name,
            self._terms,
            self._marks,
            gaps=[gap for _, gap in self._gaps],
            log_end=lambda: _log_end(inputs.values()),
        )
        self._resume = resume.sources
        self._numbering = resume.numbering
        self._redo = resume.planned
        due = as_it_is if windows is None else windows.due
        self._progress = progress_of(consumer, self._resume, self._redo, due)
        self._clocks = self._progress.clocks
        tracker = self._progress.tracker
        self._partitions = Partitions(self._config, tracker, Match.of(consumer))
        before = self._redo.before if self._redo is not None else resume.watermark
        saved = {
            name: SavedPosition(each.cursor, each.read, _time(each.floor), each.cut)
            for name, each in self._resume.items()
        }
        self._sequencer = Sequencer(
            saved,
            tracker,
            max_bytes=self._config.max_buffer_bytes,
            watermark=_time(before),
            followers=windows is None,
            due=due,
        )
        for name, each in self._resume.items():
            self._partitions.begin(name, roots[name], read_partitions(state, each.id))
        generation = next(iter(self._resume.values())).generation
        self._sender = ReleaseSender(consumer, inputs, current, generation)
        self._runs = {name: each.context.settler.feed_run for name, each in inputs.items()}
        self._settler = EventSettler(
            consumer.name,
            self._terms,
            self._runs,
            {name: each.context.settler.records for name, each in inputs.items()},
        )
        self._sending: Sending | None = None
        self._delivered: Unsettled | None = None  # a release that is all sent
        self._settled_at = self._shown_at = time.monotonic()
        self._saved: object = None
        self._quiet_until = 0.0  # monotonic
        self._reading = Reading(
            consumer, inputs, saved, self._clocks, self._partitions, self._timings()
        )
        for name, each in self._resume.items():
            if each.finished:
                self._sequencer.complete(name)
        self.follow(read_controls(state, consumer.name, inputs))

    def _timings(self) -> Mapping[str, RowTiming]:
        by_arrival = self._progress.timings(lambda: self._sequencer.watermark)
        if by_arrival is not None:
            return by_arrival
        columns = time_columns(self._consumer)
        timings: dict[str, RowTiming] = {}
        for name, each in self._inputs.items():
            texts = {column: each.settings.wanted.time_name(column) for column in columns}
            timings[name] = Timing(partial(self._partitions.time_of, name), texts)
        return timings

    @property
    def cursors(self) -> dict[str, Cursor]:
        """Where it stands in each source, as it last wrote it."""
        return {name: each.cursor for name, each in self._resume.items()}

    @property
    def ledgers(self) -> dict[str, str]:
        return {name: each.ledger for name, each in self._resume.items()}

    @property
    def at_end(self) -> bool:
        """Whether all that its logs hold was read, and nothing is being sent."""
        sending = any((self._sending, self._redo, self._delivered))
        return not self._reading.behind and not sending and not self._gaps

    @property
    def is_stuck(self) -> bool:
        """Whether nothing it may read can make room in its buffer."""
        return self._sending is None and self._sequencer.stuck(self._reading.behind)

    @property
    def has_gaps(self) -> bool:
        """Whether there are gaps that its sink has still to hear of."""
        return bool(self._gaps)

    def finished(self, source: str, is_finished: bool) -> None:
        """Whether a source has ended: then its time is not waited for."""
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
        """The tables of a source as they are now."""
        self._partitions.renew(source, roots)

    def turn(self, *, flush: bool = False) -> bool:
        """Go on; returns whether anything was done. Raises if its destination did not take it.

        With ``flush`` everything that is held back is released.
        """
        if self._sending is not None:
            self._deliver(self._sending)
            return True
        if self._redo is None and self._gaps:
            self.settle_delivered()
            own = [
                OwnRows(gap_change(gap), list(self._inputs).index(name), placed=True)
                for name, gap in self._gaps
            ]
            release = Release(None, None, own, self._numbering, form_of(self._consumer))
            gaps = [gap for _, gap in self._gaps]
            plan_gaps(self._state, self._consumer.name, self._terms, gaps)
            self._send(Sending(release, None))
            return True
        with ExitStack() as held:
            some = self._read_and_release(held, flush=flush)
        self._settle_at_times()
        return some

    def _read_and_release(self, held: ExitStack, *, flush: bool) -> bool:
        until = self._until()
        some = self._reading.read(held, self._sequencer, until)
        if self._redo is None or until is None:
            waits = not some and not flush and time.monotonic() < self._quiet_until
            step = None if waits else self._sequencer.step(flush=flush)
        elif all(self._reading.reads[name] >= end for name, end in until.items()):
            step = self._sequencer.step(to=self._redo.to)
        else:
            step = None
            self._sequencer.keep_left()
        if step is not None and self._release(step):
            return True
        some |= self.settle_delivered()  # nothing follows at once
        if step is None and not some:
            self._reading.check(until or {n: each.read for n, each in self._resume.items()})
        return some

    def show(self, *, at_once: bool = False) -> None:
        """Let SQL say what its partitions are at, once a second."""
        if not at_once and time.monotonic() - self._shown_at < _SHOW_S:
            return
        self._shown_at = time.monotonic()
        for name, each in self._resume.items():
            now_us = self._clocks[name].now
            self._partitions.show(self._state, each.id, name, self._sequencer, now_us)

    def _until(self) -> dict[str, Cursor] | None:
        """Up to where a release that was planned had read each log; None if there is none."""
        if self._redo is None:
            return None
        return {n: self._redo.reads.get(n, each.read) for n, each in self._resume.items()}

    def _release(self, step: WatermarkStep) -> bool:
        """Send what a step gives, or only settle it; returns whether it did either."""
        late = step.late
        if late is None and step.released is None:
            # The watermark goes on with the clock: not every microsecond needs a step.
            self._quiet_until = time.monotonic() + _QUIET_S
        delivered = late if self._config.late_policy == "deliver" else None
        released, own = step.released, list[OwnRows]()
        if self._windows is not None:
            now = datetime.now(UTC)
            closed = self._windows.results(released, self._sequencer.buffer, step, now)
            self._reading.add_dead(closed.bad, "expression")
            released, own = None, closed.own
        if self._config.emit_watermarks and step.watermark > step.before:
            own.append(OwnRows(watermark_row(step.watermark, datetime.now(UTC))))
        release = Release(delivered, released, own, self._numbering, form_of(self._consumer))
        if not len(release):
            some = late is not None or step.released is not None or self._redo is not None
            if some:
                self.settle_delivered()
                self._settle(Sending(release, step))
            return some
        if self._redo is None:
            plan = partial(self._plan, step)
            if not self.settle_delivered(plan):
                plan(self._resume)
            reached("planned")
        self._send(Sending(release, step))
        return True

    def _plan(self, step: WatermarkStep, resume: Mapping[str, SourceResumeState]) -> None:
        """Store what is about to be sent."""
        cursors = {name: each.cursor for name, each in resume.items()}
        plan_release(
            self._state,
            self._consumer.name,
            terms=self._terms,
            runs=self._runs,
            sources=resume,
            marks=self._marks,
            before=_none(step.before),
            to=step.watermark,
            reads=step.reads,
            arrived=self._progress.arrived(cursors, step.reads),
        )

    def _send(self, sending: Sending) -> None:
        self._sending = sending
        self._deliver(sending)

    def _deliver(self, sending: Sending) -> None:
        """A piece of it, from where it is; to be settled once all of it is there."""
        release = sending.release
        self._sender.send(self._state, sending, self._ledger, self._bury)
        if sending.at < len(release):
            if sending.has_much_queued:
                self._settler.queue_now(self._state, sending.queued_by_source)
                self._sender.settled(sending.sent)
                sending.forget_queued()
            return
        reached("released")
        if sending.step is not None:
            self._delivered = self._unsettled(sending)
            self._reading.forget_dead()
            self._sending = self._redo = None
            return
        self._settler.settle_gaps(self._state, release.after, self._gaps, sending.queued_by_source)
        self._sender.settled(sending.sent)
        self._numbering, self._gaps, self._sending = release.after, [], None

    def _bury(self, source: str, dead: list[Poison]) -> None:
        self._settler.bury(self._state, source, dead, self._reading.open_log)

    @property
    def _ledger(self) -> str:
        """The name of its ledger: that of the first source."""
        return next(iter(self._resume.values())).ledger

    def _settle_at_times(self) -> None:
        """Move cursors over what was read and is not the consumer's."""
        if not self._may_settle:
            return
        many = sum(map(len, self._reading.dead.values())) >= _DEAD_MAX
        if many or time.monotonic() - self._settled_at >= _SETTLE_S:
            self._settle(None)

    def settle(self) -> None:
        """Write how far it has come, unless something is being sent."""
        self.settle_delivered()
        if self._may_settle:
            self._settle(None)

    @property
    def _may_settle(self) -> bool:
        """Not while something is being sent, nor before all that was once read is there again."""
        reads = self._reading.reads
        there = all(reads[name] >= each.read for name, each in self._resume.items())
        return there and not any((self._sending, self._redo, self._delivered))

    def settle_delivered(self, plan: Plan | None = None) -> bool:
        """Settle what was sent, and store what is sent next; returns True if there was any."""
        done, self._delivered = self._delivered, None
        if done is not None:
            self._write(done, plan)
        return done is not None

    def _settle(self, sending: Sending | None) -> None:
        """What was released, or, with nothing being sent, only how far it has read."""
        done = self._unsettled(sending)
        self._settled_at = time.monotonic()
        if sending is not None or self._has_moved(done.reached.shares):
            self._reading.forget_dead()
            self._write(done)

    def _unsettled(self, sending: Sending | None) -> Unsettled:
        """What is to be settled, as it is now: nothing that is read later may be in it."""
        step = sending.step if sending is not None else None
        if sending is not None:
            self._numbering = sending.release.after
        watermark = self._sequencer.watermark if step is None else step.watermark
        if step is not None and step.late is not None:
            self._partitions.count_late(step.late)
        shares = shares_of(self._reading, self._sequencer, sending, buries_late=self._buries_late)
        reached = SettledPosition(
            self._numbering,
            _none(watermark),
            shares,
            self._partitions.seen(),
            self._arrived(shares),
        )
        return Unsettled(reached, [] if sending is None else sending.sent, self._position(shares))

    def _write(self, done: Unsettled, plan: Plan | None = None) -> None:
        """Settle in one transaction, in which the next release may be planned."""
        shares = done.reached.shares
        after = {n: replace(each, cursor=shares[n].cursor) for n, each in self._resume.items()}
        moved = self._settler.settle(
            self._state,
            self._resume,
            done.reached,
            ledger=self._sender.ledger_name(self._ledger),
            then=None if plan is None else partial(plan, after),
        )
        self._resume = after
        self._settled(done)
        if moved:
            raise MovedError(self._consumer.name, shares[moved].cursor)

    def _settled(self, done: Unsettled) -> None:
        self._settled_at, self._saved = time.monotonic(), done.position
        self._progress.settled(self.cursors)
        self._sender.settled(done.sent)
        if any(share.copies for share in done.reached.shares.values()):
            for name, term in self._terms.items():
                report_dead_letters(self._state, name, term)

    def _arrived(self, shares: dict[str, SourceSettlement]) -> dict[str, list[Bound]]:
        cursors = {name: share.cursor for name, share in shares.items()}
        return self._progress.arrived(cursors, {name: s.read for name, s in shares.items()})

    def _has_moved(self, shares: dict[str, SourceSettlement]) -> bool:
        """Whether there is anything to write."""
        dead = any(share.dead for share in shares.values())
        return dead or self._position(shares) != self._saved

    def _position(self, shares: dict[str, SourceSettlement]) -> object:
        places = {name: (share.cursor, share.read) for name, share in shares.items()}
        return places, self._sequencer.watermark

    @property
    def _buries_late(self) -> bool:
        return self._config.late_policy == "dead_letter"


def _log_end(inputs: Iterable[Input]) -> int:
    """The LSN of the last change in any of these logs."""
    highest = 0
    for each in inputs:
        with closing(open_log(each.settings.log_directory)) as view:
            end = view.next_batch()
            if end > view.first_batch():
                highest = max(highest, high_of(view.entries(end - 1, end)[0]).lsn)
    return highest


def _time(us: int | None) -> int:
    return NO_TIME if us is None else us


def _none(us: int) -> int | None:
    return None if us == NO_TIME else us
