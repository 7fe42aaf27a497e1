"""The file of a chunk: its rows as messages of the log, and decoded for the consumer they go to.

The process that reads a chunk decodes it too, column by column, from the text of COPY. So whoever
delivers the rows cuts slices out of a mapped file. The messages stand beside the decoded columns:
what needs them (a merged row, an expression, a dead letter) is rare, and what is not read of a
mapped file costs nothing.

Invariants: the file is whole and on disk when ``chunk_file`` ends. Its decoded columns are those
that decoding its messages gives. Rows with a value that cannot be decoded are decoded again from
their messages, once their cursors are known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.backfill.copy_rows import columns_of, lines_of, raw_rows
from cdc.backfill.table import PublishedTable
from cdc.change import READ
from cdc.decoding.columns import TextColumn
from cdc.decoding.format import OLD_ROW_TEXT, ROW_TEXT, TABLE_VERSION, Wanted
from cdc.decoding.joins import repeated
from cdc.decoding.plan import plan_for
from cdc.decoding.raw import RAW_SCHEMA, SCHEMAS_KEY, decode_schemas, encode_schemas
from cdc.decoding.rows import decode_columns

_WANTED_KEY: Final = b"walbrook.wanted"
# What a read says beside its values: the same of all rows, or where they stand.
_TOLD: Final = {
    "commit_lsn", "commit_idx", "commit_timestamp", "xid", "table_schema", "table_name", "action",
    "changes", "old_record_pks", "unchanged", "annotations", OLD_ROW_TEXT, TABLE_VERSION,
}  # fmt: skip
_FAULTY: Final = "error"

Write = Callable[[pa.RecordBatch], None]


@contextmanager
def chunk_file(path: Path, table: PublishedTable, wanted: Wanted | None = None) -> Iterator[Write]:
    """Write a chunk's rows: RAW_SCHEMA, and what ``decoded_rows`` adds if they are ``wanted``."""
    metadata = {SCHEMAS_KEY: encode_schemas({table.schema_id: table.message})}
    if wanted is not None:
        metadata[_WANTED_KEY] = wanted.to_text().encode()
    schema = pa.schema([*RAW_SCHEMA, *_stored(wanted)], metadata)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        yield writer.write_batch
    for place in (path, path.parent):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rows_of(
    text: bytes, table: PublishedTable, read_us: int, wanted: Wanted | None
) -> pa.RecordBatch:
    """Whole lines of COPY text as rows of the file."""
    columns = columns_of(text, len(table.columns))
    raw = raw_rows(columns, oid=table.relation.oid, schema_id=table.schema_id, read_us=read_us)
    if wanted is None:
        return raw
    plan = plan_for(table.message)
    count = raw.num_rows
    # The text of a row is what COPY wrote, unless the database keeps another encoding.
    lines = lines_of(text) if wanted.texts and not plan.relation.codec else None
    decoded = decode_columns(
        plan, [TextColumn(column) for column in columns], count,
        wanted if lines is None else wanted.without_texts(),
    )  # fmt: skip
    found = dict(decoded.columns)
    if lines is not None:
        found[ROW_TEXT] = lines
    if decoded.faults.by_row:
        faulty = ["" if at in decoded.faults.by_row else None for at in range(count)]
        found[_FAULTY] = pa.array(faulty, pa.string())
    stored = _stored(wanted)
    arrays = [_or_nulls(found.get(field.name), count) for field in stored]
    return pa.RecordBatch.from_arrays(
        [*raw.columns, *arrays], schema=pa.schema([*RAW_SCHEMA, *stored])
    )


class ChunkFile:
    """The rows of a chunk, mapped."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as file:
            self._reader = pa.ipc.open_file(file.read_buffer())
        metadata = self._reader.schema.metadata
        self.schemas: Mapping[int, bytes] = decode_schemas(metadata[SCHEMAS_KEY])
        wanted = metadata.get(_WANTED_KEY)
        self._wanted = None if wanted is None else Wanted.from_text(wanted.decode())
        sizes = [
            self._reader.get_batch(at).num_rows for at in range(self._reader.num_record_batches)
        ]
        self._ends = np.cumsum(sizes)

    @property
    def oid(self) -> int:
        """Of the table as its changes name it."""
        (message,) = self.schemas.values()
        return int.from_bytes(message[1:5], "big")

    def together(self, start: int) -> int:
        """How many rows from ``start`` on lie in one piece."""
        at = int(np.searchsorted(self._ends, start, side="right"))
        return int(self._ends[at]) - start

    def stored(self, start: int, count: int) -> StoredRows:
        """The rows ``[start, start + count)``; without a copy if they lie in one piece."""
        parts = []
        at = int(np.searchsorted(self._ends, start, side="right"))
        while count > 0 and at < len(self._ends):
            batch = self._reader.get_batch(at)
            within = start - (int(self._ends[at]) - batch.num_rows)
            part = batch.slice(within, count)
            parts.append(part)
            start, count, at = start + part.num_rows, count - part.num_rows, at + 1
        whole = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        return StoredRows(whole, self.schemas, self._wanted)

    def rows(self, start: int, count: int) -> pa.RecordBatch:
        """The messages alone of rows (RAW_SCHEMA)."""
        return self.stored(start, count).raw


class StoredRows:
    """Some rows of a chunk's file."""

    def __init__(
        self, rows: pa.RecordBatch, schemas: Mapping[int, bytes], wanted: Wanted | None
    ) -> None:
        self._rows, self._schemas, self._wanted = rows, schemas, wanted

    @property
    def raw(self) -> pa.RecordBatch:
        return self._rows.select(RAW_SCHEMA.names).replace_schema_metadata(None)

    @property
    def keys(self) -> pa.StringArray | None:
        """The key of each row as changes write it; None if it has to be decoded."""
        return None if self._wanted is None else self._rows.column("record_pks")

    def decoded(self, wanted: Wanted) -> pa.RecordBatch | None:
        """The rows as decode gives them, at no cursor yet; None if they have to be decoded.

        So it is if they were decoded for something else, or if a value cannot be.
        """
        rows = self._rows
        if wanted != self._wanted or rows.column(_FAULTY).null_count < rows.num_rows:
            return None
        (message,) = self._schemas.values()
        plan, count = plan_for(message), rows.num_rows
        told = {
            "commit_lsn": rows.column("commit_lsn"),
            "commit_idx": rows.column("commit_idx"),
            "commit_timestamp": rows.column("commit_ts").view(pa.timestamp("us", tz="UTC")),
            "xid": rows.column("xid"),
            "table_schema": repeated(plan.relation.namespace, count),
            "table_name": repeated(plan.relation.name, count),
            "action": repeated(READ, count),
            TABLE_VERSION: repeated(plan.version, count),
        }
        arrays = [
            _or_nulls(told.get(field.name), count)
            if field.name in _TOLD
            else rows.column(field.name)
            for field in wanted.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=wanted.schema)


def _stored(wanted: Wanted | None) -> list[pa.Field]:
    """The decoded columns that the file has."""
    return [] if wanted is None else [each for each in wanted.schema if each.name not in _TOLD]


def _or_nulls(column: pa.Array | None, count: int) -> pa.Array:
    return pa.nulls(count, pa.string()) if column is None else column
