"""A Delta table as one consumer writes it.

The state of a table is application transactions (``txn``), which the log keeps through checkpoints:
one per number, all in the commit of the rows. Delta refuses a commit whose transactions another one
has moved since the table was loaded; so of two processes that deliver the same, one is refused.

Invariant: on a disk the log entries of every version that was loaded are synced, so that what
counts as delivered because of them lasts.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.fs as pafs

from cdc.cursor import Cursor
from cdc.errors import OperatorError
from sinks.directory import make_directories, probe_directory, sync_directory
from sinks.lakehouse.columns import DROPPED, OWN, Evolution, plain_schema
from sinks.lakehouse.delta import library as delta
from sinks.lakehouse.delta.actions import listed_files, stats_of
from sinks.lakehouse.delta.errors import from_delta
from sinks.lakehouse.files import DiskFiles, LakeFiles, StoreFiles, in_schema
from sinks.lakehouse.partitions import partitions
from sinks.lakehouse.table import DataFile, TableState

_SYNCED_BACK: Final = 20  # entries of the log before the version that is loaded first
_NUMBERS: Final = ("sequence", "lsn", "idx", "relation_oid", "reload")


class DeltaLakeTable:
    """The table in ``place``, a folder or a URL; ``owner`` names the consumer in its log."""

    def __init__(self, place: str, owner: str, options: dict[str, str]) -> None:
        self._place = place
        self._owner = owner
        self._options = options
        self._folder = None if "://" in place else Path(place)
        self._table: delta.DeltaTable | None = None
        self._schema: pa.Schema = pa.schema([])
        self._opened_files: LakeFiles | None = None
        self._synced = -1

    @property
    def place(self) -> str:
        return self._place

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def probe(self) -> str:
        if self._folder is not None:
            return f"{self._folder} {probe_directory(self._folder)}"
        self.load()
        return f"{self._place} can be asked; whether it can be written to was not tried"

    def load(self) -> TableState | None:
        with self._telling():
            if self._table is None:
                try:
                    self._table = delta.DeltaTable(self._place, storage_options=self._options)
                except delta.TableNotFoundError:
                    return None
            else:
                self._table.update_incremental()
            return self._look(self._table)

    def create(self, schema: pa.Schema, partition_by: Sequence[str], state: TableState) -> None:
        with self._telling():
            if self._folder is not None:
                make_directories(self._folder)
            delta.DeltaTable.create(
                self._place,
                schema,
                partition_by=list(partition_by),
                storage_options=self._options,
                commit_properties=self._properties(state),
            )
            if self._folder is not None:
                sync_directory(self._folder)

    def alter(self, evolution: Evolution, state: TableState) -> bool:
        if evolution.rewrites:
            return False
        properties = self._properties(state)
        with self._telling():
            if evolution.dropped:
                mark = {DROPPED.decode(): "1"}
                self._loaded.alter.set_column_metadata(
                    evolution.dropped[0], mark, commit_properties=properties
                )
            else:
                fields = delta.Schema.from_arrow(pa.schema(evolution.added)).fields
                self._loaded.alter.add_columns(fields, commit_properties=properties)
        return True

    def files(self) -> list[DataFile]:
        with self._telling():
            actions = pa.table(self._loaded.get_add_actions(flatten=True))
            return listed_files(actions, self._partitioned_by)

    def read(self, file: DataFile, columns: Sequence[str] | None = None) -> pa.Table:
        with self._telling():
            rows = self._files.read(file.path, columns)
        for name, value in file.partition.items():
            rows = rows.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(rows)))
        names = self._schema.names if columns is None else columns
        return in_schema(rows, pa.schema([self._schema.field(n) for n in names]), self._place)

    def write(self, rows: pa.Table) -> list[DataFile]:
        with self._telling():
            return [
                self._written(part, folder, partition)
                for folder, partition, part in partitions(rows, self._partitioned_by)
            ]

    def commit(
        self,
        added: Sequence[DataFile],
        removed: Sequence[DataFile],
        state: TableState | None,
    ) -> None:
        moves_rows = state is not None
        # delta-rs does not notice that files which it compacts are gone if their removal says that
        # no rows moved, and adds these rows again. In a history it has to say so all the same:
        # streaming readers end where rows are removed.
        removes_rows = moves_rows or not self._is_history
        actions: list[delta.AddAction | delta.RemoveAction] = [
            *(_removal(file, moves_rows=removes_rows) for file in removed),
            *(_addition(file, moves_rows=moves_rows) for file in added),
        ]
        with self._telling():
            self._loaded.create_write_transaction(
                actions,
                "append",
                self._loaded.schema(),
                self._partitioned_by,
                commit_properties=self._properties(state, rests_on_files=bool(removed)),
            )

    def replace(self, added: Sequence[DataFile], schema: pa.Schema, state: TableState) -> None:
        with self._telling():
            self._loaded.create_write_transaction(
                [_addition(file, moves_rows=True) for file in added],
                "overwrite",
                delta.Schema.from_arrow(schema),
                self._partitioned_by,
                commit_properties=self._properties(state, rests_on_files=True),
            )

    def drop(self) -> None:
        self._table = None
        with self._telling():
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=not self._folder.exists())
                return
            store = pafs.PyFileSystem(delta.DeltaStorageHandler(self._place, self._options))
            everything = pafs.FileSelector("", allow_not_found=True, recursive=True)
            for found in store.get_file_info(everything):
                if found.type == pafs.FileType.File:
                    store.delete_file(found.path)

    def vacuum(self, retain_hours: int) -> int:
        """Remove files that no version of the last hours has. Returns how many."""
        with self._telling():
            gone = self._loaded.vacuum(
                retain_hours, dry_run=False, enforce_retention_duration=False, full=True
            )
            return len(gone)

    @property
    def _loaded(self) -> delta.DeltaTable:
        assert self._table is not None
        return self._table

    @property
    def _partitioned_by(self) -> list[str]:
        return list(self._loaded.metadata().partition_columns)

    @property
    def _is_history(self) -> bool:
        return set(OWN.names).issubset(self._schema.names)

    @property
    def _files(self) -> LakeFiles:
        if self._opened_files is None:
            if self._folder is not None:
                self._opened_files = DiskFiles(self._folder)
            else:
                handler = delta.DeltaStorageHandler(self._place, self._options)
                self._opened_files = StoreFiles(pafs.PyFileSystem(handler))
        return self._opened_files

    def _look(self, table: delta.DeltaTable) -> TableState:
        self._sync_log(table.version())
        *numbers, reload = [table.transaction_version(self._app(name)) for name in _NUMBERS]
        if any(number is None for number in numbers):
            raise OperatorError(
                f"{self._place} is a table that {self._owner} has not written",
                fix="give the sink another path, or move the table away",
            )
        configured = table.metadata().configuration
        if configured.get("delta.enableDeletionVectors") == "true":
            raise OperatorError(
                f"{self._place} has deletion vectors, which the sink does not write",
                fix="set its property delta.enableDeletionVectors to false and rewrite its files "
                "(REORG TABLE … APPLY (PURGE))",
            )
        self._schema = plain_schema(pa.schema(table.schema().to_arrow()))
        sequence, lsn, idx, oid = (int(number or 0) for number in numbers)
        return TableState(sequence, Cursor(lsn, idx), oid, int(reload or 0))

    def _sync_log(self, version: int) -> None:
        if self._folder is None or version == self._synced:
            return
        log = self._folder / "_delta_log"
        first = max(self._synced + 1, version - _SYNCED_BACK)
        versions = range(first, version + 1)
        endings = ("json", "checkpoint.parquet")
        entries = [f"{number:020}.{ending}" for number in versions for ending in endings]
        names = [*entries, "_last_checkpoint"]
        DiskFiles(log).sync([name for name in names if (log / name).exists()])
        sync_directory(log)
        self._synced = version

    def _properties(
        self, state: TableState | None, *, rests_on_files: bool = False
    ) -> delta.CommitProperties:
        # What rests on files must be the very next version: of a compaction in between, which says
        # that no data has changed, delta-rs would not notice that it took those files away.
        retries = 0 if rests_on_files else None
        if state is None:
            return delta.CommitProperties(max_commit_retries=retries)
        cursor = state.cursor
        numbers = (state.sequence, cursor.lsn, cursor.idx, state.relation_oid, state.reload)
        return delta.CommitProperties(
            custom_metadata={"walbrook": {"cursor": str(state.cursor), "consumer": self._owner}},
            max_commit_retries=retries,
            app_transactions=[
                delta.Transaction(self._app(name), number)
                for name, number in zip(_NUMBERS, numbers, strict=True)
            ],
        )

    def _app(self, number: str) -> str:
        return f"walbrook/{self._owner}/{number}"

    def _written(self, rows: pa.Table, folder: str, partition: dict[str, str | None]) -> DataFile:
        path = f"{folder}part-{uuid.uuid4()}.zstd.parquet"
        size = self._files.write(path, rows)
        return DataFile(path, rows.num_rows, size, partition, stats=stats_of(rows))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (delta.DeltaError, OSError, pa.ArrowException) as error:
            raise from_delta(error, self._place) from error


def _removal(file: DataFile, *, moves_rows: bool) -> delta.RemoveAction:
    return delta.RemoveAction(file.path, moves_rows, _now_ms(), file.size, dict(file.partition))


def _addition(file: DataFile, *, moves_rows: bool) -> delta.AddAction:
    return delta.AddAction(file.path, file.size, file.partition, _now_ms(), moves_rows, file.stats)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
