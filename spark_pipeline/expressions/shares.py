"""Verdicts for a consumer's share of a micro-batch, where they are cheapest to have.

What must always hold: a share of a consumer with expressions is judged before it is delivered, and
from its own start on, so that what is settled already is not judged, and not found bad, again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from spark_pipeline.delivery import Share
from spark_pipeline.expressions.from_log import Stretch, verdicts_on_driver, verdicts_on_executors
from spark_pipeline.expressions.log_rows import pieces_of
from spark_pipeline.expressions.verdicts import leave_verdicts

DRIVER_ROWS_MAX: Final = 30_000
"""Up to so many rows the driver is done before a job would have begun."""


def judge(
    spark: SparkSession | None, share: Share, log: str | Path, history: int | None, exchange: Path
) -> Share:
    """The share with its verdicts, which are left in ``exchange``; as it is without expressions.

    ExpressionError if a table version that it meets does not fit; TransientError if more rows fail
    than are looked for.
    """
    if not share.consumer.expressions:
        return share
    pieces = pieces_of(share.slices)
    stretch = Stretch(share.consumer, share.origin, log, history, pieces, share.start)
    rows = sum(piece.rows for piece in share.slices)
    if spark is None or rows <= DRIVER_ROWS_MAX:
        found = verdicts_on_driver(spark, stretch)
    else:
        found = verdicts_on_executors(spark, stretch)
    path, failed = leave_verdicts(exchange, found)
    return replace(share, verdicts=path, failed=failed)
