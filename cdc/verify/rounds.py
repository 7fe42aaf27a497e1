"""When a row counts as different while changes flow. Pure.

Both sides are read at different moments, so a row that was changed meanwhile seems to differ. Rows
that seem to differ are looked at again in rounds. In a round the source's row is read (``before``),
then, once the consumer has passed the position of that read, the destination's (``held``), then,
once every transaction that was open by then has ended, the source's row again (``after``).

The rule: if ``held`` is equal to ``before`` or to ``after``, the row is equal. If ``before`` and
``after`` are the same version of the row (by ``xmin`` and ``ctid``), no change of it was committed
between them, and the destination had all changes before: the row differs. Otherwise it was changed
meanwhile, and the next round decides. A row counts as different once it differs in the same way in
two rounds in a row. Rows that no round could decide are counted as changing.

The last wait is needed because a commit may be decoded and delivered before it is visible: see
``cdc.backfill.open_transactions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cdc.verify.held import Key
from cdc.verify.records import HeldRow

ROUNDS_MAX: Final = 10
_ROUNDS_TO_DIFFER: Final = 2


class Difference(Enum):
    """How a row differs."""

    MISSING = "missing"
    EXTRA = "extra"
    DIFFERENT = "different"


@dataclass(frozen=True)
class SourceRow:
    """A row of the source, and which version of it this is."""

    content: bytes
    version: str


Same = Callable[[bytes, HeldRow], bool]
"""Whether the content of a row of the source is what the destination holds."""


@dataclass
class Rounds:
    """The rows that seem to differ, and what the rounds so far say of them."""

    open: set[Key]
    differing: dict[Key, Difference] = field(default_factory=dict)
    _seen: dict[Key, tuple[Difference, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: Iterable[Key]) -> Rounds:
        return cls(set(keys))

    def undecided(
        self,
        keys: Iterable[Key],
        before: Mapping[Key, SourceRow],
        held: Mapping[Key, HeldRow],
        same: Same,
    ) -> list[Key]:
        """Settle what is equal already; returns the keys whose rows are to be read again."""
        left = []
        for key in keys:
            if _equal(before.get(key), held.get(key), same):
                self._settle(key)
            else:
                left.append(key)
        return left

    def decide(
        self,
        keys: Iterable[Key],
        before: Mapping[Key, SourceRow],
        held: Mapping[Key, HeldRow],
        after: Mapping[Key, SourceRow],
        same: Same,
    ) -> None:
        """End a round for these keys."""
        for key in keys:
            was, there, now = before.get(key), held.get(key), after.get(key)
            if _equal(now, there, same):
                self._settle(key)
            elif (was and was.version) != (now and now.version):
                self._seen.pop(key, None)
            else:
                self._differs(key, _difference(now, there))

    def _differs(self, key: Key, found: Difference) -> None:
        before, times = self._seen.get(key, (found, 0))
        times = times + 1 if before is found else 1
        self._seen[key] = (found, times)
        if times >= _ROUNDS_TO_DIFFER:
            self._settle(key)
            self.differing[key] = found

    def _settle(self, key: Key) -> None:
        self.open.discard(key)
        self._seen.pop(key, None)


def _equal(row: SourceRow | None, held: HeldRow | None, same: Same) -> bool:
    if row is None or held is None:
        return row is None and held is None
    return same(row.content, held)


def _difference(row: SourceRow | None, held: HeldRow | None) -> Difference:
    if held is None:
        return Difference.MISSING
    return Difference.EXTRA if row is None else Difference.DIFFERENT
