"""What a type family makes of a column: the JSON of each value.

A family is a function from a column's texts to its JSON. What must always hold: a null stays
null, every other value becomes one JSON value, and a text that the type cannot have is refused
with its position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class JsonColumn:
    """One JSON value a row; null where the row has no value."""

    values: pa.StringArray
    quoted: bool = False  # the values are the inside of JSON strings: quotes must be put around

    def bare(self) -> pa.StringArray:
        """The values as complete JSON, quotes and all; still null where they were."""
        if not self.quoted:
            return self.values
        return pc.binary_join_element_wise('"', self.values, '"', "")


Family = Callable[[pa.BinaryArray], JsonColumn]
