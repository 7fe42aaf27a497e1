"""Verdicts for a consumer's share of a micro-batch, where they are cheapest to have.

Invariant: a share of a consumer with expressions is judged before it is delivered, and
from its own start on, so that what is settled already is not judged, and not found bad, again. A
change whose table version does not fit ends the share before it: what comes earlier goes out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc.errors import ExpressionError
from spark_pipeline.delivery.deliver import Share
from spark_pipeline.delivery.verdicts import leave_verdicts
from spark_pipeline.expressions.log_range import LogRange
from spark_pipeline.expressions.log_rows import pieces_of
from spark_pipeline.expressions.on_executors import verdicts_on_driver, verdicts_on_executors

DRIVER_ROWS_MAX: Final = 30_000
"""Up to so many rows the driver is done before a job would have begun."""


def judge(
    spark: SparkSession | None, share: Share, log: str | Path, history: int | None, exchange: Path
) -> Share:
    """The share with its verdicts, which are left in ``exchange``; as it is without expressions.

    Where a table version does not fit it is cut, and ``held`` says why. ExpressionError if nothing
    comes before that; TransientError if more rows fail than are looked for.
    """
    if not share.consumer.expressions:
        return share
    pieces = pieces_of(share.slices)
    log_range = LogRange(share.consumer, share.origin, log, history, pieces, share.start, share.end)
    try:
        found = _verdicts(spark, log_range)
    except ExpressionError as error:
        unfit = log_range.first_unfit(spark) if spark is not None else None
        if unfit is None or unfit <= share.start:
            raise
        share = replace(share, end=unfit, stop_reason=error)
        found = _verdicts(spark, replace(log_range, until=unfit))
    path, failed = leave_verdicts(exchange, found)
    return replace(share, verdicts=path, failed=failed)


def _verdicts(spark: SparkSession | None, log_range: LogRange) -> pa.RecordBatch:
    rows = sum(piece.stop - piece.start for piece in log_range.pieces)
    if spark is None or rows <= DRIVER_ROWS_MAX:
        return verdicts_on_driver(spark, log_range)
    return verdicts_on_executors(spark, log_range)
