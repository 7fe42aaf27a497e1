"""The messages in a folder of Parquet files as the rows that they left, by whole columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from cdc.backfill.table import PublishedTable
from cdc.verify.held import Key, key_text, messages_held, normal_keys

_COLUMNS: Final = (
    "action", "record", "record_pks", "old_record_pks", "unchanged", "commit_lsn", "commit_idx",
)  # fmt: skip
_ROWS: Final = ("insert", "update", "read", "delete")
_BATCH_ROWS: Final = 20_000


def held_in_files(
    root: Path, partition_by: Sequence[str], table: PublishedTable, keys: Collection[Key] | None
) -> Iterator[pa.RecordBatch]:
    """What the files say of a table; the folder may not be there yet."""
    if not root.is_dir():
        return
    levels = pa.schema([pa.field(name, pa.string()) for name in partition_by])
    files = ds.dataset(root, format="parquet", partitioning=ds.partitioning(levels, flavor="hive"))
    if not files.files:
        return
    mine = (ds.field("table_schema") == table.name.schema) & (
        ds.field("table_name") == table.name.table
    )
    wanted = None if keys is None else pa.array([key_text(key) for key in keys], pa.string())
    for batch in files.to_batches(
        columns=list(_COLUMNS), filter=mine, batch_size=_BATCH_ROWS, batch_readahead=1,
        fragment_readahead=1,
    ):  # fmt: skip
        if batch.num_rows:
            yield _held(batch, wanted)


def _held(batch: pa.RecordBatch, wanted: pa.StringArray | None) -> pa.RecordBatch:
    action = batch.column("action")
    rows = batch.filter(pc.is_in(action, value_set=pa.array(_ROWS)))
    gone = pc.equal(rows.column("action"), "delete")
    content = pc.if_else(gone, None, rows.column("record").cast(pa.binary()))
    parts = [_part(rows, normal_keys(rows.column("record_pks")), content, rows.column("unchanged"))]
    moved = rows.filter(rows.column("old_record_pks").is_valid())
    if moved.num_rows:
        parts.append(_part(moved, normal_keys(moved.column("old_record_pks"))))
    found = pa.concat_batches(parts)
    if wanted is not None:
        found = found.filter(pc.is_in(found.column("key"), value_set=wanted))
    emptied = batch.filter(pc.equal(action, "truncate"))
    if emptied.num_rows:
        found = pa.concat_batches([found, _part(emptied, pa.nulls(emptied.num_rows, pa.string()))])
    return found


def _part(
    rows: pa.RecordBatch,
    keys: pa.StringArray,
    content: pa.BinaryArray | None = None,
    unchanged: pa.StringArray | None = None,
) -> pa.RecordBatch:
    places = (rows.column("commit_lsn"), rows.column("commit_idx"))
    return messages_held(keys, places, content, unchanged)
