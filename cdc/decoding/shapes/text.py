"""Putting JSON together from columns and constants."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc


def join(*pieces: str | pa.StringArray, null: str = "") -> pa.StringArray:
    """Columns and constants, row by row; ``null`` stands where a column has none."""
    return pc.binary_join_element_wise(*pieces, "", null_handling="replace", null_replacement=null)


def member(key: str, values: pa.StringArray) -> tuple[pa.StringArray, ...]:
    """``,"key":value`` for ``join``, where there is a value; no column at all if there is none."""
    if values.null_count == len(values):
        return ()
    return (pc.binary_join_element_wise(f',"{key}":', values, ""),)


def for_each_value(column: pa.Array, write: Callable[[pa.Array], pa.StringArray]) -> pa.StringArray:
    """``write`` each distinct value once: all rows of a transaction, or of a table, share one."""
    encoded = column.dictionary_encode()
    return write(encoded.dictionary).take(encoded.indices)
