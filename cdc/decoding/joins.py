"""Text columns put together with constants, a whole column at a time.

Arrow takes plain strings as constants too, but derives their type again each time, which costs
more than joining a small batch does. So every constant goes through here once.
"""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

_CONSTANTS_MAX = 16_384


@lru_cache(maxsize=_CONSTANTS_MAX)
def constant(text: str) -> pa.StringScalar:
    """A text that stands for a whole column of itself."""
    return pa.scalar(text, pa.string())


def repeated(text: str, count: int) -> pa.StringArray:
    """A column of ``count`` times the same text."""
    return pa.repeat(constant(text), count)


def joined(*parts: str | pa.StringArray, null: str | None = None) -> pa.StringArray:
    """Columns and constants put together, row by row.

    A null in any column makes the row null, or stands as the text ``null``. One of the parts at
    least is a column.
    """
    merged: list[str | pa.StringArray] = []
    for part in parts:
        # Every piece costs time for every row, so neighbouring constants become one.
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    pieces = [constant(part) if isinstance(part, str) else part for part in merged]
    if null is None:
        return pc.binary_join_element_wise(*pieces, constant(""))
    return pc.binary_join_element_wise(
        *pieces, constant(""), null_handling="replace", null_replacement=null
    )
