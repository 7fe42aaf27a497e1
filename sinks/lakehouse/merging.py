"""What the last change per key makes of the files of a table. Pure, whole columns.

Invariants: a file without a touched key is left alone; rows of a file keep their order; a value
that the source did not send stays what the row has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.decoding.format import OLD_ROW_TEXT, ROW_TEXT
from sinks.lakehouse.table import DataFile
from sinks.tables.fold import fold, is_move
from sinks.tables.typed import typed_rows

Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Touched:
    """Rows of the table by key, and what becomes of each.

    ``becomes`` is for each of ``keys`` a position in ``rows``, -1 for a row that goes. ``kept``
    says per column which of ``rows`` leave it as it is.
    """

    truncated: bool
    keys: pa.Table
    becomes: Positions
    rows: pa.Table
    kept: dict[str, Mask]

    def in_columns(self, rows: pa.Table) -> Touched:
        """The same with the rows in the columns of the table."""
        return replace(self, rows=rows)


def touched(rows: pa.RecordBatch, version: str, key: Sequence[str]) -> Touched:
    """What is left to do of the changes of one table version, as ``stretches`` gives them."""
    if is_move(rows):
        # Neighbours, each of another key: a row is looked for by the key that it had. What stands
        # under its new key has gone at the source, and its delete was lost with a slot.
        new = typed_rows(rows.column(ROW_TEXT), version)
        old = typed_rows(rows.column(OLD_ROW_TEXT), version).select(key)
        kept = _kept(rows.column("unchanged"), new.num_rows)
        count = new.num_rows
        becomes = np.concatenate([np.arange(count), np.full(count, -1)]).astype(np.int64)
        return Touched(False, pa.concat_tables([old, new.select(key)]), becomes, new, kept)
    folded = fold(rows)
    gone = typed_rows(folded.deletes, version).select(key)
    new = typed_rows(folded.upserts, version)
    keys = pa.concat_tables([gone, new.select(key)])
    becomes = np.concatenate([np.full(gone.num_rows, -1), np.arange(new.num_rows)])
    kept = _kept(folded.kept, new.num_rows)
    return Touched(folded.truncated, keys, becomes.astype(np.int64), new, kept)


def _kept(texts: pa.StringArray, count: int) -> dict[str, Mask]:
    if texts.null_count == count:
        return {}
    encoded = pc.dictionary_encode(texts, null_encoding="encode")
    sets = [set(orjson.loads(text)) if text else set() for text in encoded.dictionary.to_pylist()]
    indices = encoded.indices.to_numpy()
    return {
        name: np.array([name in one for one in sets])[indices]
        for name in sorted(set().union(*sets))
    }


class KeyIndex:
    """Looks up rows of a table among the touched keys."""

    def __init__(self, keys: pa.Table) -> None:
        self._names = keys.column_names
        self._is_empty = not keys.num_rows
        self._dictionaries: list[pa.Array] = []
        codes = np.zeros(keys.num_rows, np.int64)
        self._combined: list[NDArray[np.int64]] = []
        for at, column in enumerate(keys.columns):
            encoded = pc.dictionary_encode(column.combine_chunks())
            self._dictionaries.append(encoded.dictionary)
            indices = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            if at:
                # Renumbered after every column, so that the product of their counts stays small.
                combined = codes * len(encoded.dictionary) + indices
                found, codes = np.unique(combined, return_inverse=True)
                self._combined.append(found)
            else:
                codes = indices
        self._position = np.full(int(codes.max(initial=0)) + 1, -1, np.int64)
        self._position[codes] = np.arange(len(codes))
        self._first = np.sort(self._dictionaries[0].to_numpy(zero_copy_only=False))

    def find(self, keys: pa.Table) -> Positions:
        """For each row of ``keys`` the position of the touched key, -1 for none."""
        if self._is_empty:
            return np.full(keys.num_rows, -1, np.int64)
        codes = np.zeros(keys.num_rows, np.int64)
        known = np.ones(keys.num_rows, bool)
        for at, name in enumerate(self._names):
            column, dictionary = keys.column(name), self._dictionaries[at]
            indices = pc.fill_null(pc.index_in(column, value_set=dictionary), -1)
            found = indices.to_numpy().astype(np.int64)
            known &= found >= 0
            if not at:
                codes = found
                continue
            combined = codes * len(dictionary) + found
            there = self._combined[at - 1]
            codes = np.minimum(np.searchsorted(there, combined), len(there) - 1)
            known &= there[codes] == combined
        return np.where(known, self._position[np.where(known, codes, 0)], -1)

    def may_touch(self, file: DataFile) -> bool:
        """Whether the bounds of a file leave room for a touched key."""
        if self._is_empty:
            return False
        lowest, highest = file.bounds.get(self._names[0], (None, None))
        comparable = int if np.issubdtype(self._first.dtype, np.integer) else str
        if not isinstance(lowest, comparable) or not isinstance(highest, comparable):
            return True
        if comparable is str and not isinstance(self._first[0], str):
            return True
        at = int(np.searchsorted(self._first, np.array(lowest, self._first.dtype)))
        return at < len(self._first) and bool(self._first[at] <= highest)


@dataclass(frozen=True)
class MergedFile:
    """What becomes of the rows of a file, and which of the new rows are in it."""

    rows: pa.Table
    written: Positions


def merge_file(old: pa.Table, found: Positions, changes: Touched) -> MergedFile:
    """The rows of a file with the changes made.

    ``found`` is what ``KeyIndex.find`` said of its keys, of which it found some.
    """
    touches = found >= 0
    becomes = np.where(touches, changes.becomes[np.where(touches, found, 0)], -1)
    stays = ~touches | (becomes >= 0)
    replaced = becomes >= 0
    at_old = np.arange(old.num_rows)
    at_new = np.where(replaced, old.num_rows + becomes, at_old)[stays]
    columns = []
    for field in old.schema:
        at = at_new
        kept = changes.kept.get(field.name)
        if kept is not None:
            held = replaced & kept[np.where(replaced, becomes, 0)]
            at = np.where(held, at_old, np.where(replaced, old.num_rows + becomes, at_old))[stays]
        both = pa.chunked_array(
            [*old.column(field.name).chunks, *changes.rows.column(field.name).chunks], field.type
        )
        columns.append(both.take(pa.array(at)))
    return MergedFile(pa.Table.from_arrays(columns, schema=old.schema), becomes[replaced])


def new_rows(changes: Touched, written: Sequence[Positions]) -> pa.Table:
    """The rows that no file had."""
    left = np.ones(changes.rows.num_rows, bool)
    for some in written:
        left[some] = False
    return changes.rows.filter(pa.array(left))
