"""What became of a column of event times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.eventtime.times import Times


@dataclass(frozen=True)
class Parsed:
    """One entry a value: its time, or ``NO_TIME`` where it is null or could not be read."""

    times: Times
    bad: NDArray[np.bool_]  # could not be read; null is not bad


def present_in(column: pa.StringArray) -> NDArray[np.bool_]:
    """Which values are not null."""
    return np.asarray(column.is_valid(), np.bool_)
