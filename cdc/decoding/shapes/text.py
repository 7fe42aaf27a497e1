"""Pieces of JSON that several shapes are put together from."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from cdc.decoding.joins import joined


def member(key: str, values: pa.StringArray) -> tuple[pa.StringArray, ...]:
    """``,"key":value`` to join, null where there is no value; no column at all if there is none."""
    if values.null_count == len(values):
        return ()
    return (joined(f',"{key}":', values),)


def for_each_value(column: pa.Array, write: Callable[[pa.Array], pa.StringArray]) -> pa.StringArray:
    """``write`` each distinct value once: all rows of a transaction, or of a table, share one."""
    encoded = column.dictionary_encode()
    return write(encoded.dictionary).take(encoded.indices)
