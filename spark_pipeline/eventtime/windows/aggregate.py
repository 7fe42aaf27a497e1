"""Windows over event time: which windows a change is in, and the results of those that close.

Windows are ``[start, end)``, aligned to 1970 and ``slide_us`` apart. Invariant: a
result depends on the changes in its window and on nothing else, not on how they were cut or in
what order they are handed over; the same changes give the same results in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from cdc.decoding.joins import joined
from cdc.errors import ConfigError, ExpressionError
from spark_pipeline.eventtime.windows.check import check_window
from spark_pipeline.eventtime.windows.query import Aggregation
from spark_pipeline.eventtime.windows.rows import WindowRows
from spark_pipeline.eventtime.windows.run import WindowRun
from spark_pipeline.eventtime.windows.tables import Tables, WindowTables

if TYPE_CHECKING:
    from spark_pipeline.delivery.deliver import Origin

Times = NDArray[np.int64]

RESULT_SCHEMA: Final = pa.schema(
    [
        pa.field("window_start", pa.int64(), nullable=False),
        pa.field("window_end", pa.int64(), nullable=False),
        pa.field("record", pa.string(), nullable=False),
    ]
)
"""One row for each window and group; times in microseconds since 1970."""

_NO_TIME: Final = np.iinfo(np.int64).min
_LEAST, _MOST = int(_NO_TIME), int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class WindowSpec:
    """A window as configured: names and SQL expressions of what is grouped by and aggregated."""

    size_us: int
    slide_us: int
    group_by: Mapping[str, str]
    aggregates: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.slide_us <= 0 or self.size_us <= 0 or self.size_us % self.slide_us:
            raise ConfigError(
                f"a window of {self.size_us} us cannot slide by {self.slide_us} us",
                fix="let size be a whole multiple of slide, both above 0",
            )


@dataclass(frozen=True)
class Closed:
    """What came of windows that closed."""

    results: pa.RecordBatch  # RESULT_SCHEMA, by window_end, window_start and group
    bad: Mapping[int, str]  # changes that are in no result, by their place, and why


def last_window_end(times: Times, size_us: int, slide_us: int) -> Times:
    """The end of the last window that holds each time; none (the smallest number) for none."""
    some = np.where(times == _NO_TIME, 0, times)
    return np.where(times == _NO_TIME, _NO_TIME, some // slide_us * slide_us + size_us)


class WindowAggregator:
    """The windows of one consumer; ExpressionError if its expressions do not fit the tables."""

    def __init__(
        self,
        spark: SparkSession,
        consumer: str,
        spec: Aggregation,
        tables: Tables,
        origins: Sequence[Origin],
    ) -> None:
        found = check_window(spark, consumer, spec, tables)
        problems = [*found.of_form, *found.of_tables]
        if problems:
            raise ExpressionError("; ".join(what for what, _ in problems), fix=problems[0][1])
        self._spec = spec
        self._consumer = consumer
        self._origins = origins
        self._tables = WindowTables.of(tables)
        self._run = WindowRun(spark, consumer, spec, self._tables)

    def close(
        self,
        rows: pa.RecordBatch,
        times: Times,
        closing: tuple[int, int],
        sources: NDArray[np.int16] | None = None,
    ) -> Closed:
        """The windows with ``closing[0] < end - 1 <= closing[1]``, over the rows that lie in them.

        ``rows`` are of CHANGE_SCHEMA with values in the default format; ``sources`` says of each
        its place among the origins, the first if it is left out. TransientError if the aggregates
        themselves fail, or more rows than are looked for: nothing may be skipped then.
        """
        if sources is None:
            sources = np.zeros(rows.num_rows, np.int16)
        first, last = self._ends(times, closing)
        inside = np.flatnonzero(first <= last)
        lsn, idx = (rows.column(name).to_numpy()[inside] for name in ("commit_lsn", "commit_idx"))
        # By what the changes are, so that it is the same however they were handed over.
        chosen = inside[np.lexsort((idx, lsn, sources[inside], times[inside]))]
        seen = WindowRows(
            rows.take(pa.array(chosen)),
            sources[chosen],
            self._tables,
            self._consumer,
            self._origins,
        )
        texts, bad = self._run.run(seen, first[chosen], last[chosen])
        return Closed(self._as_results(texts), {int(chosen[at]): what for at, what in bad.items()})

    def _ends(self, times: Times, closing: tuple[int, int]) -> tuple[Times, Times]:
        """The first and the last end of the windows that close and hold each time."""
        size, slide = self._spec.size_us, self._spec.slide_us
        # Ends are multiples of slide, from after + 2 to until + 1. Python's numbers have no bound.
        after, until = map(int, closing)
        low = -(-(after + 2) // slide) * slide
        high = (until + 1) // slide * slide
        last = last_window_end(times, size, slide)
        absent = times == _NO_TIME
        first = np.where(absent, _MOST, last - np.where(absent, 0, size - slide))
        return np.maximum(first, max(low, _LEAST)), np.minimum(last, min(high, _MOST))

    def _as_results(self, texts: pa.Table) -> pa.RecordBatch:
        """The results in order, of the ends and the JSON of each value."""
        size = self._spec.size_us
        ends = texts.column(0).combine_chunks()
        starts = pa.array(ends.to_numpy() - size)
        values = [column.combine_chunks() for column in texts.columns[1:]]
        names = [*self._spec.group_by, *self._spec.aggregates]
        members = [
            (f",{orjson.dumps(name).decode()}:", value)
            for name, value in zip(names, values, strict=True)
        ]
        groups = len(self._spec.group_by)
        none = pa.nulls(len(ends), pa.string()).fill_null("")
        group = joined(none, *(part for member in members[:groups] for part in member))
        record = joined(
            '{"window_start":"',
            _iso8601(starts),
            '","window_end":"',
            _iso8601(ends),
            '"',
            *(part for member in members for part in member),
            "}",
        )
        whole = pa.table([starts, ends, record, group], names=[*RESULT_SCHEMA.names, "group"])
        ordered = whole.sort_by([(name, "ascending") for name in ("window_end", "group")])
        arrays = [ordered.column(name).combine_chunks() for name in RESULT_SCHEMA.names]
        return pa.RecordBatch.from_arrays(arrays, schema=RESULT_SCHEMA)


def _iso8601(times_us: pa.Int64Array) -> pa.StringArray:
    """As everywhere in messages: in UTC, with six digits."""
    texts = times_us.view(pa.timestamp("us")).cast(pa.string())
    return joined(pc.replace_substring(texts, " ", "T"), "Z")
