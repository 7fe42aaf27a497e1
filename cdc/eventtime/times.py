"""The unit of event time: int64 microseconds since 1970 UTC, whole columns of them.

Invariant: a time lies in the years 0001 to 9999, so that a tolerance or a window can be
added to it or taken from it without leaving int64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Codes = NDArray[np.int32]

NO_TIME = int(np.iinfo(np.int64).min)
"""No time: null, or not known. It is below every time."""

TIME_MIN = -62_135_596_800_000_000
"""0001-01-01 00:00:00 UTC."""
TIME_MAX = 253_402_300_799_999_999
"""9999-12-31 23:59:59.999999 UTC."""


def as_it_is(times: Times) -> Times:
    """What happens at a time is due then."""
    return times
