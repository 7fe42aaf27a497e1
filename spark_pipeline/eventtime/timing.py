"""When changes happened: the event times of a consumer's rows, whole columns at a time.

Inserts and updates have the time that stands in their table's column. All others, and rows in which
it is null, have none, and follow what came before them. Where the commit timestamp is the event
time, every change of a table has it. By the clock of arrival (``ArrivalTiming``) every change has a
time. Invariant: a value that cannot be read is an error of its row alone, and the same row always
has the same time.

``Progress`` says how far time has come: by event time the rows say it, by processing time the clock
of their arrival does. The two orders differ here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import origin
from cdc.config import SinkConfig
from cdc.config.event_time import BY_COMMIT, TableTime
from cdc.cursor import Cursor
from cdc.eventtime.arrival import ArrivalClock, Arrivals, ArrivalTracker, Bound
from cdc.eventtime.clock import SourceClock
from cdc.eventtime.times import NO_TIME, Times
from cdc.eventtime.tracker import WatermarkTracker
from cdc.eventtime.types import resolve
from cdc.state.event_time import Planned, SourceResumeState
from spark_pipeline.delivery.outcome import Poison

_WITH_TIMES: Final = pa.array(["insert", "update"])
_SHOWN_MAX: Final = 80
_STEP_SHOWN_US: Final = 1_000_000
_STEP_US: Final = 10_000_000
"""How often the clock moves a watermark that no window waits for, whether its sink hears of it or
not: each move is a small transaction."""

CodeOf = Callable[[str], int]
"""The number of a partition, by ``schema.table``."""


@dataclass(frozen=True)
class Timed:
    """Rows with their times and partitions, and what is wrong with others."""

    rows: pa.RecordBatch
    times: npt.NDArray[np.int64]  # NO_TIME where there is none
    codes: npt.NDArray[np.int32]  # -1 for what belongs to no table
    bad: list[Poison]


class RowTiming(Protocol):
    """What gives the rows of one source their times."""

    def of(self, rows: pa.RecordBatch, code_of: CodeOf) -> Timed: ...


class Timing:
    """How one consumer reads its event times in one source.

    ``texts`` are the columns of decode that hold the texts, by the names of the tables' columns.
    """

    def __init__(self, of_table: Callable[[str], TableTime], texts: Mapping[str, str]) -> None:
        self._of_table = of_table
        self._texts = texts
        self._known: dict[str, TableTime] = {}

    def of(self, rows: pa.RecordBatch, code_of: CodeOf) -> Timed:
        """``rows`` as decode gives them, with the texts, which are taken away."""
        tables, names = _tables(rows)
        codes = _codes(tables, names, code_of)  # first, because it says if a table is not known
        texts = {column: rows.column(name) for column, name in self._texts.items()}
        rows = rows.drop_columns([*self._texts.values()])
        has_time = pc.is_in(rows.column("action"), _WITH_TIMES).to_numpy(zero_copy_only=False)
        kinds = [self._timed(name) if name else None for name in names]
        times = np.full(rows.num_rows, NO_TIME, np.int64)
        bad = np.zeros(rows.num_rows, np.bool_)
        for column, type_name in {(each.column, each.type) for each in kinds if each is not None}:
            here = [e is not None and (e.column, e.type) == (column, type_name) for e in kinds]
            of_kind = np.array(here)[tables]
            if type_name == BY_COMMIT:
                times = np.where(of_kind, _commit_times(rows), times)
                continue
            at = np.flatnonzero(of_kind & has_time)
            if len(at):
                parsed = resolve(type_name).parse(_taken(texts.get(column), at))
                times[at], bad[at] = parsed.times, parsed.bad
        if not bad.any():
            return Timed(rows, times, codes, [])
        poisons = self._poisons(rows, texts, bad)
        keep = ~bad
        return Timed(rows.filter(pa.array(keep)), times[keep], codes[keep], poisons)

    def _timed(self, table: str) -> TableTime:
        if table not in self._known:
            self._known[table] = self._of_table(table)
        return self._known[table]

    def _poisons(
        self,
        rows: pa.RecordBatch,
        texts: Mapping[str, pa.StringArray],
        bad: npt.NDArray[np.bool_],
    ) -> list[Poison]:
        """Rare, so they are written one by one."""
        found = []
        lsn, idx = origin(rows)
        for at in np.flatnonzero(bad).tolist():
            table = f"{rows.column('table_schema')[at]}.{rows.column('table_name')[at]}"
            timed = self._timed(table)
            cursor = Cursor(lsn[at].as_py(), idx[at].as_py())
            text = texts.get(timed.column)
            value = "" if text is None else text[at].as_py() or ""
            shown = value if len(value) <= _SHOWN_MAX else f"{value[:_SHOWN_MAX]}..."
            why = (
                f"the value {shown!r} is not one of type {timed.type}"
                if value
                else "it is empty, or the table has no such column any more"
            )
            found.append(
                Poison(
                    cursor,
                    f"the change at {cursor} of table {table} has no event time: column "
                    f"{timed.column!r}: {why}. To fix it: correct the row in the source, where the "
                    "correction arrives as a change of its own, or the sink's event_time",
                )
            )
        return found


class ArrivalTiming:
    """When the rows of one source arrived; ``watermark`` gives how far its consumer has come."""

    def __init__(self, arrivals: Arrivals, watermark: Callable[[], int]) -> None:
        self._arrivals = arrivals
        self._watermark = watermark

    def of(self, rows: pa.RecordBatch, code_of: CodeOf) -> Timed:
        """``rows`` as decode gives them, without event times."""
        codes = _codes(*_tables(rows), code_of)
        lsn, idx = (np.asarray(rows.column(name)) for name in ("commit_lsn", "commit_idx"))
        times = self._arrivals.times(lsn, idx, _commit_times(rows), self._watermark())
        return Timed(rows, times, codes, [])


def _taken(texts: pa.StringArray | None, at: npt.NDArray[np.int64]) -> pa.StringArray:
    """Those of some rows; without texts, empty ones."""
    if texts is None:
        return pa.repeat("", len(at))
    return texts if len(at) == len(texts) else texts.take(pa.array(at))


def _commit_times(rows: pa.RecordBatch) -> Times:
    return np.asarray(rows.column("commit_timestamp").view(pa.int64()))


def _codes(
    tables: npt.NDArray[np.int64], names: list[str], code_of: CodeOf
) -> npt.NDArray[np.int32]:
    return np.array([code_of(name) if name else -1 for name in names], np.int32)[tables]


def _tables(rows: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], list[str]]:
    """For each row the number of its table, and their names; what has no table has an empty one."""
    schema = rows.column("table_schema").dictionary_encode()
    table = rows.column("table_name").dictionary_encode()
    width = len(table.dictionary)
    pairs = schema.indices.to_numpy().astype(np.int64) * width + table.indices.to_numpy()
    distinct = pa.array(pairs).dictionary_encode()  # by hash: it costs less than sorting
    names = []
    for pair in distinct.dictionary.to_pylist():
        name = table.dictionary[pair % width].as_py()
        names.append(f"{schema.dictionary[pair // width].as_py()}.{name}" if name else "")
    return distinct.indices.to_numpy().astype(np.int64), names


class Progress:
    """By event time."""

    def __init__(self, consumer: SinkConfig, sources: list[str], due: Callable[[Times], Times]):
        config = consumer.event_time
        assert config is not None
        self.clocks: Mapping[str, SourceClock] = {name: SourceClock() for name in sources}
        self.tracker = WatermarkTracker(
            clock=lambda source: self.clocks[source].now,
            idle_timeout_us=config.idle_timeout_us,
            safety_margin_us=config.safety_margin_us,
            due=due,
        )

    def timings(self, watermark: Callable[[], int]) -> Mapping[str, RowTiming] | None:
        """What gives the rows their times, by source; None if they carry them."""
        return None

    def arrived(
        self, cursors: Mapping[str, Cursor], reads: Mapping[str, Cursor]
    ) -> dict[str, list[Bound]]:
        """What has to be stored for the rows from these cursors on to have the same times again."""
        return {}

    def settled(self, cursors: Mapping[str, Cursor]) -> None:
        """Nothing below these cursors is read again."""


class ArrivalProgress(Progress):
    """By processing time."""

    def __init__(
        self,
        consumer: SinkConfig,
        sources: Mapping[str, SourceResumeState],
        planned: Planned | None,
        clock: Callable[[], int],
    ) -> None:
        config, window = consumer.event_time, consumer.window
        assert config is not None
        clocks = {name: ArrivalClock(clock) for name in sources}
        step_us = _STEP_SHOWN_US if config.emit_watermarks else _STEP_US
        self.clocks = clocks
        self.tracker = ArrivalTracker(
            sources,
            clock=lambda source: clocks[source].now,
            is_at_end=lambda source: clocks[source].is_at_end,
            step_us=step_us if window is None else window.slide_us,
            held=window is not None,
        )
        known = {name: each.read for name, each in sources.items()}
        if planned is not None:
            known |= planned.reads
        self._arrivals = {
            name: Arrivals(each.arrived, known[name]) for name, each in sources.items()
        }

    def timings(self, watermark: Callable[[], int]) -> Mapping[str, RowTiming]:
        return {name: ArrivalTiming(each, watermark) for name, each in self._arrivals.items()}

    def arrived(
        self, cursors: Mapping[str, Cursor], reads: Mapping[str, Cursor]
    ) -> dict[str, list[Bound]]:
        return {
            name: each.bounds(cursors[name], reads[name]) for name, each in self._arrivals.items()
        }

    def settled(self, cursors: Mapping[str, Cursor]) -> None:
        for name, each in self._arrivals.items():
            each.forget(cursors[name])


def progress_of(
    consumer: SinkConfig,
    sources: Mapping[str, SourceResumeState],
    planned: Planned | None,
    due: Callable[[Times], Times],
    clock: Callable[[], int] | None = None,
) -> Progress:
    """For a consumer as it is taken up; ``clock`` gives microseconds since 1970."""
    if consumer.ordering == "processing_time":
        return ArrivalProgress(consumer, sources, planned, clock or wall_clock_us)
    return Progress(consumer, [*sources], due)


def wall_clock_us() -> int:
    return time.time_ns() // 1000
