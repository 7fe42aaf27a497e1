"""What flows in from a consumer's databases: stretches of their logs, into the sequencer.

What must always hold: everything that was read is in the sequencer or among the dead letters; the
time of a database passes only while all that its log has was read, or by its own commits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from cdc.change import CHANGE_SCHEMA
from cdc.cursor import Cursor
from cdc.errors import CorruptionError, WalbrookError
from cdc.eventtime.clock import SourceClock
from cdc.eventtime.sequencer import Sequencer, Standing
from cdc.log.view import LogReader
from cdc.state.dead_letters import DeadLetter, Kind
from spark_pipeline.delivery.dead_letters import poisoned
from spark_pipeline.delivery.outcome import Poison
from spark_pipeline.eventtime.commit_times import CommitTimes
from spark_pipeline.eventtime.intake import Intake, Stretch
from spark_pipeline.eventtime.partitions import Partitions
from spark_pipeline.eventtime.timing import RowTiming, Timing
from spark_pipeline.workers.settings import StageSettings

_NO_ROWS: Final = (
    pa.RecordBatch.from_pylist([], CHANGE_SCHEMA),
    np.empty(0, np.int64),
    np.empty(0, np.int32),
)
_WAIT_S: Final = 0.2
_LOOK_S: Final = 0.02  # at each log, where there are several


class Inflow:
    """The logs of one consumer's databases, each from a cursor on."""

    def __init__(
        self,
        settings: Mapping[str, StageSettings],
        standings: Mapping[str, Standing],
        clocks: Mapping[str, SourceClock],
        partitions: Partitions,
        *,
        timings: Mapping[str, RowTiming] | None = None,
        run: str,
        spark: SparkSession | None = None,
    ) -> None:
        self._standings = standings
        self._clocks = clocks
        self._partitions = partitions
        self._timings: Mapping[str, RowTiming] = timings or {
            name: Timing(partial(partitions.time_of, name)) for name in settings
        }
        self._commits = {name: CommitTimes() for name in settings}
        self.dead: dict[str, list[DeadLetter]] = {name: [] for name in settings}
        self.held: WalbrookError | None = None
        """Why nothing more can be read, if that is so."""
        self._intakes: dict[str, Intake] = {}
        try:
            for name, each in settings.items():
                self._intakes[name] = Intake(each, standings[name].cursor, run=run, spark=spark)
        except BaseException:
            self.close()
            raise

    @property
    def reads(self) -> dict[str, Cursor]:
        """Up to where each log was read."""
        return {name: intake.read for name, intake in self._intakes.items()}

    @property
    def at_end(self) -> bool:
        """Whether all that the logs hold was read."""
        return all(intake.at_end for intake in self._intakes.values())

    @property
    def behind(self) -> list[str]:
        """The databases of whose logs there is more to read."""
        return [name for name, intake in self._intakes.items() if not intake.at_end]

    def read(self, sequencer: Sequencer, until: Mapping[str, Cursor] | None = None) -> bool:
        """A stretch of each log for which there is room, or up to ``until``; says whether any."""
        some = False
        for name, intake in self._intakes.items():
            stretch, start = None, intake.read
            if self.held is None and (until is not None or sequencer.wants(name)):
                stretch = intake.take(None if until is None else until[name])
            if stretch is not None:
                some = True
                self._push(sequencer, name, start, stretch)
            now_us = time.monotonic_ns() // 1000
            if intake.at_end and until is None:
                self._clocks[name].at_end(now_us)
            else:
                self._clocks[name].waiting(now_us)
        return some

    def wait(self, sequencer: Sequencer) -> None:
        """Until a log for which there is room has more, or for a moment."""
        deadline = time.monotonic() + _WAIT_S
        wanted = [each for name, each in self._intakes.items() if sequencer.wants(name)]
        if not wanted or self.held is not None:  # all are full, or nothing can be read
            time.sleep(_WAIT_S)
            return
        share_s = _WAIT_S if len(wanted) == 1 else _LOOK_S
        while time.monotonic() < deadline:
            if any(intake.wait(share_s) for intake in wanted):
                return

    def check(self, needed: Mapping[str, Cursor]) -> None:
        """Raise if nothing more can be read, or a log ends before what was once read of it."""
        if self.held is not None:
            raise self.held
        for name, intake in self._intakes.items():
            if intake.at_end and intake.read < needed[name]:
                raise CorruptionError(
                    f"the change log of {name} ends at {intake.read}, before {needed[name]}, up to "
                    "where it was read",
                    fix="it is tried again: its reader may fetch the rest from its slot",
                )

    def settled_commit(self, source: str, oldest: Cursor | None) -> datetime | None:
        """Up to when all is settled, if the oldest that is held back stands there."""
        if oldest is None and self._intakes[source].at_end:
            return datetime.now(UTC)
        return self._commits[source].settled(oldest)

    def open_log(self, source: str) -> LogReader:
        return self._intakes[source].open_log()

    def close(self) -> None:
        for intake in self._intakes.values():
            intake.close()

    def _push(self, sequencer: Sequencer, source: str, start: Cursor, stretch: Stretch) -> None:
        if stretch.commit_us:
            self._clocks[source].read(stretch.commit_us)
        self._commits[source].read(start, stretch.commit_us)
        self.dead[source] += self._unsettled(source, stretch.dead)
        self.held = stretch.held
        bad: list[Poison] = []
        code_of = partial(self._partitions.code, source)
        for rows in stretch.rows:
            timed = self._timings[source].of(rows, code_of)
            bad += timed.bad
            if timed.rows.num_rows:
                behind = _behind(timed.rows)
                sequencer.push(source, timed.rows, timed.times, timed.codes, behind)
        sequencer.push(source, *_NO_ROWS, stretch.read)
        self.dead[source] += self._unsettled(source, self._letters(source, bad, "event_time"))

    def add_dead(self, poisons: Mapping[int, list[Poison]], kind: Kind) -> None:
        """Changes that the consumer goes on without, by the place of their database."""
        names = list(self._intakes)
        for at, some in poisons.items():
            self.dead[names[at]] += self._letters(names[at], some, kind)

    def _letters(self, source: str, poisons: list[Poison], kind: Kind) -> list[DeadLetter]:
        if not poisons:
            return []
        with closing(self.open_log(source)) as log:
            return list(poisoned(sorted(poisons, key=_place), log, kind))

    def _unsettled(self, source: str, letters: Iterable[DeadLetter]) -> list[DeadLetter]:
        """Those of what was once read are settled; somebody may have dealt with them since."""
        read = self._standings[source].read
        return [letter for letter in letters if letter.cursor >= read]


def _place(poison: Poison) -> Cursor:
    return poison.cursor


def _behind(rows: pa.RecordBatch) -> Cursor:
    """Directly behind the last of these rows."""
    lsn, idx = (rows.column(name)[-1].as_py() for name in ("commit_lsn", "commit_idx"))
    return Cursor(lsn, idx + 1)
