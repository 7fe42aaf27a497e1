"""Current rows without reading the older ones: deletes by key, and the rows that take their place.

Only rows whose update did not send all values are looked for in the table, to keep those values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cdc.cursor_columns import cursor_at
from cdc.failpoints import reached
from sinks.lakehouse.files import in_schema
from sinks.lakehouse.iceberg.table import IcebergTable
from sinks.lakehouse.merging import KeyIndex, Touched, touched
from sinks.lakehouse.table import DataFile, LakeTable, TableState
from sinks.lakehouse.writing import Merges, refuse_without_key
from sinks.tables.typed import plan_of
from sinks.tables.versions import key_names


class MergesOnRead(Merges):
    """A row per key: what is there under a touched key is deleted, by a file that names the key."""

    def write(
        self, table: LakeTable, state: TableState, rows: pa.RecordBatch, version: str
    ) -> None:
        assert isinstance(table, IcebergTable)
        relation = plan_of(version).relation
        refuse_without_key(relation)
        after = state.moved(cursor_at(rows, -1))
        changes = touched(rows, version, key_names(relation))
        changes = changes.in_columns(in_schema(changes.rows, table.schema, table.place))
        if changes.truncated:
            added = table.write(changes.rows) if changes.rows.num_rows else []
            reached("written")
            table.replace(added, table.schema, after)
            return
        files = table.held_files()
        whole = _with_kept_values(table, files, changes)
        names = changes.keys.column_names
        keys = _known(pa.concat_tables([changes.keys, whole.select(names)]), files)
        added = table.write(whole) if whole.num_rows else []
        reached("written")
        table.upsert(added, keys, after)


def _with_kept_values(table: IcebergTable, files: Sequence[DataFile], changes: Touched) -> pa.Table:
    """The rows to add, with the values that their updates did not send as the table has them."""
    if not changes.kept:
        return changes.rows
    concerned = np.logical_or.reduce(list(changes.kept.values()))
    of_keys = np.flatnonzero((changes.becomes >= 0) & concerned[np.maximum(changes.becomes, 0)])
    keys = changes.keys.take(pa.array(of_keys))
    index = KeyIndex(keys)
    there = np.full(changes.rows.num_rows, -1, np.int64)  # where the older row of each is found
    older: list[pa.Table] = []
    count = 0
    for file in files:
        if not index.may_touch(file):
            continue
        found = index.find(table.read(file, keys.column_names))
        at = np.flatnonzero(found >= 0)
        if not len(at):
            continue
        older.append(table.read(file).take(pa.array(at)))
        there[changes.becomes[of_keys[found[at]]]] = count + np.arange(len(at))
        count += len(at)
    if not older:
        return changes.rows
    both = pa.concat_tables([changes.rows, *older])
    columns = []
    for field in changes.rows.schema:
        kept = changes.kept.get(field.name)
        if kept is None:
            columns.append(changes.rows.column(field.name))
            continue
        size = changes.rows.num_rows
        chosen = np.where(kept & (there >= 0), size + there, np.arange(size))
        columns.append(both.column(field.name).take(pa.array(chosen)))
    return pa.Table.from_arrays(columns, schema=changes.rows.schema)


def _known(keys: pa.Table, files: Sequence[DataFile]) -> pa.Table:
    """Those of the keys that a file may have, each once: new rows need no deletes."""
    if not files or not keys.num_rows:
        return keys.slice(0, 0)
    name = keys.column_names[0]
    bounds = [file.bounds.get(name) for file in files]
    first = keys.column(name)
    is_integer, is_text = pa.types.is_integer(first.type), pa.types.is_string(first.type)
    if any(each is None for each in bounds) or not (is_integer or is_text):
        return _unique(keys)
    # Of the files that begin at or below a key, the one that reaches highest decides.
    ranges = sorted(set(filter(None, bounds)))
    kind = np.int64 if is_integer else object
    lows = np.array([low for low, _ in ranges], kind)
    highs = np.maximum.accumulate(np.array([high for _, high in ranges], kind))
    values = first.to_numpy().astype(kind)
    at = np.searchsorted(lows, values, side="right") - 1
    may_be = (at >= 0) & (highs[np.maximum(at, 0)] >= values)
    return _unique(keys.filter(pa.array(may_be.astype(bool))))


def _unique(keys: pa.Table) -> pa.Table:
    return keys.group_by(keys.column_names).aggregate([])
