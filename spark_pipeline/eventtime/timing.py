"""When changes happened: the event times of a consumer's rows, whole columns at a time. Pure.

Inserts and updates have the time that stands in their table's column. All others, and rows in which
it is null, have none, and follow what came before them. Where the commit timestamp is the event
time, every change of a table has it. By the clock of arrival (``ArrivalTiming``) every change has a
time. What must always hold: a value that cannot be read is an error of its row alone, and the same
row always has the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import origin
from cdc.config.event_time import BY_COMMIT, TableTime
from cdc.cursor import Cursor
from cdc.decoding.format import EVENT_TEXT
from cdc.eventtime.arrival import Arrivals
from cdc.eventtime.times import NO_TIME, Times
from cdc.eventtime.types import resolve
from spark_pipeline.delivery.outcome import Poison

_WITH_TIMES: Final = pa.array(["insert", "update"])
_SHOWN_MAX: Final = 80

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
    """What gives the rows of one database their times."""

    def of(self, rows: pa.RecordBatch, code_of: CodeOf) -> Timed: ...


class Timing:
    """How one consumer reads its event times in one database."""

    def __init__(self, of_table: Callable[[str], TableTime]) -> None:
        self._of_table = of_table
        self._known: dict[str, TableTime] = {}

    def of(self, rows: pa.RecordBatch, code_of: CodeOf) -> Timed:
        """``rows`` as decode gives them, with EVENT_TEXT, which is taken away."""
        tables, names = _tables(rows)
        codes = _codes(tables, names, code_of)  # first, because it says if a table is not known
        texts = rows.column(EVENT_TEXT)
        rows = rows.drop_columns([EVENT_TEXT])
        has_time = pc.is_in(rows.column("action"), _WITH_TIMES).to_numpy(zero_copy_only=False)
        types = [self._timed(name).type if name else "" for name in names]
        times = np.full(rows.num_rows, NO_TIME, np.int64)
        bad = np.zeros(rows.num_rows, np.bool_)
        for type_name in set(types) - {""}:
            of_type = np.array([each == type_name for each in types])[tables]
            if type_name == BY_COMMIT:
                times = np.where(of_type, _commit_times(rows), times)
                continue
            at = np.flatnonzero(of_type & has_time)
            if len(at):
                parsed = resolve(type_name).parse(texts.take(pa.array(at)))
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
        self, rows: pa.RecordBatch, texts: pa.StringArray, bad: npt.NDArray[np.bool_]
    ) -> list[Poison]:
        """Rare, so they are written one by one."""
        found = []
        lsn, idx = origin(rows)
        for at in np.flatnonzero(bad).tolist():
            table = f"{rows.column('table_schema')[at]}.{rows.column('table_name')[at]}"
            timed = self._timed(table)
            cursor = Cursor(lsn[at].as_py(), idx[at].as_py())
            value = texts[at].as_py() or ""
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
    """When the rows of one database arrived; ``watermark`` gives how far its consumer has come."""

    def __init__(self, arrivals: Arrivals, watermark: Callable[[], int]) -> None:
        self._arrivals = arrivals
        self._watermark = watermark

    def of(self, rows: pa.RecordBatch, code_of: CodeOf) -> Timed:
        """``rows`` as decode gives them, without event times."""
        codes = _codes(*_tables(rows), code_of)
        lsn, idx = (np.asarray(rows.column(name)) for name in ("commit_lsn", "commit_idx"))
        times = self._arrivals.times(lsn, idx, _commit_times(rows), self._watermark())
        return Timed(rows, times, codes, [])


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
    distinct, numbers = np.unique(pairs, return_inverse=True)
    names = []
    for pair in distinct.tolist():
        name = table.dictionary[pair % width].as_py()
        names.append(f"{schema.dictionary[pair // width].as_py()}.{name}" if name else "")
    return numbers, names
