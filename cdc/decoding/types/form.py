"""What a Postgres type is here: its Arrow type, its Spark type, and its JSON.

Each type family has a module, and each type one ``TypeForm`` in it. Whatever a value becomes, it is
made of the text that Postgres wrote, a whole column at a time. Invariant: a null stays
null, every other value becomes exactly one value, and texts that the type cannot have are refused
together, each with its position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from cdc.decoding.format import ValueFormat
from cdc.decoding.joins import joined


@dataclass(frozen=True)
class JsonColumn:
    """One JSON value a row, null where the row has none.

    What stands around every value alike, such as quotes, is kept apart: joining it with what
    surrounds the column costs nothing.
    """

    values: pa.StringArray
    opening: str = ""
    closing: str = ""

    def whole(self) -> pa.StringArray:
        """The values as complete JSON, quotes and all; still null where they were."""
        if not self.opening and not self.closing:
            return self.values
        return joined(self.opening, self.values, self.closing)


def quoted(values: pa.StringArray) -> JsonColumn:
    """Values that are the inside of JSON strings."""
    return JsonColumn(values, '"', '"')


@dataclass(frozen=True)
class TypeForm:
    """A Postgres type: what its texts become."""

    arrow: pa.DataType
    spark: str  # in the words of Spark's DDL
    json: Callable[[pa.BinaryArray, ValueFormat], JsonColumn]
    typed: Callable[[pa.BinaryArray], pa.Array]
