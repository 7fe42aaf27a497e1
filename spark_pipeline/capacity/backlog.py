"""How much of the log lies between two places, and how far some of it reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from cdc.cursor import ORIGIN, Cursor, is_free
from cdc.errors import WalbrookError
from cdc.log.segment import high_of
from cdc.log.view import LogReader


@dataclass(frozen=True)
class Bounds:
    """Most rows and most bytes of something."""

    rows: int
    bytes: int


def fitting(log: LogReader, first: int, end: int, most: Bounds) -> tuple[int, int]:
    """How many batches from ``first`` on, up to ``end``, stay within ``most``, and their rows.

    An index is read for every batch, so no more of them are looked at than could matter.
    """
    last = min(end, first + most.rows + 1)
    if last <= first:
        return 0, 0
    entries = log.entries(first, last)
    batches = rows = size = 0
    for more, larger in zip(entries["rows"].tolist(), entries["bytes"].tolist(), strict=True):
        size += larger
        if rows + more > most.rows or size > most.bytes:
            break
        batches, rows = batches + 1, rows + more
    return batches, rows


def end_of(log: LogReader) -> Cursor:
    """Everything that the log has lies below; ORIGIN for an empty one."""
    end = log.next_batch()
    if end <= log.first_batch():
        return ORIGIN
    return high_of(log.entries(end - 1, end)[0])


def beyond(log: LogReader, cursors: Mapping[str, Cursor]) -> list[str]:
    """Of these the names whose cursors stand beyond the end of the log."""
    end = end_of(log)
    return [name for name, cursor in cursors.items() if end > ORIGIN and _place(cursor) > end]


def _place(cursor: Cursor) -> Cursor:
    """Rows of a backfill stand where the log has none, and take no place in it."""
    return Cursor(cursor.lsn, 0) if is_free(cursor.lsn) else cursor


def fits(log: LogReader, first: int, end: int, most: Bounds) -> bool:
    """Whether all batches ``[first, end)`` stay within ``most``."""
    return fitting(log, first, end, most)[0] >= end - first


def lowest_near(log: LogReader, cursors: Iterable[Cursor], near: Bounds) -> int | None:
    """The lowest batch of these cursors that lies ``near`` the highest; None without any.

    A cursor that the log does not have counts for nothing.
    """
    places: list[int] = []
    for cursor in cursors:
        with suppress(WalbrookError):
            places.append(log.seek(cursor))
    top = max(places, default=None)
    if top is None:
        return None
    return min((at for at in places if _is_near(log, at, top, near)), default=top)


def high_before(log: LogReader, first: int) -> Cursor:
    """The high watermark of the batch before ``first``; the log's floor without one."""
    if log.first_batch() < first <= log.next_batch():
        return high_of(log.entries(first - 1, first)[0])
    return log.floors()[0]


def _is_near(log: LogReader, first: int, top: int, near: Bounds) -> bool:
    try:
        return first >= log.first_batch() and fits(log, first, top, near)
    except WalbrookError:
        return False
