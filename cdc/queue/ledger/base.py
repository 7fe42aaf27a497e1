"""The ledger of delivered cursors: the seam, and the cursors as bytes.

A destination that takes a repeat for new cannot tell what it already has, so we remember it: every
message that was accepted and is not settled yet. Invariants: a cursor that is found in a
ledger was accepted by the destination, under this very ledger's name; one that is not found may
have been. A cursor is sixteen bytes, two big-endian numbers, so bytes compare as cursors do and
nothing is ever rounded.

The messages of a consumer's queue stand below its cursor, and leave the queue one by one: after a
crash those of one request may be claimed singly and in any order. So theirs are kept apart
(``queued``), one entry per message. All other entries hold the cursors of one note, of one or more
requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cdc.cursor import Cursor

Integers = npt.NDArray[np.int64]

CURSOR_BYTES: Final = 16


class Ledger(Protocol):
    """Where accepted cursors are kept; ``ledger`` is ``walbrook.consumers.ledger``.

    Every method raises TransientError, within a bounded time, if it cannot be reached. One ledger
    serves all consumers of a process, from any thread.
    """

    with_state: bool
    """Whether it lies in the state database: without it nothing can be settled either, so delivery
    waits for it, and settling trims it. Else delivery goes on without, at the price of repeats."""

    def seen(self, ledger: str, first: Cursor, last: Cursor, *, queued: bool = False) -> bytes:
        """The noted cursors from ``first`` to ``last``, packed, in any order, and maybe others."""
        ...

    def note(self, ledger: str, lsn: Integers, idx: Integers, *, queued: bool = False) -> None:
        """These were accepted."""
        ...

    def trim(self, ledger: str, below: Cursor) -> None:
        """Everything below is settled: it cannot come again. Not those of the queue."""
        ...

    def drop(self, ledger: str, lsn: Integers, idx: Integers) -> None:
        """Forget these messages, which have left the consumer's queue, and no others."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True)
class LedgerUse:
    """How a delivery got on with its ledger."""

    lost: str | None = None  # why it could not be read or written; None if all went well
    unnoted: int = 0  # accepted messages that it does not know of: they may be repeated


def together(uses: Iterable[LedgerUse | None]) -> LedgerUse | None:
    """Several deliveries as one; None if no ledger was used in any."""
    known = [use for use in uses if use is not None]
    if not known:
        return None
    lost = next((use.lost for use in known if use.lost is not None), None)
    return LedgerUse(lost, sum(use.unnoted for use in known))


def pack(lsn: Integers, idx: Integers) -> bytes:
    """Cursors as bytes, sixteen each."""
    return np.column_stack((lsn, idx)).astype(">i8").tobytes()


def pack_each(lsn: Integers, idx: Integers) -> list[bytes]:
    """The bytes of each cursor."""
    whole = pack(lsn, idx)
    return [whole[at : at + CURSOR_BYTES] for at in range(0, len(whole), CURSOR_BYTES)]


def packed(cursor: Cursor) -> bytes:
    return cursor.lsn.to_bytes(8, "big") + cursor.idx.to_bytes(8, "big")


def pack_note(lsn: Integers, idx: Integers) -> tuple[Cursor, bytes]:
    """The cursors of a note, the highest first, and which that is.

    So the bytes of notes, too, are in the order of their highest cursors.
    """
    order = np.lexsort((idx, lsn))[::-1]
    return Cursor(int(lsn[order[0]]), int(idx[order[0]])), pack(lsn[order], idx[order])


def among(lsn: Integers, idx: Integers, noted: bytes) -> npt.NDArray[np.bool_]:
    """For each cursor whether it is one of the packed ones."""
    if not noted:  # as almost always
        return np.zeros(len(lsn), dtype=np.bool_)
    # All of one width, so that NumPy's padding of texts with zeros changes nothing.
    width = f"S{CURSOR_BYTES}"
    return np.isin(np.frombuffer(pack(lsn, idx), width), np.frombuffer(noted, width))
