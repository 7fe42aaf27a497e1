"""Running a window's query on Spark, and finding the changes that it fails on.

A close is one job over the columns that the expressions look at. Invariant: a change
is left out only if what is asked of it alone fails (the value to group by, the argument of an
aggregate); whatever else fails leaves nothing out, and the consumer waits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import from_arrow_schema

from cdc.cursor import Cursor
from cdc.errors import TransientError
from spark_pipeline.eventtime.windows.query import (
    EXTRA_FIELDS,
    RANK,
    Aggregation,
    WindowQuery,
)
from spark_pipeline.eventtime.windows.rows import WindowRows
from spark_pipeline.eventtime.windows.tables import WindowTables
from spark_pipeline.expressions.engine import Engine, Projection, condition_of, spark_says
from spark_pipeline.expressions.failures import BadRowSearch, answers
from spark_pipeline.expressions.pruning import used_by

PARTITION_ROWS: Final = 200_000
"""One more core is asked for each so many rows in windows; fewer are not worth a shuffle."""

# Else Spark reads them in the driver as rows of its own, several times as slowly as in a task.
_SETTINGS: Final = {"spark.sql.execution.arrow.localRelationThreshold": "0"}
_UTILS: Final = "org.apache.spark.sql.classic.ExpressionUtils$"


class WindowRun:
    """The query of a window over its tables, which were checked; one caller at a time."""

    def __init__(
        self, spark: SparkSession, consumer: str, spec: Aggregation, tables: WindowTables
    ) -> None:
        self._engine = Engine.of(spark)
        self._consumer = consumer
        self._spec = spec
        self._used = used_by(_inputs(self._engine.frame(tables.schema), spec), tables.schema)
        self._schema = pa.schema([*self._used, *EXTRA_FIELDS])
        self._spark_schema = from_arrow_schema(self._schema)
        self._session = self._engine.new_session(_SETTINGS)
        self._query = WindowQuery(self._engine.frame(self._schema), spec)
        self._judge: Projection | None = None  # made when something fails

    def run(
        self, seen: WindowRows, first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> tuple[pa.Table, dict[int, str]]:
        """The end of each window and the JSON of its values, and the rows that are left out."""
        rows = seen.seen(self._used)
        bad = {at: f"cannot read {_place(seen, at)}: {what}" for at, what in seen.bad.items()}
        extra = [pa.array(first), pa.array(last), pa.array(np.arange(len(first)))]
        table = pa.Table.from_arrays([*rows.columns, *extra], schema=self._schema)
        search = BadRowSearch(self._consumer)
        for what in bad.values():
            search.count(what)
        # The windows of a change come one after another, so this is how many rows there will be.
        rows_in_windows = int(((last - first) // self._spec.slide_us + 1).sum())
        try:
            return self._results(_without(table, bad), rows_in_windows), bad
        except (PySparkException, Py4JJavaError):
            bad |= self._failing(_without(table, bad), seen, search)
        try:
            return self._results(_without(table, bad), rows_in_windows), bad
        except (PySparkException, Py4JJavaError) as error:
            raise TransientError(
                f"the window of consumer {self._consumer} cannot be worked out: "
                f"{condition_of(error)}",
                detail=spark_says(error),
                fix="it is tried again; if an aggregate is named, correct it so that it takes such "
                "changes, for example with try_sum or try_divide, and start again; nothing was "
                "skipped",
            ) from None

    def _results(self, table: pa.Table, rows_in_windows: int) -> pa.Table:
        if not table.num_rows:
            asked = len(self._spec.group_by) + len(self._spec.aggregates)
            kinds = [pa.int64(), *[pa.string()] * asked]
            names = map(str, range(len(kinds)))
            return pa.schema(zip(names, kinds, strict=True)).empty_table()
        most = self._session.sparkContext.defaultParallelism
        partitions = min(max(1, rows_in_windows // PARTITION_ROWS), most)
        changes = self._session.createDataFrame(table, self._spark_schema)
        return self._query.over(changes, partitions).toArrow()

    def _failing(self, table: pa.Table, seen: WindowRows, search: BadRowSearch) -> dict[int, str]:
        """The rows that an expression fails on, asked of them one by one."""
        if self._judge is None:
            frame = self._engine.frame(self._used)
            columns = [self._column(tree) for tree in _inputs(frame, self._spec)]
            self._judge = Projection(self._engine, self._used, columns, frame)
        (rows,) = table.select(self._used.names).combine_chunks().to_batches()
        _, _, failed = answers(rows, self._judge.run, search)
        ranks = table.column(RANK).to_numpy()
        places = {int(ranks[at]): what for at, what in failed.items()}
        return {at: f"cannot judge {_place(seen, at)}: {what}" for at, what in places.items()}

    def _column(self, tree: Any) -> Column:
        return Column(self._engine.singleton(_UTILS).column(tree))


def _inputs(frame: DataFrame, spec: Aggregation) -> list[Any]:
    """What is asked of each change alone: values to group by, arguments and filters of aggregates.

    They are analyzed over the columns of ``frame``.
    """
    grouped: Any = frame.select(*map(sf.expr, spec.group_by.values()))
    asked: Any = frame.agg(*map(sf.expr, spec.aggregates.values()))
    trees = _each(grouped._jdf.queryExecution().analyzed().projectList())
    waiting = _each(asked._jdf.queryExecution().analyzed().aggregateExpressions())
    while waiting:
        node = waiting.pop()
        if str(node.getClass().getSimpleName()) == "AggregateExpression":
            trees += _each(node.aggregateFunction().children())
            trees += [] if node.filter().isEmpty() else [node.filter().get()]
        else:
            waiting += _each(node.children())
    return trees


def _each(sequence: Any) -> list[Any]:
    return [sequence.apply(at) for at in range(sequence.size())]


def _without(table: pa.Table, bad: dict[int, str]) -> pa.Table:
    if not bad:
        return table
    keep = ~np.isin(table.column(RANK).to_numpy(), list(bad))
    return table.filter(pa.array(keep))


def _place(seen: WindowRows, at: int) -> str:
    said = seen.rows.slice(at, 1).to_pylist()[0]
    cursor = Cursor(said["commit_lsn"], said["commit_idx"])
    return f"the change at {cursor} of table {said['table_schema']}.{said['table_name']}"
