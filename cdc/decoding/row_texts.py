"""Rows with the texts that the source wrote, for sinks that have typed columns.

``row_text`` is a row as COPY reads it: the values of all columns of its table version in their
order, tabs between them, ``\\N`` for null and for what was not sent. ``old_row_text`` is the same
of the row before an update that changed its key. ``table_version`` is the Relation message, with
what the catalog said, as a text: a row says by itself which columns it has.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa

from cdc.decoding.copy_text import copied_text
from cdc.decoding.joins import joined, repeated
from cdc.decoding.relation import Relation, parse_relation

_VERSIONS_MAX = 4096
_SPECIAL = str.maketrans({"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"})
NULL = "\\N"


def lines_of(columns: Sequence[pa.StringArray], count: int) -> pa.StringArray:
    """The lines of ``count`` rows, without the line ends."""
    if not columns:
        return repeated("", count)
    parts: list[str | pa.StringArray] = []
    for column in columns:
        parts += [copied_text(column), "\t"]
    return joined(*parts[:-1], null=NULL)


def line_of(texts: Sequence[str | None]) -> str:
    """The line of one row."""
    return "\t".join(NULL if text is None else text.translate(_SPECIAL) for text in texts)


def version_text(message: bytes) -> str:
    """A Relation message as the log keeps it; compressed, because every row carries it."""
    return b64encode(zlib.compress(message, 9)).decode()


@lru_cache(maxsize=_VERSIONS_MAX)
def relation_of(text: str) -> Relation:
    """The table version that ``version_text`` wrote."""
    return parse_relation(message_of(text))


def message_of(text: str) -> bytes:
    """The Relation message that ``version_text`` wrote."""
    return zlib.decompress(b64decode(text))
