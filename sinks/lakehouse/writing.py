"""What the modes do with the rows of one table: add them to its history, or merge them by key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from cdc.cursor_columns import cursor_at
from cdc.decoding.relation import Relation
from cdc.errors import OperatorError
from cdc.failpoints import reached
from sinks.lakehouse.appending import history_rows
from sinks.lakehouse.columns import OWN, refuse_own_names, source_columns
from sinks.lakehouse.files import in_schema
from sinks.lakehouse.merging import KeyIndex, Positions, merge_file, new_rows, touched
from sinks.lakehouse.table import DataFile, LakeTable, TableState
from sinks.tables.typed import plan_of
from sinks.tables.versions import is_row_identity, key_names

_ROWS_ALONE: Final = 40_000  # so many and more are worth a file of their own
_FILES_AT_ONCE_MAX: Final = 4

_GAPS: Final = pa.schema(
    [
        pa.field("commit_lsn", pa.int64()),
        pa.field("commit_idx", pa.int64()),
        pa.field("gap", pa.string()),
        pa.field("noted_at", pa.timestamp("us", tz="UTC")),
    ]
)


class Writes(Protocol):
    """A mode."""

    @property
    def keeps(self) -> bool:
        """Whether its tables keep columns that the source has dropped."""
        ...

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns that its tables are partitioned by."""
        ...

    def layout(self, version: str) -> pa.Schema:
        """The columns of a table that is to be made for this version."""
        ...

    def write(
        self, table: LakeTable, state: TableState, rows: pa.RecordBatch, version: str
    ) -> None:
        """Commit changes of this version, which the table has the columns of."""
        ...


class Appends:
    """Every change is a row."""

    keeps = True

    def __init__(self, partition_by: Sequence[str]) -> None:
        self.partition_by: tuple[str, ...] = tuple(partition_by)

    def layout(self, version: str) -> pa.Schema:
        refuse_own_names(plan_of(version).relation)
        return pa.schema([*OWN, *source_columns(version)])

    def write(
        self, table: LakeTable, state: TableState, rows: pa.RecordBatch, version: str
    ) -> None:
        after = state.moved(cursor_at(rows, -1))
        # A schema change has altered the table, and is no change of a row.
        rows = rows.filter(pc.not_equal(rows.column("action"), "schema_change"))
        added = _written(table, rows, version) if rows.num_rows else []
        reached("written")
        table.commit(added, [], after)


def _written(table: LakeTable, rows: pa.RecordBatch, version: str) -> list[DataFile]:
    """Files with the changes; those of many changes are made side by side."""
    count = min(os.cpu_count() or 1, _FILES_AT_ONCE_MAX, max(1, rows.num_rows // _ROWS_ALONE))
    step = -(-rows.num_rows // count)
    pieces = [rows.slice(start, step) for start in range(0, rows.num_rows, step)]

    def write(piece: pa.RecordBatch) -> list[DataFile]:
        return table.write(history_rows(piece, version, table.schema))

    if len(pieces) == 1:
        return write(rows)
    with ThreadPoolExecutor(len(pieces), thread_name_prefix="files") as pool:
        return [file for files in pool.map(write, pieces) for file in files]


class Merges:
    """A row per key: the files that hold a touched key are rewritten."""

    keeps = False
    partition_by: tuple[str, ...] = ()

    def layout(self, version: str) -> pa.Schema:
        refuse_without_key(plan_of(version).relation)
        return source_columns(version)

    def write(
        self, table: LakeTable, state: TableState, rows: pa.RecordBatch, version: str
    ) -> None:
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
        added, removed = [], []
        written: list[Positions] = []
        index = KeyIndex(changes.keys)
        for file in table.files():
            if not index.may_touch(file):
                continue
            found = index.find(table.read(file, changes.keys.column_names))
            if not (found >= 0).any():
                continue
            merged = merge_file(table.read(file), found, changes)
            removed.append(file)
            written.append(merged.written)
            added += table.write(merged.rows) if merged.rows.num_rows else []
        fresh = new_rows(changes, written)
        added += table.write(fresh) if fresh.num_rows else []
        reached("written")
        table.commit(added, removed, after)


def refuse_without_key(relation: Relation) -> None:
    """Rows are merged by key."""
    if not relation.key or is_row_identity(relation):
        raise OperatorError(
            f"{relation} has no key by which its rows could be merged",
            fix="give it a primary key, leave it out with source.exclude_tables, or use mode: "
            "append",
        )


def gap_rows(rows: pa.RecordBatch) -> pa.Table:
    """Gaps as rows of the table that notes them."""
    now = pa.scalar(datetime.now(UTC), _GAPS.field("noted_at").type)
    columns = [
        rows.column("commit_lsn"), rows.column("commit_idx"), rows.column("record"),
        pa.repeat(now, rows.num_rows),
    ]  # fmt: skip
    return pa.Table.from_arrays(columns, schema=_GAPS)
