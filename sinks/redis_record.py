"""What a sink records beside its stream, in a hash: by it the sink knows its own work again.

``truncation`` is the truncation (``cdc.generation``) that the stream's entries belong to. ``top``
is the last id that a sink of ours added, written in the transaction that adds it: an id above it
was made by another writer. ``moved`` says that this happened while messages were added: some of
them are missing, and nothing more is added before a rewind. The record of the first generation's
stream also says, in ``generation`` and ``stream``, where the current generation is.

Invariant: the record changes only together with the stream, or under a WATCH of it, so that of two
sinks one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import OperatorError

FIELDS: Final = ("truncation", "top", "moved")


def record_key(stream: str) -> str:
    """The key of a stream's record; a Redis cluster keeps both in one slot."""
    tag = stream.partition("{")[2].partition("}")
    return f"{stream}:walbrook" if tag[0] and tag[1] else f"{{{stream}}}:walbrook"


def entry_cursor(entry_id: bytes) -> Cursor:
    lsn, _, idx = entry_id.partition(b"-")
    return Cursor(int(lsn), int(idx))


def entry_id(cursor: Cursor) -> str:
    return f"{cursor.lsn}-{cursor.idx}"


@dataclass(frozen=True)
class Record:
    """What the record of a stream says; without one, that nothing was ever added."""

    truncation: int = 0
    top: Cursor = ORIGIN
    moved: Cursor | None = None  # the top that our messages had when another writer moved the ids

    @classmethod
    def read(cls, values: list[bytes | None]) -> Self:
        """The values of ``FIELDS``."""
        truncation, top, moved = values
        return cls(
            int(truncation or 0),
            ORIGIN if top is None else entry_cursor(top),
            None if moved is None else entry_cursor(moved),
        )


@dataclass(frozen=True)
class StreamState:
    """A stream as XINFO describes it."""

    last_id: Cursor  # the highest that it ever had; it takes higher ones only
    last_entry: tuple[bytes, list[bytes]] | None

    @classmethod
    def read(cls, info: list[object]) -> Self:
        fields = dict(zip(info[::2], info[1::2], strict=True))
        last_id, last_entry = fields[b"last-generated-id"], fields[b"last-entry"]
        assert isinstance(last_id, bytes)
        return cls(entry_cursor(last_id), last_entry)  # type: ignore[arg-type]


def ids_moved(stream: str, ours: Cursor) -> OperatorError:
    """Redis refuses our messages, which then look as if they had been delivered."""
    return OperatorError(
        f"another writer moved the ids of the stream {stream} beyond {entry_id(ours)}, the last "
        "one that this sink had added",
        fix="call walbrook.rewind with the consumer's own cursor as to_cursor and destination => "
        "'new_generation' (the stream stays, and a new one beside it is begun) or 'truncate' (the "
        "stream is deleted and begun again)",
        kind="ids_moved",
    )


def needs_rights(stream: str) -> OperatorError:
    return OperatorError(
        f"the account may not keep the record of the stream {stream}, which a rewound consumer "
        "needs",
        fix="let the user run WATCH, XINFO, HMGET, HSET, UNLINK and XGROUP on the stream and on "
        f"the key {record_key(stream)}",
        kind="needs_rights",
    )
