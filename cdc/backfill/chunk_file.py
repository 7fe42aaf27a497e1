"""The file of a chunk: its rows as COPY wrote them, and decoded for the consumer they go to.

The process that reads a chunk decodes it too, column by column, from the text of COPY. So the
delivery of the rows cuts slices out of a mapped file. The lines of COPY stand beside the decoded
columns, or are one of them (``row_text``); where messages are needed (a merged row, an expression,
a dead letter), which is rare, they are made of the lines. Rows that no consumer wants decoded stand
in the file as messages.

Invariants: the file is whole and on disk when ``chunk_file`` ends. Its decoded columns are those
that decoding its messages gives. Rows with a value that cannot be decoded are decoded again from
their messages, once their cursors are known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.backfill.copy_rows import CopiedRows, columns_of, raw_rows
from cdc.backfill.table import PublishedTable
from cdc.change import READ
from cdc.decoding.columns import TextColumn, bytes_of
from cdc.decoding.format import OLD_ROW_TEXT, ROW_TEXT, TABLE_VERSION, Wanted
from cdc.decoding.joins import joined, repeated
from cdc.decoding.plan import TablePlan, plan_for
from cdc.decoding.raw import RAW_SCHEMA, SCHEMAS_KEY, decode_schemas, encode_schemas
from cdc.decoding.rows import decode_columns

_WANTED_KEY: Final = b"walbrook.wanted"
_READ_KEY: Final = b"walbrook.read_us"
# What a read says beside its values: the same of all rows, or where they stand.
_SAID_ONCE: Final = {
    "commit_lsn", "commit_idx", "commit_timestamp", "xid", "table_schema", "table_name", "action",
    "changes", "old_record_pks", "unchanged", "annotations", OLD_ROW_TEXT, TABLE_VERSION,
}  # fmt: skip
_FAULTY: Final = "error"
_LINE: Final = pa.field("line", pa.binary())  # null where the text of the row is the line

Write = Callable[[pa.RecordBatch], None]


@contextmanager
def chunk_file(
    path: Path, table: PublishedTable, wanted: Wanted | None = None, read_us: int = 0
) -> Iterator[Write]:
    """Write a chunk's rows: what ``rows_of`` gives of them, or messages if nothing is wanted."""
    metadata = {SCHEMAS_KEY: encode_schemas({table.schema_id: table.message})}
    schema = RAW_SCHEMA
    if wanted is not None:
        schema = _schema(wanted)
        metadata[_WANTED_KEY] = wanted.to_text().encode()
        metadata[_READ_KEY] = str(read_us).encode()
    schema = schema.with_metadata(metadata)
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
    if wanted is None:
        columns = columns_of(text, len(table.columns))
        oid = table.relation.oid
        return raw_rows(columns, oid=oid, schema_id=table.schema_id, read_us=read_us)
    plan, copied = plan_for(table.message), CopiedRows(text, len(table.columns))
    count = len(copied)
    # The text of a row is what COPY wrote, unless the database keeps another encoding.
    texts = copied.texts() if wanted.texts and not plan.relation.codec else None
    decoded = decode_columns(
        plan, [TextColumn(column) for column in _needed(copied, plan, wanted, texts)], count,
        wanted if texts is None else wanted.without_texts(),
    )  # fmt: skip
    found = dict(decoded.columns)
    if texts is None:
        found[_LINE.name] = copied.lines()
    else:
        found[ROW_TEXT] = texts
    if decoded.faults.by_row:
        faulty = ["" if at in decoded.faults.by_row else None for at in range(count)]
        found[_FAULTY] = pa.array(faulty, pa.string())
    schema = _schema(wanted)
    arrays = [_or_nulls(found.get(field.name), count, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _needed(
    copied: CopiedRows, plan: TablePlan, wanted: Wanted, texts: pa.StringArray | None
) -> list[pa.BinaryArray]:
    """The columns that are decoded; nulls in place of those that nothing is made of."""
    every = texts is None or bool(wanted.formats)
    named = {plan.names[at] for at in plan.relation.key} | {*wanted.times}
    none = pa.nulls(len(copied), pa.binary())
    return [
        copied.column(at) if every or name in named else none for at, name in enumerate(plan.names)
    ]


class ChunkFile:
    """The rows of a chunk, mapped."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as file:
            self._reader = pa.ipc.open_file(file.read_buffer())
        metadata = self._reader.schema.metadata
        self.schemas: Mapping[int, bytes] = decode_schemas(metadata[SCHEMAS_KEY])
        wanted = metadata.get(_WANTED_KEY)
        self._wanted = None if wanted is None else Wanted.from_text(wanted.decode())
        self._read_us = int(metadata.get(_READ_KEY, b"0"))
        batches = [*map(self._reader.get_batch, range(self._reader.num_record_batches))]
        self._ends = np.cumsum([batch.num_rows for batch in batches])
        self._bytes = np.cumsum([batch.nbytes for batch in batches])

    @property
    def oid(self) -> int:
        """Of the table as its changes name it."""
        (message,) = self.schemas.values()
        return int.from_bytes(message[1:5], "big")

    def within(self, start: int, bytes_max: int) -> int:
        """How many rows from ``start`` on take about so many bytes together; at least one."""
        at = int(np.searchsorted(self._ends, start, side="right"))
        before = int(self._bytes[at - 1]) if at else 0
        end = int(np.searchsorted(self._bytes, before + bytes_max, side="right"))
        return int(self._ends[max(at, end - 1)]) - start

    def stored(self, start: int, count: int) -> StoredRows:
        """The rows ``[start, start + count)``, without a copy."""
        parts = []
        at = int(np.searchsorted(self._ends, start, side="right"))
        while count > 0 and at < len(self._ends):
            batch = self._reader.get_batch(at)
            within = start - (int(self._ends[at]) - batch.num_rows)
            part = batch.slice(within, count)
            parts.append(part)
            start, count, at = start + part.num_rows, count - part.num_rows, at + 1
        return StoredRows(parts, self.schemas, self._wanted, self._read_us)

    def rows(self, start: int, count: int) -> pa.RecordBatch:
        """The messages alone of rows (RAW_SCHEMA)."""
        return self.stored(start, count).raw


class StoredRows:
    """Some rows of a chunk's file, in parts: those that were read together."""

    def __init__(
        self,
        parts: Sequence[pa.RecordBatch],
        schemas: Mapping[int, bytes],
        wanted: Wanted | None,
        read_us: int,
    ) -> None:
        self._parts, self._schemas = parts, schemas
        self._wanted, self._read_us = wanted, read_us

    def __len__(self) -> int:
        return sum(int(part.num_rows) for part in self._parts)

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in self._parts)

    @cached_property
    def raw(self) -> pa.RecordBatch:
        """The rows as messages (RAW_SCHEMA), made when they are needed."""
        parts = self._parts
        if self._wanted is None:
            return pa.concat_batches(part.replace_schema_metadata(None) for part in parts)
        ((schema_id, message),) = self._schemas.items()
        relation = plan_for(message).relation
        text = b"".join(bytes_of(_lines(part)).data for part in parts)
        columns = columns_of(text, len(relation.columns))
        return raw_rows(columns, oid=relation.oid, schema_id=schema_id, read_us=self._read_us)

    @property
    def keys(self) -> pa.StringArray | None:
        """The key of each row as changes write it; None if it has to be decoded."""
        if self._wanted is None:
            return None
        return pa.concat_arrays([part.column("record_pks") for part in self._parts])

    def decoded(self, wanted: Wanted) -> list[pa.RecordBatch] | None:
        """The rows as decode gives them, at no cursor yet, in parts; None: they are not decoded.

        So it is if they were decoded for something else, or if a value cannot be.
        """
        faulty = (part.column(_FAULTY).null_count < part.num_rows for part in self._parts)
        if wanted != self._wanted or any(faulty):
            return None
        most = max((int(part.num_rows) for part in self._parts), default=0)
        given = self._said_once(most)
        return [
            pa.RecordBatch.from_arrays(
                [
                    given[field.name].slice(0, part.num_rows)
                    if field.name in _SAID_ONCE
                    else part.column(field.name)
                    for field in wanted.schema
                ],
                schema=wanted.schema,
            )
            for part in self._parts
        ]

    def _said_once(self, count: int) -> dict[str, pa.Array]:
        """What a read says beside its values, which all parts share."""
        (message,) = self._schemas.values()
        plan, zeros = plan_for(message), pa.array(np.zeros(count, np.int64))
        read_at = pa.array(np.full(count, self._read_us, np.int64))
        return {
            **dict.fromkeys(_SAID_ONCE, pa.nulls(count, pa.string())),
            "commit_lsn": zeros,
            "commit_idx": zeros,
            "commit_timestamp": read_at.view(pa.timestamp("us", tz="UTC")),
            "xid": zeros,
            "table_schema": repeated(plan.relation.namespace, count),
            "table_name": repeated(plan.relation.name, count),
            "action": repeated(READ, count),
            TABLE_VERSION: repeated(plan.version, count),
        }


def _lines(rows: pa.RecordBatch) -> pa.BinaryArray | pa.StringArray:
    """The lines of COPY, which may stand there as the texts of the rows."""
    lines = rows.column(_LINE.name)
    return joined(rows.column(ROW_TEXT), "\n") if lines.null_count else lines


def _schema(wanted: Wanted) -> pa.Schema:
    """The lines, and the decoded columns that the file has."""
    return pa.schema([_LINE, *(each for each in wanted.schema if each.name not in _SAID_ONCE)])


def _or_nulls(column: pa.Array | None, count: int, kind: pa.DataType) -> pa.Array:
    return pa.nulls(count, kind) if column is None else column
