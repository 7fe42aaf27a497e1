"""A consumer's rows of its inputs, with their times, on their way into the sequencer.

Invariants: everything that was read is in the sequencer or among the dead letters. The time of a
source passes only while all that its log has was read, or by its own commits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA
from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.errors import CorruptionError, WalbrookError
from cdc.eventtime.clock import SourceClock
from cdc.eventtime.sequencer import SavedPosition, Sequencer
from cdc.log.open import open_log
from cdc.log.view import LogReader
from cdc.state.dead_letters import DeadLetter, Kind
from spark_pipeline.delivery.dead_letters import dead_letters, poisoned
from spark_pipeline.delivery.deliver import Share, in_order
from spark_pipeline.delivery.outcome import Poison
from spark_pipeline.eventtime.commit_times import CommitTimes
from spark_pipeline.eventtime.partitions import Partitions
from spark_pipeline.eventtime.timing import RowTiming
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.workers.inputs import Input

_NO_ROWS: Final = (
    pa.RecordBatch.from_pylist([], CHANGE_SCHEMA),
    np.empty(0, np.int64),
    np.empty(0, np.int32),
)


class Reading:
    """Reads each source from the cursor that it stands at; ``inputs`` and all else by source."""

    def __init__(
        self,
        consumer: SinkConfig,
        inputs: Mapping[str, Input],
        saved: Mapping[str, SavedPosition],
        clocks: Mapping[str, SourceClock],
        partitions: Partitions,
        timings: Mapping[str, RowTiming],
    ) -> None:
        self._consumer = consumer
        self._inputs = inputs
        self._saved = saved
        self._clocks = clocks
        self._partitions = partitions
        self._timings = timings
        self._commits = {name: CommitTimes() for name in inputs}
        self._histories = {name: each.log.history() for name, each in inputs.items()}
        self.dead: dict[str, list[DeadLetter]] = {name: [] for name in inputs}
        self.stop_reason: WalbrookError | None = None
        """Why nothing more can be read, if that is so."""
        self.reads = {name: saved[name].cursor for name in inputs}
        """Up to where each source was read."""
        self._ends = dict.fromkeys(inputs, 0)  # the batch behind what was read, passed or not
        for name, each in inputs.items():
            each.begin(self.reads[name])

    @property
    def behind(self) -> list[str]:
        """The sources of whose logs there is more to read."""
        return [name for name in self._inputs if not self._is_at_end(name)]

    def read(
        self,
        held: ExitStack,
        sequencer: Sequencer,
        until: Mapping[str, Cursor] | None = None,
    ) -> bool:
        """The next range of each source that may be read; returns whether there was any.

        A source is read up to ``until``, or while the sequencer has room for it. One that is not
        read leaves its feed, where others would wait for it. A range of the feed is passed when
        ``held`` ends: while its rows are delivered the feed gathers what comes next.
        """
        some = False
        for name, source in self._inputs.items():
            bound = None if until is None else until[name]
            wanted = sequencer.wants(name) if bound is None else self.reads[name] < bound
            if self.stop_reason is not None or not wanted:
                source.leave()
            else:
                ranges = source.next(0.0) if bound is None else source.next_below(bound)
                with ExitStack() as taken:
                    decoded = taken.enter_context(ranges)
                    if decoded is not None:
                        some = True
                        self._push(sequencer, source, decoded, bound)
                    if source.is_live:
                        held.enter_context(taken.pop_all())
            now_us = time.monotonic_ns() // 1000
            if until is None and self._is_at_end(name):
                self._clocks[name].at_end(now_us)
            else:
                self._clocks[name].waiting(now_us)
        return some

    def check(self, needed: Mapping[str, Cursor]) -> None:
        """Raise if nothing more can be read, or a log ends before what was once read of it."""
        if self.stop_reason is not None:
            raise self.stop_reason
        for name in self._inputs:
            if self._is_at_end(name) and self.reads[name] < needed[name]:
                raise CorruptionError(
                    f"the change log of {name} ends at {self.reads[name]}, before {needed[name]}, "
                    "up to where it was read",
                    fix="it is tried again: its reader may fetch the rest from its slot",
                )

    def settled_commit(self, source: str, oldest: Cursor | None) -> datetime | None:
        """Up to when all is settled, if the oldest that is held back stands there."""
        if oldest is None and self._is_at_end(source):
            return datetime.now(UTC)
        return self._commits[source].settled(oldest)

    def open_log(self, source: str) -> LogReader:
        directory = self._inputs[source].settings.log_directory
        return open_log(directory, history=self._histories[source])

    def add_dead(self, poisons: Mapping[int, list[Poison]], kind: Kind) -> None:
        """Changes that the consumer goes on without, by the number of their source."""
        names = list(self._inputs)
        for at, some in poisons.items():
            self.dead[names[at]] += self._letters(names[at], some, kind)

    def forget_dead(self) -> None:
        """They are about to be settled."""
        self.dead = {name: [] for name in self._inputs}

    def _is_at_end(self, source: str) -> bool:
        """Whether everything that a log has was read."""
        batch = max(self._inputs[source].batch, self._ends[source])
        return batch >= self._inputs[source].log.next_batch()

    def _push(
        self, sequencer: Sequencer, source: Input, decoded: DecodedRange, until: Cursor | None
    ) -> None:
        start = self.reads[source.source]
        end = decoded.high if until is None else min(decoded.high, until)
        if end == decoded.high:
            self._ends[source.source] = decoded.end
        if end <= start:
            return  # nothing but the time has passed
        share = source.planner.judge(
            Share(
                self._consumer, source.settings.origin, source.context.run, start, end,
                [piece for piece in decoded.slices if piece.rows], source.settings.wanted,
            )
        )  # fmt: skip
        try:
            self._push_share(sequencer, source.source, decoded, share)
        finally:
            if share.verdicts is not None:
                Path(share.verdicts).unlink(missing_ok=True)

    def _push_share(
        self, sequencer: Sequencer, source: str, decoded: DecodedRange, share: Share
    ) -> None:
        commit_us = max((piece.commit_us for piece in share.slices), default=0)
        if commit_us:
            self._clocks[source].read(commit_us)
        self._commits[source].read(share.start, commit_us)
        self.stop_reason = share.stop_reason
        if share.failed or any(piece.errors for piece in share.slices):
            with closing(self.open_log(source)) as log:
                found = dead_letters(share, share.end, log, decoded.plan.changes)
                self.dead[source] += self._unsettled(source, found)
        bad: list[Poison] = []
        code_of = partial(self._partitions.code, source)
        for rows in in_order(share, decoded.plan.fetch(share)):
            timed = self._timings[source].of(rows, code_of)
            bad += timed.bad
            if timed.rows.num_rows:
                behind = _behind(timed.rows)
                sequencer.push(source, timed.rows, timed.times, timed.codes, behind)
        sequencer.push(source, *_NO_ROWS, share.end)
        self.reads[source] = share.end
        self.dead[source] += self._unsettled(source, self._letters(source, bad, "event_time"))

    def _letters(self, source: str, poisons: list[Poison], kind: Kind) -> list[DeadLetter]:
        if not poisons:
            return []
        with closing(self.open_log(source)) as log:
            return list(poisoned(sorted(poisons, key=_place), log, kind))

    def _unsettled(self, source: str, letters: Iterable[DeadLetter]) -> list[DeadLetter]:
        """Those of what was once read are settled; an operator may have dealt with them since."""
        read = self._saved[source].read
        return [letter for letter in letters if letter.cursor >= read]


def _place(poison: Poison) -> Cursor:
    return poison.cursor


def _behind(rows: pa.RecordBatch) -> Cursor:
    """Directly behind the last of these rows."""
    lsn, idx = (rows.column(name)[-1].as_py() for name in ("commit_lsn", "commit_idx"))
    return Cursor(lsn, idx + 1)
