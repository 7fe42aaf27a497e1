"""Verdicts: what a consumer's expressions say of changes, on the driver or on the executors.

Few rows are evaluated in this process, without a Spark job (``verdicts``); many are decoded and
evaluated where the cores are (``on_executors``). Both ask the same columns of Spark and the same
functions. Invariant: a row that fails is the only one to suffer; every insert, update
and delete that the consumer takes has exactly one verdict, in cursor order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from cdc.config import SinkConfig
from cdc.cursor import ORIGIN, Cursor
from spark_pipeline.delivery.verdicts import VERDICT_SCHEMA, empty, sorted_verdicts
from spark_pipeline.expressions.compiled import Expressions, program_for
from spark_pipeline.expressions.engine import Engine
from spark_pipeline.expressions.failures import BadRowSearch, EvaluationError, answers
from spark_pipeline.expressions.functions import Function
from spark_pipeline.expressions.routes import bad_routes
from spark_pipeline.expressions.visible_rows import VisibleRows, place_of, seen_rows
from spark_pipeline.slices.raw_rows import RawRows

if TYPE_CHECKING:
    from spark_pipeline.delivery.deliver import Origin


def verdicts(
    spark: SparkSession | None,
    consumer: SinkConfig,
    origin: Origin,
    rows: RawRows,
    *,
    since: Cursor = ORIGIN,
    until: Cursor | None = None,
    search: BadRowSearch | None = None,
) -> pa.RecordBatch:
    """VERDICT_SCHEMA for the raw rows from ``since`` up to ``until``, evaluated here.

    Without SQL expressions Spark is not needed. ``search`` counts the bad rows of a batch that is
    handed over in parts.
    """
    expressions = Expressions.of(consumer)
    if expressions is None:
        raise ValueError(f"consumer {consumer.name} has no expressions")
    search = search or BadRowSearch(consumer.name)
    judged = [
        _judge(spark, consumer, expressions, table, search)
        for table in seen_rows(consumer, origin, rows, since=since, until=until)
    ]
    return sorted_verdicts(pa.Table.from_batches(judged, VERDICT_SCHEMA)) if judged else empty()


def _judge(
    spark: SparkSession | None,
    consumer: SinkConfig,
    expressions: Expressions,
    table: VisibleRows,
    search: BadRowSearch,
) -> pa.RecordBatch:
    judging = Judging.begin(table)
    judging.ask_functions(expressions, search, ("filter",))
    if expressions.sql:
        assert spark is not None, "SQL expressions need Spark"
        program = program_for(Engine.of(spark), expressions, table.schema)

        def run(rows: pa.RecordBatch) -> pa.RecordBatch:
            try:
                return program.run(rows)
            except EvaluationError as error:
                if rows.num_rows > 1:
                    raise
                key = program.failing_key(rows)
                what = f"the {key} of {search.consumer} failed: {error.what}"
                raise EvaluationError(what, detail=error.detail) from None

        judging.ask(run, search)
    judging.ask_functions(expressions, search, ("transform", "routing"))
    return checked(consumer, judging.verdicts(table.cursors))


def checked(consumer: SinkConfig, verdicts: pa.RecordBatch) -> pa.RecordBatch:
    """The same, where a route that cannot be followed is the error of its message."""
    if verdicts.column("route").null_count == verdicts.num_rows:
        return verdicts
    wrong = bad_routes(consumer, verdicts.column("route"))
    if wrong.null_count == len(wrong):
        return verdicts
    good = wrong.is_null()
    said = {name: verdicts.column(name) for name in VERDICT_SCHEMA.names}
    said["keep"] = pc.and_(said["keep"], good)
    said["error"] = pc.coalesce(said["error"], wrong)
    for name in ("message", "route"):
        said[name] = pc.if_else(good, said[name], pa.scalar(None, pa.string()))
    return pa.RecordBatch.from_arrays(list(said.values()), schema=VERDICT_SCHEMA)


@dataclass
class Judging:
    """Rows of one table version while they are judged: ``open`` are those still in the running."""

    rows: pa.RecordBatch
    open: NDArray[np.int64]
    said: dict[str, pa.Array]  # by key, of all rows; null where there was no answer
    errors: dict[int, str]

    @classmethod
    def begin(cls, table: VisibleRows) -> Judging:
        count = table.rows.num_rows
        bad = np.flatnonzero(table.error.is_valid().to_numpy(zero_copy_only=False))
        errors = {int(at): str(table.error[at].as_py()) for at in bad}
        return cls(table.rows, np.setdiff1d(np.arange(count), bad), {}, errors)

    def ask_functions(
        self, expressions: Expressions, search: BadRowSearch, keys: tuple[str, ...]
    ) -> None:
        for key in keys:
            if key in expressions.functions:
                self.ask(_as_columns(expressions.functions[key]), search)

    def ask(
        self, evaluate: Callable[[pa.RecordBatch], pa.RecordBatch], search: BadRowSearch
    ) -> None:
        """Have the open rows answered; those that fail, and those kept back, are open no more."""
        every = len(self.open) == self.rows.num_rows
        rows = self.rows if every else self.rows.take(pa.array(self.open))
        said, good, bad = answers(rows, evaluate, search)
        for at, text in bad.items():
            row = int(self.open[at])
            self.errors[row] = f"cannot judge {place_of(self.rows, row)}: {text}"
        self.open = self.open[good]
        if said is None:
            return
        for key in said.schema.names:
            self.said[key] = _spread(said.column(key), self.open, self.rows.num_rows)
        if "filter" in said.schema.names:
            passes = pc.fill_null(said.column("filter"), False).to_numpy(zero_copy_only=False)
            self.open = self.open[passes]

    def verdicts(self, cursors: pa.RecordBatch) -> pa.RecordBatch:
        count = self.rows.num_rows
        keep = np.zeros(count, bool)
        keep[self.open] = True
        errors: list[str | None] = [None] * count
        for at, text in self.errors.items():
            errors[at] = text
        nothing = pa.nulls(count, pa.string())
        message, route = (
            pc.if_else(pa.array(keep), self.said.get(key, nothing), pa.scalar(None, pa.string()))
            for key in ("transform", "routing")
        )
        columns = [pa.array(keep), message, route, pa.array(errors, pa.string())]
        return pa.RecordBatch.from_arrays([*cursors.columns, *columns], schema=VERDICT_SCHEMA)


def _as_columns(function: Function) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    def run(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([function.run(rows)], names=[function.key])

    return run


def _spread(values: pa.Array, places: NDArray[np.int64], count: int) -> pa.Array:
    """The values at their places among ``count`` rows, null elsewhere."""
    if len(places) == count:
        return values
    at = np.full(count, -1, np.int64)
    at[places] = np.arange(len(places))
    return values.take(pa.array(at, mask=at < 0))
