"""What became of a table's columns between two versions of it. Pure.

Invariant: the old columns without the dropped ones, renamed and retyped in place, with
the added ones put in at their positions, are the new columns.

With attribute numbers on both sides a column is the same if its number is. Without, it goes by
names, and a rename is recognised by its place: the same position and type, and
nothing before it that was dropped or added.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ColumnShape:
    """A column as far as a change of it can be seen; ``attnum`` is None where it is not known."""

    attnum: int | None
    name: str
    type_oid: int
    typmod: int

    @property
    def type(self) -> tuple[int, int]:
        return self.type_oid, self.typmod


@dataclass(frozen=True)
class ColumnDiff:
    """Old columns are in the order of the old version, new ones in that of the new one."""

    added: tuple[tuple[int, ColumnShape], ...]  # with its position in the new version
    dropped: tuple[ColumnShape, ...]
    renamed: tuple[tuple[str, str], ...]
    retyped: tuple[tuple[ColumnShape, ColumnShape], ...]


def diff_columns(old: Sequence[ColumnShape], new: Sequence[ColumnShape]) -> ColumnDiff:
    """What must be done to ``old`` to make it ``new``."""
    kept = _kept(old, new)
    olds, news = {was for was, _ in kept}, {now for _, now in kept}
    pairs = [(old[was], new[now]) for was, now in kept]
    return ColumnDiff(
        added=tuple((at, column) for at, column in enumerate(new) if at not in news),
        dropped=tuple(column for at, column in enumerate(old) if at not in olds),
        renamed=tuple((was.name, now.name) for was, now in pairs if was.name != now.name),
        retyped=tuple((was, now) for was, now in pairs if was.type != now.type),
    )


def _kept(old: Sequence[ColumnShape], new: Sequence[ColumnShape]) -> list[tuple[int, int]]:
    """The positions, old and new, of columns that are in both; rising on both sides."""
    if all(column.attnum is not None for column in (*old, *new)):
        return _in_both([column.attnum for column in old], [column.attnum for column in new], 0)
    same = 0
    for was, now in zip(old, new, strict=False):
        if was.name != now.name and not _renamed(was, now, old, new):
            break
        same += 1
    rest = _in_both([column.name for column in old], [column.name for column in new], same)
    return [*((at, at) for at in range(same)), *rest]


def _renamed(
    was: ColumnShape, now: ColumnShape, old: Sequence[ColumnShape], new: Sequence[ColumnShape]
) -> bool:
    """Whether two columns at one position look like one: neither name is on the other side."""
    return (
        was.type == now.type
        and all(column.name != was.name for column in new)
        and all(column.name != now.name for column in old)
    )


def _in_both(old: Sequence[Hashable], new: Sequence[Hashable], start: int) -> list[tuple[int, int]]:
    """What both have from ``start`` on; one that changed its place was dropped and added again."""
    positions = {identity: at for at, identity in enumerate(old) if at >= start}
    kept: list[tuple[int, int]] = []
    for at in range(start, len(new)):
        was = positions.get(new[at], -1)
        if was > (kept[-1][0] if kept else -1):
            kept.append((was, at))
    return kept
