"""Parquet files of the tables of a lake, on a disk or in an object store.

Invariant: what ``write`` returned the size of is durable: on a disk it is synced with the names of
its folders, an object store has acknowledged it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from cdc.errors import OperatorError
from sinks.directory import make_directories, sync_directory, write_synced

_ROW_GROUP_ROWS = 131_072


class LakeFiles(Protocol):
    """The files below the folder of one table."""

    def write(self, path: str, rows: pa.Table) -> int:
        """Returns how many bytes the file has."""
        ...

    def read(self, path: str, columns: Sequence[str] | None) -> pa.Table: ...

    def sync(self, paths: Sequence[str]) -> None:
        """Make files durable that others have written."""
        ...


def encode(rows: pa.Table, out: pa.NativeFile, compression: str = "zstd") -> None:
    """Write rows as a Parquet file."""
    pq.write_table(rows, out, compression=compression, row_group_size=_ROW_GROUP_ROWS)


class DiskFiles:
    """Files on a disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, path: str, rows: pa.Table) -> int:
        place, out = self._folder / path, pa.BufferOutputStream()
        encode(rows, out)
        data = memoryview(out.getvalue())
        make_directories(place.parent)
        write_synced(place, data)
        sync_directory(place.parent)
        return len(data)

    def read(self, path: str, columns: Sequence[str] | None) -> pa.Table:
        with pa.memory_map(str(self._folder / path)) as opened:
            return read_columns(opened, columns)

    def sync(self, paths: Sequence[str]) -> None:
        for path in paths:
            descriptor = os.open(self._folder / path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        for folder in {(self._folder / path).parent for path in paths}:
            sync_directory(folder)


class StoreFiles:
    """Files in an object store, which has them whole or not at all."""

    def __init__(self, store: pafs.FileSystem) -> None:
        self._store = store

    def write(self, path: str, rows: pa.Table) -> int:
        with self._store.open_output_stream(path) as out:
            encode(rows, out)
            return int(out.tell())

    def read(self, path: str, columns: Sequence[str] | None) -> pa.Table:
        with self._store.open_input_file(path) as opened:
            return read_columns(opened, columns)

    def sync(self, paths: Sequence[str]) -> None:
        """Nothing is left to do."""


def read_columns(opened: pa.NativeFile, columns: Sequence[str] | None) -> pa.Table:
    """Those of the columns that a Parquet file has; all of them if none are named."""
    file = pq.ParquetFile(opened)
    there = file.schema_arrow.names
    chosen = there if columns is None else [name for name in columns if name in there]
    return file.read(chosen)


def in_schema(rows: pa.Table, schema: pa.Schema, table: str) -> pa.Table:
    """The rows of a file in its table's types; a column that the file lacks is null.

    Others who rewrite files (OPTIMIZE) may write the same values in another physical type.
    """
    columns = []
    for field in schema:
        if field.name not in rows.column_names:
            columns.append(pa.nulls(rows.num_rows, field.type))
            continue
        try:
            columns.append(rows.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            raise OperatorError(
                f"column {field.name} of {table} is {rows.column(field.name).type} in a file, and "
                f"{field.type} in the table",
                fix="repair the table with the tool that wrote the file",
                detail=str(error),
            ) from None
    return pa.Table.from_arrays(columns, schema=schema)
