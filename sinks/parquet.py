"""A folder of Parquet files that query engines read as one partitioned table.

A batch becomes one file per partition. Files are staged whole under ``_walbrook/staging`` and
synced; then the position, which names them, is committed; then they are moved to their places.
Invariant: a file outside ``_walbrook`` is final, belongs to a committed position, and is never
changed by us, nor removed but by a truncation that an operator asked for; whatever a committed
position names is still staged or was put in its place, from where an operator may move it on
(compaction, archives).

A new generation is a folder of its own beside the first, ``<path>.generation-2``: a query over the
first one must not see it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from cdc.backfill.table import PublishedTable
from cdc.change import MESSAGE_SCHEMA, MessageBatch, origin
from cdc.cursor import ORIGIN, Cursor
from cdc.cursor_columns import prefix_at_or_below
from cdc.decoding.shapes import Parts
from cdc.errors import WalbrookError
from cdc.generation import FIRST, Generation
from cdc.verify.held import Form, Key
from sinks.base import Delivery
from sinks.columns import pieces
from sinks.directory import (
    disk_error,
    locked,
    make_directories,
    new_holder,
    probe_directory,
    refuse_strangers,
    sync_directory,
    write_synced,
)
from sinks.parquet_read_back import held_in_files
from sinks.position import Position, PositionFile, cursor_name, place_of, point_to

OWN_FOLDER = "_walbrook"
"""Holds the position, the lock and staged files; query engines pass over such a name."""

_COMMIT_BYTES_MAX = 128 << 20
_PARTS = Parts(("record", "changes", "record_pks", "unchanged", "annotations"), 64)
# Almost every value of these is another one, and none is looked for by its order.
_DISTINCT = ("record", "changes")
_REPEATED = (
    "commit_lsn", "commit_timestamp", "xid", "table_schema", "table_name", "action", "unchanged",
    "annotations",
)  # fmt: skip
_FOLDER_CHARS_MAX = 200  # file systems stop at 255 bytes


class ParquetSink:
    """Writes hive-style partitions: ``table=public.users/date=2026-01-31/<cursors>.parquet``."""

    def __init__(
        self,
        root: Path,
        *,
        consumer: str,
        partition_by: Sequence[str] = ("table", "date"),
        compression: str = "zstd",
        generation: Generation = FIRST,
        lock_wait_s: float = 30.0,
    ) -> None:
        self._root = place_of(root, generation)
        self._pointer = root / OWN_FOLDER / "generation"
        self._generation = generation
        self._own = self._root / OWN_FOLDER
        self._staging = self._own / "staging"
        self._partition_by = tuple(partition_by)
        self._compression = compression
        self._lock_wait_s = lock_wait_s
        self._position = PositionFile(self._own / "position", consumer)
        self._holder = new_holder()
        self._placed: Position | None = None  # the last one whose files we put or found in place

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Write what the folder does not hold yet, and commit it."""
        settled = absorbed = 0
        top: Cursor | None = None
        try:
            make_directories(self._staging)
            with locked(self._own / "lock", wait_s=self._lock_wait_s, holder=self._holder):
                position = self._recover()
                top = position.cursor
                settled = absorbed = prefix_at_or_below(batch.rows, top)
                rest = batch.slice(absorbed)
                for piece, _ in pieces(
                    rest, _PARTS, messages_max=len(rest), bytes_max=_COMMIT_BYTES_MAX
                ):
                    self._commit(piece)
                    settled += len(piece)
        except OSError as error:
            return Delivery(settled, absorbed, disk_error(self._root, error), top=top)
        except WalbrookError as error:
            return Delivery(settled, absorbed, error, top=top)
        return Delivery(settled, absorbed, top=top)

    def probe(self) -> str:
        """Whether the folder can be written to and is this consumer's; nothing is made there."""
        found = probe_directory(self._root)
        if self._root.is_dir() and self._position.read() is None:
            refuse_strangers(self._root, lambda name: name != self._own.name)
        return f"{self._root} {found}"

    @property
    def held_form(self) -> Form:
        return Form.RECORD

    def read_back(
        self, table: PublishedTable, keys: Collection[Key] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The messages of the folder that are about a table."""
        try:
            yield from held_in_files(self._root, self._partition_by, table, keys)
        except OSError as error:
            raise disk_error(self._root, error) from error

    def close(self) -> None:
        """Nothing stays open between deliveries."""

    def _commit(self, batch: MessageBatch) -> None:
        files = []
        for folder, part in _partitions(batch.rows, self._partition_by):
            ends = MessageBatch(part, batch.shape)
            name = f"{cursor_name(ends.cursor(0))}_{cursor_name(ends.cursor(-1))}.parquet"
            path = f"{folder}/{name}" if folder else name
            write_synced(self._staging / _staged_name(path), self._encoded(part))
            files.append(path)
        sync_directory(self._staging)
        truncation = self._generation.truncation
        position = Position(batch.cursor(-1), tuple(files), truncation=truncation)
        self._position.commit(position)
        self._place(position)

    def _encoded(self, part: pa.RecordBatch) -> memoryview:
        # As in every hive-style table, a partition's own column stands in the path alone.
        names = [name for name in MESSAGE_SCHEMA.names if name not in self._partition_by]
        table = pa.table(part.select(names))
        for name, column in zip(("commit_lsn", "commit_idx"), origin(part), strict=True):
            table = table.set_column(names.index(name), MESSAGE_SCHEMA.field(name), column)
        out = pa.BufferOutputStream()
        pq.write_table(
            table, out, compression=self._compression,
            use_dictionary=[name for name in names if name in _REPEATED],
            write_statistics=[name for name in names if name not in _DISTINCT],
        )  # fmt: skip
        return memoryview(out.getvalue())

    def _recover(self) -> Position:
        """Finish what a committed position began and clear away what was never committed."""
        position = self._position.read()
        if position is None:
            refuse_strangers(self._root, lambda name: name != self._own.name)
            point_to(self._pointer, self._root, self._generation)
            position = Position(ORIGIN, (), truncation=self._generation.truncation)
        if self._generation.must_empty(position.truncation) or position.truncating:
            position = self._position.truncate(self._generation, lambda: _remove_all(self._root))
        # Even a position that we placed may have come again, in a destination that was emptied.
        if position != self._placed or os.listdir(self._staging):
            self._place(position)
        for leftover in os.listdir(self._staging):
            os.unlink(self._staging / leftover)
        return position

    def _place(self, position: Position) -> None:
        folders = set()
        for file in position.files:
            staged, final = self._staging / _staged_name(file), self._root / file
            folders.add(final.parent)
            if staged.exists():
                make_directories(final.parent)
                os.replace(staged, final)
        for folder in sorted(folders):
            if folder.is_dir():
                sync_directory(folder)
        self._placed = position


def _remove_all(folder: Path) -> None:
    """Remove all Parquet files and what is empty then; nothing whose name hides it from readers."""
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(("_", "."))]
    for entry in shown:
        if not entry.is_dir(follow_symlinks=False):
            if entry.name.endswith(".parquet"):
                os.unlink(entry.path)
            continue
        _remove_all(Path(entry.path))
        if not os.listdir(entry.path):
            os.rmdir(entry.path)
    sync_directory(folder)


def _staged_name(file: str) -> str:
    return xxhash.xxh64_hexdigest(file.encode()) + ".parquet"


def _partitions(
    rows: pa.RecordBatch, partition_by: Sequence[str]
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each partition, in cursor order, with the partition's folder."""
    keys = [key for name in partition_by for key in _key_columns(rows, name)]
    if not keys:
        yield "", rows
        return
    codes = np.zeros(rows.num_rows, dtype=np.int64)
    for key in keys:
        encoded = pc.dictionary_encode(key)
        if len(encoded.dictionary) == 1:
            continue
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
        # Renumbered after every key, so that the product of their counts cannot overflow.
        codes = np.unique(codes, return_inverse=True)[1]
    if not codes.any():  # the usual case: nothing to move
        yield "/".join(_folder(rows, name) for name in partition_by), rows
        return
    order = np.argsort(codes, kind="stable")
    grouped = rows.take(pa.array(order))
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], rows.num_rows], strict=True):
        part = grouped.slice(start, end - start)
        yield "/".join(_folder(part, name) for name in partition_by), part


def _key_columns(rows: pa.RecordBatch, name: str) -> list[pa.Array]:
    if name == "table":
        return [rows.column("table_schema"), rows.column("table_name")]
    if name == "date":
        return [rows.column("commit_timestamp").cast(pa.date32())]
    return [rows.column(name)]


def _folder(part: pa.RecordBatch, name: str) -> str:
    """The folder of a partition, from its first row; hostile names are percent-quoted."""
    values = [str(column[0].as_py()) for column in _key_columns(part.slice(0, 1), name)]
    text = ".".join(quote(value, safe="").replace(".", "%2E") for value in values)
    if len(text) > _FOLDER_CHARS_MAX:
        whole = text[: text.rfind("%", 0, _FOLDER_CHARS_MAX)]
        text = f"{whole}~{xxhash.xxh64_hexdigest(text.encode())}"
    return f"{name}={text}"
