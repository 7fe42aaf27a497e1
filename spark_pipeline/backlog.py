"""How much of the log lies between two places."""

from __future__ import annotations

from cdc.log.view import LogReader


def rows_between(log: LogReader, first: int, end: int, most: int) -> int:
    """The rows of the batches ``[first, end)``; of a long range only that there are more.

    An index is read for every batch, so no more of them are looked at than could matter.
    """
    if end <= first:
        return 0
    if end - first > most:
        return most + 1
    return min(most + 1, int(log.entries(first, end)["rows"].sum()))
