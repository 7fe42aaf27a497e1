"""A range of the log that is judged for one consumer, and the table versions that it meets.

Invariant: only rows that the consumer takes, and lacks, are looked at; a version that
none of them has keeps no row waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from cdc.config import SinkConfig
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import ExpressionError
from spark_pipeline.expressions.compiled import Expressions, looked_at
from spark_pipeline.expressions.engine import Engine
from spark_pipeline.expressions.log_rows import unjoined_rows
from spark_pipeline.expressions.visible_rows import met_versions
from spark_pipeline.slices.raw_rows import LogSlice

if TYPE_CHECKING:
    from spark_pipeline.delivery.deliver import Origin


@dataclass(frozen=True)
class LogRange:
    """Pieces of the log that are judged for one consumer, from ``since`` up to ``until``."""

    consumer: SinkConfig
    origin: Origin
    log: str | Path
    history: int | None
    pieces: Sequence[LogSlice]
    since: Cursor = ORIGIN
    until: Cursor | None = None

    @property
    def expressions(self) -> Expressions:
        found = Expressions.of(self.consumer)
        if found is None:
            raise ValueError(f"consumer {self.consumer.name} has no expressions")
        return found

    def versions(self) -> dict[int, bytes]:
        """The Relation messages of the rows that are judged, by schema id."""
        found: dict[int, bytes] = {}
        for rows in unjoined_rows(self.log, self.history, self.pieces):
            met = met_versions(self.consumer, rows, self.since, self.until)
            found |= {known: message for known, (message, _) in met.items()}
        return found

    def first_unfit(self, spark: SparkSession) -> Cursor | None:
        """The first row whose table version cannot satisfy the expressions; None if all can."""
        engine = Engine.of(spark)
        for rows in unjoined_rows(self.log, self.history, self.pieces):
            met = met_versions(self.consumer, rows, self.since, self.until)
            unfit = [
                int(places[0])
                for message, places in met.values()
                if not _fits(engine, self.expressions, message)
            ]
            if unfit:
                lsn, idx = (rows.raw.column(name) for name in ("commit_lsn", "commit_idx"))
                return Cursor(lsn[min(unfit)].as_py(), idx[min(unfit)].as_py())
        return None


def _fits(engine: Engine, expressions: Expressions, message: bytes) -> bool:
    try:
        looked_at(engine, expressions, message)
    except ExpressionError:
        return False
    return True
