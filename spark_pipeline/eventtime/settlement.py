"""Settling for consumers in event-time order: one transaction for all their sources.

Invariants: the cursor of each source, what was released, what waits and what is dead
become true together; a cursor that was moved by another is never moved back by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn
from cdc.eventtime.arrival import Bound
from cdc.eventtime.sequencer import Sequencer
from cdc.log.view import LogReader
from cdc.state.dead_letters import DeadLetter, bury, count_dead, report_dead_letters
from cdc.state.event_numbers import Numbering, is_number
from cdc.state.event_partitions import Seen
from cdc.state.event_time import SourceResumeState, fence, look, note_numbering, note_released
from cdc.state.gaps import Gap, gap_reported
from cdc.state.ledgers import TRIM
from cdc.state.positions import MovedError, Settlement, settle
from cdc.state.queued_messages import enqueue
from cdc.trace.record_log import RecordLog
from cdc.trace.records import DeliveryRecord, DeliveryTiming, refusals_of
from spark_pipeline.delivery.dead_letters import poisoned
from spark_pipeline.delivery.outcome import Poison, is_below, together
from spark_pipeline.eventtime.reading import Reading
from spark_pipeline.eventtime.release import late_letters
from spark_pipeline.eventtime.sending import Attempt, Sending


@dataclass
class SourceSettlement:
    """What is to be settled of one source."""

    cursor: Cursor
    read: Cursor
    delivered: int = 0
    absorbed: int = 0
    last_commit: datetime | None = None
    dead: Sequence[DeadLetter] = ()
    queued: pa.RecordBatch | None = None

    @property
    def copies(self) -> bool:
        """Whether something of it is written by COPY."""
        return bool(self.dead) or self.queued is not None


@dataclass(frozen=True)
class SettledPosition:
    """Where a consumer stands once it is settled."""

    numbering: Numbering
    watermark: int | None
    shares: dict[str, SourceSettlement]
    seen: Mapping[str, Mapping[str, Seen]]  # of each table, by source
    arrived: Mapping[str, Sequence[Bound]] = field(default_factory=dict)


@dataclass(frozen=True)
class Unsettled:
    """What is to be written."""

    reached: SettledPosition
    sent: Sequence[Attempt]
    position: object


Plan = Callable[[Mapping[str, SourceResumeState]], None]
"""What stores the next release, by where its sources stand then."""


def shares_of(
    reading: Reading, sequencer: Sequencer, sending: Sending | None, *, buries_late: bool
) -> dict[str, SourceSettlement]:
    """What is settled with a release; without one, only how far was read."""
    step = sending.step if sending is not None else None
    sent = sending.sent if sending is not None else []
    absorbed = sum(each.absorbed for each in sent)
    shares: dict[str, SourceSettlement] = {}
    for at, (name, read) in enumerate(reading.reads.items()):
        parts = [each.parts[at] for each in sent]
        queued = [part.queued for part in parts]
        if step is not None and step.late is not None and buries_late:
            queued.append(late_letters(step.late, at, step.before))
        taken = sum(part.delivered for part in parts)
        # Which of them the destination had already is known of all together.
        known = min(taken, absorbed)
        absorbed -= known
        shares[name] = SourceSettlement(
            cursor=sequencer.cursor(name) if step is None else step.cursors[name],
            read=read if step is None else step.reads[name],
            delivered=taken - known,
            absorbed=known,
            last_commit=reading.settled_commit(name, sequencer.buffer.oldest(name)),
            dead=reading.dead[name],
            queued=together(queued),
        )
    return shares


class EventSettler:
    """Settles for one consumer, under the terms of its sources and as the runs of their feeds."""

    def __init__(
        self,
        consumer: str,
        terms: Mapping[str, int],
        runs: Mapping[str, int],
        records: Mapping[str, RecordLog],
    ) -> None:
        self._consumer = consumer
        self._records = records
        self._terms = terms
        self._runs = runs

    def settle(
        self,
        state: Connection,
        resume: Mapping[str, SourceResumeState],
        reached: SettledPosition,
        *,
        ledger: str | None,
        then: Callable[[], None] | None = None,
    ) -> str:
        """One transaction; ``ledger`` is the name of the consumer's, if it lies in Postgres.

        ``then`` is part of it, unless a cursor was moved: what comes next is planned by where the
        cursors stand.

        A cursor that was moved meanwhile stays where it is, or goes on from there. What
        was released of the others is settled all the same: it was delivered. Returns the source of
        which that is so, empty if there is none: the worker begins again then.
        """
        moved = ""
        recorded = self._record(resume, reached)
        with ExitStack() as held:
            if not any(share.copies for share in reached.shares.values()):
                held.enter_context(state.pipeline())  # sent together, answered together
            held.enter_context(state.transaction())
            fence(state, self._terms, to_move=True)
            stands = look(state, self._consumer, reached.shares, to_move=True)
            for source in sorted(reached.shares):
                share, at = reached.shares[source], stands.get(source)
                if at is None:
                    raise MovedError(self._consumer, resume[source].cursor)
                known = resume[source]
                if (at.cursor, at.ledger) != (known.cursor, known.ledger):
                    moved = source
                if at.ledger != known.ledger:
                    continue  # it was moved back: all of this comes again
                settle(
                    state,
                    source=source,
                    term=self._terms[source],
                    run=self._runs[source],
                    read_to=share.read,
                    consumers={self._consumer: _settlement(at.cursor, share)},
                )
            with state.pipeline():
                note_released(
                    state,
                    self._consumer,
                    numbering=reached.numbering,
                    watermark=reached.watermark,
                    sources=resume,
                    reads={source: share.read for source, share in reached.shares.items()},
                    seen=reached.seen,
                    arrived=reached.arrived,
                )
                if ledger is not None:
                    lsn, idx = reached.numbering.place(0)
                    state.execute(TRIM, {"ledger": ledger, "lsn": format_lsn(lsn), "idx": idx})
            if then is not None and not moved:
                then()
        for source, (settlement, delivery) in recorded.items():
            if source != moved:
                self._records[source].settled(settlement, [delivery])
        return moved

    def _record(
        self, standing: Mapping[str, SourceResumeState], reached: SettledPosition
    ) -> dict[str, tuple[int, DeliveryRecord]]:
        """Record what is about to be settled, by source, with the number of the settlement."""
        now_us = time.time_ns() // 1000
        found = {}
        for source, share in reached.shares.items():
            delivery = recorded_as(self._consumer, standing[source].cursor, share, now_us)
            found[source] = self._records[source].begin([delivery]), delivery
        return found

    def settle_gaps(
        self,
        state: Connection,
        numbering: Numbering,
        gaps: Sequence[tuple[str, Gap]],
        queued: Sequence[pa.RecordBatch | None],
    ) -> None:
        """Its sink has heard of gaps, or the messages wait; its cursors stay where they are."""
        with state.transaction():
            fence(state, self._terms)
            self._enqueue(state, queued)
            for source, gap in gaps:
                gap_reported(state, gap, self._terms[source])
            note_numbering(state, self._consumer, numbering)

    def bury(
        self,
        state: Connection,
        source: str,
        poisons: Sequence[Poison],
        open_log: Callable[[str], LogReader],
    ) -> None:
        """What cannot be delivered is dead before anything behind it is sent.

        A destination that goes by the last message it has would take it for delivered.
        """
        if not poisons:
            return
        with closing(open_log(source)) as log:
            letters = list(poisoned(poisons, log))
        with state.transaction():
            fence(state, {source: self._terms[source]})
            count_dead(state, source, self._consumer, bury(state, source, self._consumer, letters))
        report_dead_letters(state, source, self._terms[source])

    def queue_now(self, state: Connection, queued: Sequence[pa.RecordBatch | None]) -> None:
        """What was refused of a release that is not over yet waits in the queues, by source."""
        with state.transaction():
            fence(state, self._terms)
            self._enqueue(state, queued)

    def _enqueue(self, state: Connection, queued: Sequence[pa.RecordBatch | None]) -> None:
        for source, rows in zip(self._terms, queued, strict=True):
            if rows is not None:
                enqueue(state, source, self._consumer, rows)


def recorded_as(
    consumer: str, since: Cursor, share: SourceSettlement, now_us: int
) -> DeliveryRecord:
    """What was released of one source, as it is recorded."""
    refusals, unnamed = refusals_of(share.queued)
    end = max(since, share.cursor)
    return DeliveryRecord(
        consumer,
        since,
        end,
        max(end, share.read),
        DeliveryTiming(ended_us=now_us),
        delivered=share.delivered,
        absorbed=share.absorbed,
        queued=0 if share.queued is None else share.queued.num_rows,
        dead=len(share.dead),
        refusals=refusals,
        unnamed=unnamed,
        ordered_by_time=True,
    )


def _settlement(since: Cursor, share: SourceSettlement) -> Settlement:
    """From where the cursor is now; changes that it was moved over do not wait any more.

    Windows and watermarks have sequence numbers in place of cursors: no cursor passes them.
    """
    queued = share.queued
    if queued is not None:
        numbered = is_number(queued.column("commit_lsn").to_numpy())
        queued = queued.filter(pa.array(numbered | ~is_below(queued, since)))
    return Settlement(
        since=since,
        cursor=max(since, share.cursor),
        delivered=share.delivered,
        absorbed=share.absorbed,
        last_commit=share.last_commit,
        dead=share.dead,
        queued=queued,
    )
