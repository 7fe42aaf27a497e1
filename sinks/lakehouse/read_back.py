"""The rows that a table of the lake holds, as they are or as its history left them.

Invariants: one file is in memory at a time; nothing is written. A table of current rows gives each
row once, a history gives each change with its place. With keys, only columns of the key are read
of a file without any of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.backfill.table import PublishedTable
from cdc.decoding.plan import TablePlan, plan_for
from cdc.errors import OperatorError
from cdc.verify.held import Key, key_text, messages_held, normal_keys, rows_held
from cdc.verify.typed_rows import key_texts, typed_contents, typed_keys
from sinks.lakehouse.files import in_schema
from sinks.lakehouse.merging import KeyIndex
from sinks.lakehouse.table import DataFile, LakeTable
from sinks.lakehouse.writing import refuse_without_key

_BATCH_ROWS: Final = 20_000
_OF_CHANGES: Final = (
    "walbrook_action", "walbrook_lsn", "walbrook_idx", "walbrook_old_key", "walbrook_unchanged",
)  # fmt: skip


def held_rows(
    table: LakeTable, source: PublishedTable, keys: Collection[Key] | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a table that has one per key."""
    reader = _TableReader(table, source, keys)
    for file in table.files():
        if reader.index is not None and not reader.index.may_touch(file):
            continue
        for rows in reader.read(file):
            yield rows_held(key_texts(reader.plan, rows, source.key), reader.contents(rows))


def held_history(
    table: LakeTable, source: PublishedTable, keys: Collection[Key] | None
) -> Iterator[pa.RecordBatch]:
    """The changes of a history, in no order."""
    reader = _TableReader(table, source, keys, more=_OF_CHANGES)
    for file in table.files():
        for rows in reader.read(file):
            yield _changes(reader, rows, source)


class _TableReader:
    """Reads the files of a table as it was when it was loaded."""

    def __init__(
        self,
        table: LakeTable,
        source: PublishedTable,
        keys: Collection[Key] | None,
        more: tuple[str, ...] = (),
    ) -> None:
        refuse_without_key(source.relation)
        self.plan: TablePlan = plan_for(source.message)
        self.wanted: pa.StringArray | None = None
        self.index: KeyIndex | None = None
        self._table, self._key = table, list(source.key)
        self._columns = [*more, *self.plan.names]
        lacking = [name for name in self.plan.names if name not in table.schema.names]
        if lacking:
            raise OperatorError(
                f"the table at {table.place} has no column {lacking[0]}, which {source.name} has",
                fix="deliver a change or a backfill of the table first: the column is added with "
                "it",
                kind="other_columns",
            )
        if keys is not None:
            listed = list(keys)
            self.wanted = pa.array([key_text(key) for key in listed], pa.string())
            schema = pa.schema([table.schema.field(name) for name in self._key])
            found = typed_keys(self.plan, listed, self._key)
            self.index = KeyIndex(in_schema(found, schema, table.place))

    def read(self, file: DataFile) -> Iterator[pa.Table]:
        """The rows of a file, those with one of the keys if there are any given."""
        if self.index is None:
            rows = self._table.read(file, self._columns)
        else:
            chosen = self._chosen(file, self.index)
            if not chosen.any():
                return
            rows = self._table.read(file, self._columns).filter(pa.array(chosen))
        for at in range(0, rows.num_rows, _BATCH_ROWS):
            yield rows.slice(at, _BATCH_ROWS)

    def contents(self, rows: pa.Table) -> pa.StringArray:
        return typed_contents(self.plan, rows.select(self.plan.names))

    def _chosen(self, file: DataFile, index: KeyIndex) -> np.ndarray:
        """Which rows have one of the keys, had one before, or empty the table."""
        of_history = len(self._columns) > len(self.plan.names)
        more = ["walbrook_action", "walbrook_old_key"] if of_history else []
        there = self._table.read(file, [*self._key, *more])
        chosen = index.find(there.select(self._key)) >= 0
        if of_history:
            left = pc.is_in(normal_keys(_whole(there, "walbrook_old_key")), value_set=self.wanted)
            emptied = pc.equal(there.column("walbrook_action"), "truncate")
            chosen |= left.to_numpy(zero_copy_only=False)
            chosen |= emptied.to_numpy()
        return chosen


def _changes(reader: _TableReader, rows: pa.Table, source: PublishedTable) -> pa.RecordBatch:
    action = _whole(rows, "walbrook_action")
    of_rows = rows.filter(pc.not_equal(action, "truncate"))
    gone = pc.equal(_whole(of_rows, "walbrook_action"), "delete")
    content = pc.if_else(gone, None, reader.contents(of_rows).cast(pa.binary()))
    keys = key_texts(reader.plan, of_rows, source.key)
    parts = [_part(of_rows, keys, content, _whole(of_rows, "walbrook_unchanged"))]
    moved = of_rows.filter(of_rows.column("walbrook_old_key").is_valid())
    if moved.num_rows:
        parts.append(_part(moved, normal_keys(_whole(moved, "walbrook_old_key"))))
    found = pa.concat_batches(parts)
    if reader.wanted is not None:
        found = found.filter(pc.is_in(found.column("key"), value_set=reader.wanted))
    emptied = rows.filter(pc.equal(action, "truncate"))
    if emptied.num_rows:
        found = pa.concat_batches([found, _part(emptied, pa.nulls(emptied.num_rows, pa.string()))])
    return found


def _part(
    rows: pa.Table,
    keys: pa.StringArray,
    content: pa.BinaryArray | None = None,
    unchanged: pa.StringArray | None = None,
) -> pa.RecordBatch:
    places = (_whole(rows, "walbrook_lsn"), _whole(rows, "walbrook_idx"))
    return messages_held(keys, places, content, unchanged)


def _whole(rows: pa.Table, name: str) -> pa.Array:
    return rows.column(name).combine_chunks()
