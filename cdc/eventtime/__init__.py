"""Event time: when a change happened by its own account, not when it was committed.

This room owns what an event time is and what follows from it. Values of a column become times
(``types``), times of a table of a source become its watermark and all of them together one
(``tracker``, by each source's own ``clock``), rows wait until the watermark has reached them
(``buffer``), and many sources become one order (``sequencer``). Nothing here does I/O or reads a
wall clock, and no step loops over rows in Python.

Every time is an int64 of microseconds since 1970 UTC; ``NO_TIME`` stands for none.
"""

from __future__ import annotations

from cdc.eventtime.times import NO_TIME, Codes, Times

__all__ = ["NO_TIME", "Codes", "Times"]
