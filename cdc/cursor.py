"""The identity of a change.

A cursor is ``(commit_lsn, commit_idx)``: the commit LSN of the transaction (known from its Begin)
and its number within it. An LSN alone identifies nothing, because every row of a transaction shares
one. Cursors order all changes of a source, and a replay gives the same numbers.

Schema changes have places of their own among them. ``cdc.replication.wire.numbering`` leaves one
free wherever a schema change may be needed.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from cdc.errors import OperatorError


def format_lsn(lsn: int) -> str:
    """Postgres' own text form of an LSN: ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Read an LSN in Postgres' text form."""
    high, slash, low = text.partition("/")
    try:
        if not slash:
            raise ValueError
        return (int(high, 16) << 32) | int(low, 16)
    except ValueError:
        raise OperatorError(
            f"'{text}' is not an LSN", fix="write it as Postgres does, such as 16/B374D848"
        ) from None


_LSN_DIGITS_MAX = 19


class Cursor(NamedTuple):
    """Where a change stands in its source's history; compares in commit order."""

    lsn: int
    idx: int

    def __str__(self) -> str:
        return f"{format_lsn(self.lsn)}:{self.idx}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``16/B374D848:3``, as ``str`` writes it, or ``97500059720:3``, as messages do."""
        lsn, colon, idx = text.rpartition(":")
        if not colon or not (idx.isascii() and idx.isdigit()):
            raise OperatorError(
                f"'{text}' is not a cursor",
                fix="write it as LSN:index, such as 16/B374D848:3 or 97500059720:3",
            )
        number = lsn.isascii() and lsn.isdigit() and len(lsn) <= _LSN_DIGITS_MAX
        return cls(int(lsn) if number else parse_lsn(lsn), int(idx))

    @property
    def key(self) -> str:
        """The cursor as messages have it in ``idempotency_key``: both parts in decimal."""
        return f"{self.lsn}:{self.idx}"


ORIGIN = Cursor(0, 0)
"""Below every change."""

END = Cursor((1 << 63) - 1, 0)
"""Above every change; its LSN still fits a signed 64-bit column."""


def cursor_of(lsn: object, idx: object) -> Cursor:
    """The cursor that a row of SQL holds in two columns, ``pg_lsn`` as text and a number."""
    return Cursor(parse_lsn(str(lsn)), int(str(idx)))


def place_before(first: Cursor) -> Cursor:
    """The place of a schema change whose first row stands at ``first``: no row ever has it.

    The first number of a transaction has none before it. Commit LSNs are multiples of eight, so the
    LSN below is no commit; number 0 there can be a logical message or a gap.
    """
    return Cursor(first.lsn, first.idx - 1) if first.idx else Cursor(first.lsn - 1, 1)


_COMMIT_BYTES = 8
"""Commit LSNs are multiples of this; a message outside transactions stands at no such LSN."""

_PLACE_OF_READS = 1
"""LSNs of free places modulo eight: there rows of a backfill stand, and idle sources."""


def idle_place(end_lsn: int) -> Cursor:
    """Where a source stands that has nothing for us below ``end_lsn``.

    The next commit may have exactly this LSN, so the place before its first row stays ahead. A
    commit record is longer than eight bytes: every commit below ``end_lsn`` is below this place.
    """
    return Cursor(end_lsn // 8 * 8 - 8 + _PLACE_OF_READS, 0)


def behind_transaction(high: Cursor) -> Cursor:
    """Where everyone stands who has all of the transaction whose last change is below ``high``.

    That is a free place: every later commit, message, schema change and gap lies behind it. Behind
    a message outside transactions the next commit may follow at once, so nothing is skipped there.
    """
    return free_place(high) if high.lsn % _COMMIT_BYTES == 0 else high


def is_free(lsn: int) -> bool:
    """Whether no change, schema change or gap ever stands at this LSN."""
    return lsn % 8 == _PLACE_OF_READS


def free_place(cursor: Cursor) -> Cursor:
    """The first place at or above a cursor where rows of a backfill may stand, one per number.

    Behind a commit it lies before every later one, and before the place of a schema change. Where
    an idle source stands, it is that place itself.
    """
    if is_free(cursor.lsn):
        return cursor
    return Cursor(cursor.lsn + (_PLACE_OF_READS - cursor.lsn) % 8, 0)
