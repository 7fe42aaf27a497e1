"""Pieces of JSON that several shapes are put together from."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.joins import joined


def member(key: str, values: pa.StringArray) -> tuple[pa.StringArray, ...]:
    """``,"key":value`` to join, null where there is no value; no column at all if there is none."""
    if values.null_count == len(values):
        return ()
    return (joined(f',"{key}":', values),)


def with_member(objects: pa.StringArray, key: str, values: pa.StringArray) -> pa.StringArray:
    """JSON objects with one more member at their end, where there is a value."""
    longer = joined(pc.utf8_slice_codeunits(objects, 0, -1), f',"{key}":', values, "}")
    return pc.coalesce(longer, objects)


def referring(texts: pa.StringArray, references: pa.StringArray) -> pa.StringArray:
    """``{"claim_check": …}`` in place of a text, where there is a reference."""
    return pc.coalesce(joined('{"claim_check":', references, "}"), texts)


def without(column: pa.StringArray, where: pa.StringArray) -> pa.StringArray:
    """The column, null where there is a value in ``where``."""
    return pc.if_else(where.is_null(), column, pa.scalar(None, pa.string()))


def replaced(rows: pa.RecordBatch, columns: dict[str, pa.Array]) -> pa.RecordBatch:
    """The rows with these columns in place of their own."""
    for name, column in columns.items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at).with_nullable(True), column)
    return rows


def for_each_value(column: pa.Array, write: Callable[[pa.Array], pa.StringArray]) -> pa.StringArray:
    """``write`` each distinct value once: all rows of a transaction, or of a table, share one."""
    encoded = column.dictionary_encode()
    return write(encoded.dictionary).take(encoded.indices)
