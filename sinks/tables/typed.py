"""The texts of rows as Arrow columns, in the types that decode gives them. Pure, whole columns.

A table of the lake has these types, and so has ``option("table", …)`` of the Spark source: the
plan of a table version (``cdc.decoding.plan``) owns them.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import pyarrow as pa

from cdc.decoding.columns import BadValuesError
from cdc.decoding.copy_text import read_text
from cdc.decoding.plan import TablePlan, plan_for
from cdc.decoding.row_texts import NULL, message_of
from cdc.decoding.typed import table_type
from cdc.errors import PoisonError
from sinks.tables.fold import split_columns

_VERSIONS_MAX = 4096


@lru_cache(maxsize=_VERSIONS_MAX)
def plan_of(version: str) -> TablePlan:
    """The plan of the table version that ``row_texts.version_text`` wrote."""
    return plan_for(message_of(version))


def row_schema(plan: TablePlan) -> pa.Schema:
    """The columns of a table version with their Arrow types."""
    return pa.schema(list(table_type(plan)))


def typed_rows(texts: pa.StringArray, version: str, as_text: Collection[str] = ()) -> pa.Table:
    """Rows as ``row_text`` has them, of one table version that has columns; null is a row of nulls.

    The columns ``as_text`` are the texts that the source wrote. Raises PoisonError if a value has
    no place in the Arrow type of its column.
    """
    plan = plan_of(version)
    if texts.null_count:
        texts = texts.fill_null("\t".join([NULL] * len(plan.names)))
    fields = [
        field.with_type(pa.string()) if field.name in as_text else field
        for field in row_schema(plan)
    ]
    schema = pa.schema(fields)
    if not len(texts):
        return schema.empty_table()
    columns = [
        read_text(column) if field.name in as_text else _typed(plan, at, read_text(column))
        for at, (field, column) in enumerate(zip(schema, split_columns(texts), strict=True))
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _typed(plan: TablePlan, at: int, texts: pa.StringArray) -> pa.Array:
    try:
        return plan.types[at].typed(texts.view(pa.binary()))
    except BadValuesError as bad:
        position, what = next(iter(bad.faults.items()))
        raise PoisonError(
            f"column {plan.names[at]} of {plan.relation}, whose Arrow type is "
            f"{plan.types[at].arrow}: {what}",
            fix="it becomes a dead letter; leave the table out with source.exclude_tables, or "
            "change the type of the column",
            detail=str(texts[position].as_py()),
        ) from None
