"""JSON objects and arrays out of columns, one a row, by string joins over whole columns.

Invariant: keys come in column order, a null is written ``null``, and a member that is
not there leaves nothing behind, no key and no comma.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cdc.decoding.columns import Mask, gather, offsets_of, only_where
from cdc.decoding.joins import joined, repeated
from cdc.decoding.types.form import JsonColumn


@dataclass(frozen=True)
class JsonMember:
    """A column in an object: its key with the colon, empty in an array."""

    key: str
    column: JsonColumn
    present: Mask | None = None  # None: in every row


def object_of(members: Sequence[JsonMember], count: int) -> pa.StringArray:
    """``{"key":value,…}`` for each of ``count`` rows."""
    if any(member.present is not None for member in members):
        return _sparse(members, count)
    return _dense("{", members, "}", count)


def array_of(columns: Iterable[JsonColumn], count: int) -> pa.StringArray:
    """``[value,…]`` for each of ``count`` rows."""
    return _dense("[", [JsonMember("", column) for column in columns], "]", count)


def names_where(names: Sequence[tuple[str, Mask]], count: int) -> pa.StringArray:
    """``["name",…]`` of the names that apply to a row, each JSON already; null where none does."""
    if not names:
        return pa.nulls(count, pa.string())
    pieces = [only_where(repeated("," + name, count), mask) for name, mask in names]
    lists = _without_first_comma("[", pieces, "]")
    some = names[0][1].copy()
    for _, mask in names[1:]:
        some |= mask
    return only_where(lists, some)


def _dense(opening: str, members: Sequence[JsonMember], closing: str, count: int) -> pa.StringArray:
    if not members:
        return repeated(opening + closing, count)
    pieces: list[str | pa.StringArray] = []
    glue = opening
    for member in members:
        column = member.column
        # What surrounds each value joins the constant text, unless a null must do without it.
        if column.values.null_count:
            pieces += (glue + member.key, column.whole())
            glue = ","
        else:
            pieces += (glue + member.key + column.opening, column.values)
            glue = column.closing + ","
    pieces.append(glue[:-1] + closing)
    return joined(*pieces, null="null")


def _sparse(members: Sequence[JsonMember], count: int) -> pa.StringArray:
    pieces = []
    for member in members:
        piece = joined("," + member.key, member.column.whole(), null="null")
        pieces.append(piece if member.present is None else only_where(piece, member.present))
    return _without_first_comma("{", pieces, "}")


def _without_first_comma(
    opening: str, pieces: Sequence[pa.StringArray], closing: str
) -> pa.StringArray:
    body = joined(*pieces, null="")
    bounds = offsets_of(body).astype(np.int64)
    starts = np.minimum(bounds[:-1] + 1, bounds[1:])
    rest = gather(body.buffers()[2], starts, bounds[1:]).view(pa.string())
    return joined(opening, rest, closing, null="")
