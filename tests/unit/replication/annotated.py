"""Annotations as a client writes them, and as the rows of a batch carry them."""

from __future__ import annotations

from cdc.replication.wire.sealed import Sealed
from tests import pgoutput

SET, CLEAR = "walbrook:transaction_annotations.set", "walbrook:transaction_annotations.clear"


def set_annotation(text: bytes, *, transactional: bool = True) -> bytes:
    return pgoutput.logical_message(SET, text, transactional=transactional, lsn=50)


def clear_annotation() -> bytes:
    return pgoutput.logical_message(CLEAR, b"")


def carried(sealed: Sealed) -> list[bytes | None]:
    """What each row of a batch carries."""
    texts: list[bytes | None] = [None] * sealed.raw.num_rows
    for start, stop, text in sealed.annotations:
        assert start < stop
        assert texts[start:stop] == [None] * (stop - start), "runs never overlap"
        texts[start:stop] = [text] * (stop - start)
    return texts
