"""What of a change an expression looks at: nothing else is handed to Spark.

Rows cross to the JVM and back, and that is most of what an expression costs. Invariant:
an expression gives the same answer over what is left; ``action`` always is, so that rows count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import Column

from spark_pipeline.expressions.engine import Engine

_ALWAYS = "action"


def used_schema(engine: Engine, schema: pa.Schema, columns: list[Column]) -> pa.Schema:
    """The columns of ``schema``, and of those that are structs the fields, that are looked at."""
    chosen: Any = engine.frame(schema).select(*columns)
    plan = chosen._jdf.queryExecution().analyzed()
    trees = plan.projectList()
    return used_by([trees.apply(at) for at in range(trees.size())], schema)


def used_by(trees: Sequence[Any], schema: pa.Schema) -> pa.Schema:
    """The same of analyzed expressions over columns of ``schema``."""
    whole: set[str] = {_ALWAYS}
    fields: dict[str, set[int]] = {}
    waiting = list(trees)
    while waiting:
        node = waiting.pop()
        kind = _kind(node)
        if kind == "GetStructField" and _kind(node.child()) == "AttributeReference":
            fields.setdefault(str(node.child().name()), set()).add(int(node.ordinal()))
        elif kind == "AttributeReference":
            whole.add(str(node.name()))
        else:
            waiting += [node.children().apply(at) for at in range(node.children().size())]
    kept = []
    for field in schema:
        if field.name in whole:
            kept.append(field)
        elif field.name in fields:
            within = [field.type.field(at) for at in sorted(fields[field.name])]
            kept.append(pa.field(field.name, pa.struct(within), field.nullable))
    return pa.schema(kept)


def pruned(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """What is left of ``rows`` under a schema that ``used_schema`` gave."""
    return pa.RecordBatch.from_arrays(
        [_pruned(rows.column(field.name), field.type) for field in schema], schema=schema
    )


def _pruned(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if column.type == wanted:
        return column
    fields = [column.field(one.name) for one in wanted]
    # ``field`` gives the values of a slice as they are, without what the struct itself says.
    return pa.StructArray.from_arrays(
        fields, fields=list(wanted), mask=column.is_null() if column.null_count else None
    )


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())
