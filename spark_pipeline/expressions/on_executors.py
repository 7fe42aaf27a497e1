"""Verdicts over what lies in the log: on the driver, or by a Spark job on all cores.

A job decodes in Spark's Python workers and evaluates in its tasks. A table version is a DataFrame
of its own, because its columns are; all of them are one job. Invariant: both say the
same. If the job fails, for a row that an expression fails on or for anything else, the driver is
asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from typing import Final

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from spark_pipeline.delivery.verdicts import VERDICT_SCHEMA, empty, sorted_verdicts
from spark_pipeline.expressions.compiled import Expressions, bare_values, looked_at
from spark_pipeline.expressions.engine import Engine
from spark_pipeline.expressions.evaluate import Judging, checked, verdicts
from spark_pipeline.expressions.failures import BadRowSearch
from spark_pipeline.expressions.log_range import LogRange
from spark_pipeline.expressions.log_rows import raw_rows
from spark_pipeline.expressions.pruning import pruned
from spark_pipeline.expressions.visible_rows import VisibleRows, seen_rows
from spark_pipeline.jvm.arrow_map import map_in_arrow
from spark_pipeline.slices.raw_rows import LogSlice

# What workers say of a row beside what expressions see; no expression can name these.
_LSN, _IDX, _KEEP, _ERROR = "~lsn", "~idx", "~keep", "~error"
_MESSAGE, _ROUTE, _LATE = "~message", "~route", "~late"  # of a row that passes
_EXTRA: Final = [
    pa.field(_LSN, pa.int64()),
    pa.field(_IDX, pa.int64()),
    pa.field(_KEEP, pa.bool_()),
    pa.field(_ERROR, pa.string()),
    pa.field(_MESSAGE, pa.string()),
    pa.field(_ROUTE, pa.string()),
    pa.field(_LATE, pa.string()),
]
_PIECES: Final = pa.schema([(name, pa.int64()) for name in LogSlice._fields])


def verdicts_on_driver(spark: SparkSession | None, log_range: LogRange) -> pa.RecordBatch:
    """VERDICT_SCHEMA for a range of the log, without a job."""
    search = BadRowSearch(log_range.consumer.name)
    parts = [
        verdicts(
            spark,
            log_range.consumer,
            log_range.origin,
            rows,
            since=log_range.since,
            until=log_range.until,
            search=search,
        )
        for rows in raw_rows(log_range.log, log_range.history, log_range.pieces)
    ]
    return sorted_verdicts(pa.Table.from_batches(parts, VERDICT_SCHEMA))


def verdicts_on_executors(spark: SparkSession, log_range: LogRange) -> pa.RecordBatch:
    """The same by a job."""
    expressions = log_range.expressions
    met = log_range.versions()
    if not met:
        return empty()
    listed = pa.Table.from_pylist([piece._asdict() for piece in log_range.pieces], _PIECES)
    engine = Engine.of(spark)
    slices = engine.session.createDataFrame(listed)
    frames = [
        _frame(slices, log_range, schema_id, looked_at(engine, expressions, message))
        for schema_id, message in met.items()
    ]
    try:
        answered = reduce(DataFrame.union, frames).toArrow()
    except (PySparkException, Py4JJavaError):
        return verdicts_on_driver(spark, log_range)
    return checked(log_range.consumer, sorted_verdicts(_as_verdicts(answered, expressions)))


def _frame(slices: DataFrame, log_range: LogRange, schema_id: int, used: pa.Schema) -> DataFrame:
    """One table version: its rows as workers decode them, and the answers to them."""
    schema = from_arrow_schema(pa.schema([*used, *_EXTRA]))
    written = to_arrow_schema(schema, timezone="UTC")
    alone = replace(log_range, pieces=())  # each worker is handed its own

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pieces = [LogSlice(**row) for batch in batches for row in batch.to_pylist()]
        search = BadRowSearch(alone.consumer.name)
        for rows in raw_rows(alone.log, alone.history, pieces):
            for table in seen_rows(
                alone.consumer,
                alone.origin,
                rows,
                since=alone.since,
                until=alone.until,
                only=schema_id,
            ):
                yield _with_early_verdicts(alone.expressions, table, used, search).cast(written)

    return map_in_arrow(slices, decode, schema).select(*_answers(log_range.expressions))


def _with_early_verdicts(
    expressions: Expressions, table: VisibleRows, used: pa.Schema, search: BadRowSearch
) -> pa.RecordBatch:
    """What SQL expressions look at of rows, with what the operator's functions say of them.

    Spark may yet find that a row does not pass: then what came after the filter does not count.
    """
    judging = Judging.begin(table)
    judging.ask_functions(expressions, search, ("filter",))
    early = judging.verdicts(table.cursors)
    judging.errors = {}
    judging.ask_functions(expressions, search, ("transform", "routing"))
    late = judging.verdicts(table.cursors)
    extra = [
        *table.cursors.columns,
        early.column("keep"),
        early.column("error"),
        *(late.column(name) for name in ("message", "route", "error")),
    ]
    columns = [*pruned(table.rows, used).columns, *extra]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*used, *_EXTRA]))


def _answers(expressions: Expressions) -> list[Column]:
    """The columns of VERDICT_SCHEMA, asked of what the workers gave."""
    chosen = expressions.columns(keep=sf.col(_KEEP))
    sound = sf.col(_ERROR).isNull()
    passes = sf.coalesce(sf.when(sound, chosen.get("filter", sf.col(_KEEP))), sf.lit(False))
    goes = passes & sf.col(_LATE).isNull()
    return [
        sf.col(_LSN).alias("commit_lsn"),
        sf.col(_IDX).alias("commit_idx"),
        goes.alias("keep"),
        sf.when(goes, chosen.get("transform", sf.col(_MESSAGE))).alias("message"),
        sf.when(goes, chosen.get("routing", sf.col(_ROUTE))).alias("route"),
        sf.coalesce(sf.col(_ERROR), sf.when(passes, sf.col(_LATE))).alias("error"),
    ]


def _as_verdicts(answered: pa.Table, expressions: Expressions) -> pa.Table:
    if "transform" in expressions.sql:
        at = answered.schema.get_field_index("message")
        bare = [bare_values(chunk) for chunk in answered.column(at).chunks]
        answered = answered.set_column(at, "message", pa.chunked_array(bare, pa.string()))
    return answered.cast(VERDICT_SCHEMA)
