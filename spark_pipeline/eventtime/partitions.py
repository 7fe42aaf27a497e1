"""The partitions of one consumer: its tables in each source, with their watermarks and counts.

Invariants: a row counts for the partition that its table belongs to, a leaf for the
partitioned table unless it is asked for. Of a table that was never looked up nothing is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt

from cdc.config.event_time import EventTime, TableTime
from cdc.connection import Connection
from cdc.errors import TransientError
from cdc.eventtime.released import Released
from cdc.eventtime.sequencer import Sequencer
from cdc.eventtime.times import NO_TIME
from cdc.eventtime.tracker import WatermarkTracker
from cdc.state.event_controls import Controls
from cdc.state.event_partitions import PartitionRow, Seen, show_partitions
from spark_pipeline.delivery.matching import Match

Roots = Mapping[str, str]
"""Published tables with the partitioned tables that they are leaves of; most are their own."""

Known = Mapping[str, tuple[int | None, int]]
"""What an earlier run knew of partitions: the last event, and how many came late."""


class UnknownTableError(TransientError):
    """Changes came of a table that the database had not when its tables were last looked up."""

    def __init__(self, source: str, table: str) -> None:
        super().__init__(f"{source} has a table {table} that is new")
        self.source, self.table = source, table


class Partitions:
    """Numbers for partitions, as the tracker gives them."""

    def __init__(self, config: EventTime, tracker: WatermarkTracker, match: Match) -> None:
        self._config = config
        self._tracker = tracker
        self._match = match
        self._roots: dict[str, dict[str, str]] = {}
        self._late: dict[int, int] = {}
        self._idle_since: dict[int, datetime] = {}
        self._shown: dict[str, list[PartitionRow]] = {}
        self._controls = Controls({}, {})

    def begin(self, source: str, roots: Roots, known: Known) -> None:
        """The tables of a database when the consumer is taken up."""
        self._roots[source] = dict(roots)
        for table in self._taken(roots):
            name = self.root_of(source, table)
            last, late = known.get(name, (None, 0))
            self._register(source, name, NO_TIME if last is None else last)
            self._late[self.code(source, table)] = late

    def renew(self, source: str, roots: Roots) -> None:
        """The tables as they are now: some may be new, others gone."""
        self._roots[source] = dict(roots)
        before = {each.table for each in self._tracker.partitions() if each.source == source}
        now = {self.root_of(source, table) for table in self._taken(roots)}
        for name in now - before:
            self._register(source, name, NO_TIME)
        for name in before - now:
            self._tracker.remove(source, name)

    def follow(self, controls: Controls) -> bool:
        """Do what operators say of watermarks; returns True if any of it is new."""
        before, self._controls = self._controls, controls
        for source, to in controls.pushed.items():
            self._tracker.push(to, source)
        for partition, mark in controls.marks.items():
            if mark.idle:
                self._tracker.mark_idle(*partition)
            elif before.marks.get(partition) != mark:
                self._tracker.mark_active(*partition)
        return controls != before

    def root_of(self, source: str, table: str) -> str:
        """Whose watermark a table's rows count for."""
        if self._config.leaf_partitions:
            return table
        return self._roots.get(source, {}).get(table, table)

    def time_of(self, source: str, table: str) -> TableTime:
        """Where a table's rows have their time; nowhere, if it came without being configured."""
        root = _parts(self._roots.get(source, {}).get(table, table))
        timed = self._config.of_table(*_parts(table), root)
        return timed or TableTime("", self._config.type, self._config.late_tolerance_us)

    def code(self, source: str, table: str) -> int:
        """The number of a table's partition; UnknownTableError if it must be looked up first."""
        if table not in self._roots[source]:
            raise UnknownTableError(source, table)
        code = self._tracker.code(source, self.root_of(source, table))
        assert code is not None  # of all that is taken
        return code

    def count_late(self, late: Released) -> None:
        codes, counts = np.unique(late.codes, return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            self._late[code] = self._late.get(code, 0) + count

    def show(
        self, state: Connection, consumer: int, source: str, sequencer: Sequencer, now_us: int
    ) -> None:
        """Let SQL say what a database's partitions are at; ``now_us`` by its own clock."""
        rows = self._rows(source, sequencer, now_us)
        if self._shown.get(source) != rows:  # an idle database is kept free of our writes
            show_partitions(state, consumer, rows)
            self._shown[source] = rows

    def _rows(self, source: str, sequencer: Sequencer, now_us: int) -> list[PartitionRow]:
        states = [each for each in self._tracker.partitions() if each.source == source]
        codes = [self._tracker.code(source, each.table) for each in states]
        most = max((code for code in codes if code is not None), default=-1) + 1
        buffered: npt.NDArray[np.int64] = sequencer.buffer.rows_of_partitions(most)
        now = datetime.now(UTC)
        shown = []
        for each, code in zip(states, codes, strict=True):
            assert code is not None
            if not each.idle or each.idle_since is None:
                self._idle_since.pop(code, None)
            elif code not in self._idle_since:
                silent = timedelta(microseconds=max(0, now_us - each.idle_since))
                self._idle_since[code] = now - silent
            shown.append(
                PartitionRow(
                    each.table,
                    _none(each.last_event),
                    _none(each.watermark),
                    self._idle_since.get(code),
                    int(buffered[code]),
                )
            )
        return shown

    def seen(self) -> dict[str, dict[str, Seen]]:
        """What was seen of each table that has had an event, by database."""
        found: dict[str, dict[str, Seen]] = {source: {} for source in self._roots}
        for each in self._tracker.partitions():
            if each.last_event != NO_TIME:
                code = self._tracker.code(each.source, each.table)
                late = 0 if code is None else self._late.get(code, 0)
                found[each.source][each.table] = Seen(each.last_event, late)
        return found

    def _taken(self, roots: Roots) -> list[str]:
        return [table for table in roots if self._match.takes(*_parts(table))]

    def _register(self, source: str, name: str, last_event: int) -> int:
        tolerance = self.time_of(source, name).late_tolerance_us
        return self._tracker.register(source, name, tolerance_us=tolerance, last_event=last_event)


def _parts(table: str) -> tuple[str, str]:
    schema, _, name = table.partition(".")
    return schema, name


def _none(us: int) -> int | None:
    return None if us == NO_TIME else us
