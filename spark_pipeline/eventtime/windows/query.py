"""The query of a window: changes with the ends of their windows in, a text for each result out.

The same query is checked before the service starts and run when windows close. Invariant:
the changes of a group are taken in one order, that of ``RANK``, so that the sum of floats,
whose last digits depend on it, is the same each time, on however many cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import DataType, DecimalType

from spark_pipeline.expressions.compiled import JSON_OPTIONS

# No expression can name these.
FIRST, LAST, RANK = "~first", "~last", "~rank"
_END: Final = "~end"
EXTRA_FIELDS: Final = [pa.field(name, pa.int64(), nullable=False) for name in (FIRST, LAST, RANK)]
"""Of each change the ends of the first and the last window that it is in, and its place."""


class Aggregation(Protocol):
    """What is grouped by and aggregated: names and SQL expressions."""

    @property
    def size_us(self) -> int: ...

    @property
    def slide_us(self) -> int: ...

    @property
    def group_by(self) -> Mapping[str, str]: ...

    @property
    def aggregates(self) -> Mapping[str, str]: ...


class WindowQuery:
    """The query over changes with these columns beside what its expressions see of them.

    All of it that does not depend on the changes is made once: each part is a call to the JVM.
    """

    def __init__(self, empty: DataFrame, spec: Aggregation) -> None:
        """``empty`` has the columns of the changes, and no rows."""
        slides = sf.sequence(sf.col(FIRST), sf.col(LAST), sf.lit(spec.slide_us))
        end = sf.explode(slides) if spec.slide_us < spec.size_us else sf.col(FIRST)
        groups = [
            sf.expr(text).alias(f"~group{at}") for at, text in enumerate(spec.group_by.values())
        ]
        self._keyed = [sf.col("*"), end.alias(_END), *groups]
        self._keys = [
            sf.col(name) for name in (_END, *(f"~group{at}" for at in range(len(groups))))
        ]
        self._order = [*self._keys, sf.col(RANK)]
        self._asked = [
            sf.expr(text).alias(f"~aggregate{at}")
            for at, text in enumerate(spec.aggregates.values())
        ]
        self._texts = [sf.col(_END), *as_texts(self._aggregated(empty, 1).drop(_END))]

    def over(self, changes: DataFrame, partitions: int = 1) -> DataFrame:
        """A row for each window and group: its end, and the JSON of all that is asked of it."""
        return self._aggregated(changes, partitions).select(*self._texts)

    def _aggregated(self, changes: DataFrame, partitions: int) -> DataFrame:
        rows = changes.select(*self._keyed)
        rows = rows.coalesce(1) if partitions == 1 else rows.repartition(partitions, *self._keys)
        # Spark leaves the sort out where the order of changes cannot matter.
        return rows.sortWithinPartitions(*self._order).groupBy(*self._keys).agg(*self._asked)


def as_texts(values: DataFrame) -> list[Column]:
    """The JSON of each column."""
    return [_json(field.name, field.dataType).alias(field.name) for field in values.schema]


def _json(name: str, kind: DataType) -> Column:
    value = sf.col(name)
    if isinstance(kind, DecimalType):
        # to_json would write small ones with an exponent.
        return sf.coalesce(value.cast("string"), sf.lit("null"))
    within = sf.to_json(sf.struct(value.alias("v")), JSON_OPTIONS)
    before, around = len('{"v":'), len('{"v":}')
    return sf.substring(within, sf.lit(before + 1), sf.length(within) - sf.lit(around))
