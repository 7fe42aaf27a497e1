"""The query of a window: changes with the ends of their windows in, a text for each result out.

The same query is checked before the service starts and run when windows close. What must always
hold: the changes of a group are taken in one order, that of ``RANK``, so that the sum of floats,
whose last digits depend on it, is the same each time, on however many cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import DecimalType

from spark_pipeline.expressions.compiled import JSON_OPTIONS

# No expression can name these.
FIRST, LAST, RANK = "~first", "~last", "~rank"
_END: Final = "~end"
ASIDE: Final = [pa.field(name, pa.int64(), nullable=False) for name in (FIRST, LAST, RANK)]
"""Of each change the ends of the first and the last window that it is in, and its place."""


class Aggregation(Protocol):
    """What is grouped by and aggregated: names and SQL expressions."""

    @property
    def slide_us(self) -> int: ...

    @property
    def group_by(self) -> Mapping[str, str]: ...

    @property
    def aggregates(self) -> Mapping[str, str]: ...


def group_name(at: int) -> str:
    return f"~group{at}"


def aggregate_name(at: int) -> str:
    return f"~aggregate{at}"


def in_windows(changes: DataFrame, slide_us: int) -> DataFrame:
    """A row for each change and each window that it is in."""
    ends = sf.sequence(sf.col(FIRST), sf.col(LAST), sf.lit(slide_us))
    return changes.withColumn(_END, sf.explode(ends))


def aggregated(changes: DataFrame, spec: Aggregation, partitions: int = 1) -> DataFrame:
    """A row for each window and group: its end, and what is asked of it, by the names above."""
    groups = [group_name(at) for at in range(len(spec.group_by))]
    keys = [sf.col(name) for name in (_END, *groups)]
    chosen = [
        sf.expr(text).alias(name) for name, text in zip(groups, spec.group_by.values(), strict=True)
    ]
    keyed = in_windows(changes, spec.slide_us).select("*", *chosen)
    spread = keyed.coalesce(1) if partitions == 1 else keyed.repartition(partitions, *keys)
    asked = [
        sf.expr(text).alias(aggregate_name(at)) for at, text in enumerate(spec.aggregates.values())
    ]
    return spread.sortWithinPartitions(*keys, sf.col(RANK)).groupBy(*keys).agg(*asked)


def as_texts(results: DataFrame) -> DataFrame:
    """The same with the JSON of each value in its place."""
    return results.select(
        *(
            _json(field.name, field.dataType).alias(field.name) if field.name != _END else _END
            for field in results.schema
        )
    )


def _json(name: str, kind: Any) -> Column:
    value = sf.col(name)
    if isinstance(kind, DecimalType):
        # to_json would write small ones with an exponent.
        return sf.coalesce(value.cast("string"), sf.lit("null"))
    within = sf.to_json(sf.struct(value.alias("v")), JSON_OPTIONS)
    return sf.substring(within, len('{"v":') + 1, sf.length(within) - len('{"v":}'))
