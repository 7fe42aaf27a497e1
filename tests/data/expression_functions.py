"""Functions as an operator would write them, for the service under test."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext


def expensive(rows: pa.RecordBatch) -> pa.Array:
    return pc.greater_equal(pc.struct_field(rows.column("record"), "amount"), 90)


def described(rows: pa.RecordBatch) -> pa.Array:
    """The id, and whether a task of Spark's asked; a function in earnest says nothing of that."""
    ids = pc.struct_field(rows.column("record"), "id").cast(pa.string())
    by_task = "true" if TaskContext.get() is not None else "false"
    return pc.binary_join_element_wise('{"order":', ids, f',"by_task":{by_task}}}', "")
