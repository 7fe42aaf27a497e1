"""An Iceberg table (format version 2) as one consumer writes it.

Every commit goes through the catalog with what it rests on: the table itself, its current snapshot
and its schema. So of two processes that deliver the same, one is refused, and looks again at the
position, which moves as properties of the table in the commit of the rows.

A commit that removes no file rests on the position alone: where another writer was faster but left
the position as it was, the same files are committed again on top.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa

from cdc.errors import OperatorError, TransientError
from sinks.directory import probe_directory
from sinks.lakehouse.columns import Evolution
from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.iceberg.encoding import bounds_of, described, encode, partitions
from sinks.lakehouse.iceberg.errors import telling
from sinks.lakehouse.iceberg.manifests import Changes, ManifestReader, SnapshotWriter
from sinks.lakehouse.iceberg.position import (
    column_properties,
    columns_in,
    state_in,
    state_properties,
)
from sinks.lakehouse.iceberg.reading import LiveRows
from sinks.lakehouse.iceberg.schema import Layout, can_keep_files, planned
from sinks.lakehouse.iceberg.upkeep import (
    expired,
    forgotten,
    remove_all_files,
    remove_unnamed_files,
    too_many,
)
from sinks.lakehouse.table import ConflictError, DataFile, TableState

_TRIES_MAX: Final = 10  # of a commit that other writers are faster than
_PROPERTIES: Final = {
    "format-version": "2",
    "write.metadata.previous-versions-max": "20",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.parquet.compression-codec": "zstd",
}

Operation = iceberg.Operation


class IcebergTable:
    """The table ``name`` of a catalog, with its files at ``place``; ``owner`` is its consumer."""

    def __init__(
        self,
        connect: Callable[[], iceberg.Catalog],
        name: tuple[str, str],
        place: str,
        owner: str,
    ) -> None:
        self._connect = connect
        self._name = name
        self._place = place
        self._owner = owner
        self._table: iceberg.Table | None = None
        self._state = TableState()
        self._schema: pa.Schema = pa.schema([])
        self._manifests = ManifestReader()
        self._live: LiveRows | None = None
        self._written: dict[str, iceberg.DataFile] = {}

    @property
    def place(self) -> str:
        return self._place.removeprefix("file://")

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def probe(self) -> str:
        if "://" not in self.place:
            return f"{self.place} {probe_directory(Path(self.place).parents[1])}"
        return f"neither the store of {self.place} nor its catalog was tried"

    def load(self) -> TableState | None:
        with telling(self.place):
            try:
                table = self._catalog.load_table(self._name)
            except (iceberg.NoSuchTableError, iceberg.NoSuchNamespaceError):
                return None
            self._state = state_in(table.metadata.properties, self._owner, self.place)
            if table.metadata.format_version != 2:
                raise OperatorError(
                    f"the table at {self.place} has format version "
                    f"{table.metadata.format_version}, and the sink writes version 2",
                    fix="give the sink another path, or move the table away",
                )
            self._see(table)
            return self._state

    def create(self, schema: pa.Schema, partition_by: Sequence[str], state: TableState) -> None:
        layout = planned(schema, [None] * len(schema), None)
        ids = {column.name: column.field_id for column in layout.schema.fields}
        spec = iceberg.PartitionSpec(
            *[
                iceberg.PartitionField(ids[name], 1000 + at, iceberg.IdentityTransform(), name)
                for at, name in enumerate(partition_by)
            ]
        )
        with telling(self.place):
            self._make_namespace()
            self._catalog.create_table(
                self._name,
                layout.schema,
                location=self._place,
                partition_spec=spec,
                properties=_PROPERTIES
                | state_properties(self._owner, state)
                | column_properties(layout.columns),
            )

    def alter(self, evolution: Evolution, state: TableState) -> bool:
        """Change the columns alone, by their numbers. Returns whether the files can be kept."""
        current = self._layout
        if not can_keep_files(current, evolution.schema, evolution.was):
            return False
        with telling(self.place):
            layout = self._planned(evolution.schema, evolution.was)
            stay = {column.field_id for column in layout.schema.fields}
            if any(not stay.issuperset(ids) for ids in self._rows.delete_ids()):
                return False  # deletes go by a column that no reader would find any more
            is_same = layout.schema.as_struct() == current.schema.as_struct()
            updates = [] if is_same else _schema_updates(layout)
            self._send([*updates, self._moves(state, layout)])
        return True

    def files(self) -> list[DataFile]:
        with telling(self.place):
            return [
                replace(file, deletes=self._rows.delete_count(file.path))
                for file in self.held_files()
            ]

    def held_files(self) -> list[DataFile]:
        """The same without the count of their deletes, which costs more than all the rest."""
        with telling(self.place):
            schema = self._loaded.schema()
            return [
                DataFile(
                    path=path,
                    rows=entry.data_file.record_count,
                    size=entry.data_file.file_size_in_bytes,
                    partition=self._partition_of(entry.data_file),
                    bounds=bounds_of(entry.data_file, schema),
                )
                for path, entry in self._rows.files.items()
            ]

    def read(self, file: DataFile, columns: Sequence[str] | None = None) -> pa.Table:
        names = self._schema.names if columns is None else columns
        with telling(self.place):
            return self._rows.read(
                file.path, pa.schema([self._schema.field(name) for name in names])
            )

    def write(self, rows: pa.Table) -> list[DataFile]:
        with telling(self.place):
            layout = self._layout_for(rows.schema)
            parquet = layout.parquet()
            return [
                self._written_file(part, layout.schema, parquet, () if day is None else (day,))
                for day, part in partitions(rows, self._partitioned_by)
            ]

    def commit(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], state: TableState | None
    ) -> None:
        files = [self._written[file.path] for file in added]
        gone = frozenset(file.path for file in removed)
        if state is None:
            self._rewrite(files, gone)
            return
        operation = Operation.OVERWRITE if gone else Operation.APPEND
        self._snapshot(lambda: Changes(operation, files, removed=gone), state, rests=bool(gone))

    def upsert(self, added: Sequence[DataFile], keys: pa.Table | None, state: TableState) -> None:
        """Add files, and delete the rows of older files that have one of the keys."""
        deletes = []
        with telling(self.place):
            if keys is not None and keys.num_rows:
                schema = self._loaded.schema()
                ids = [schema.find_field(name).field_id for name in keys.column_names]
                order = {each.field_id: at for at, each in enumerate(schema.fields)}
                parquet = self._layout.parquet()
                parts = pa.schema([parquet.field(order[number]) for number in ids])
                deletes.append(self._written_deletes(keys, schema, parts, ids))
        files = [self._written[file.path] for file in added]
        operation = Operation.OVERWRITE if deletes else Operation.APPEND
        self._snapshot(lambda: Changes(operation, files, deletes), state, rests=False)

    def replace(self, added: Sequence[DataFile], schema: pa.Schema, state: TableState) -> None:
        files = [self._written[file.path] for file in added]
        layout = None if self._is_same(schema) else self._planned_by_name(schema)
        changes = Changes(Operation.OVERWRITE, files, removes_all=True)
        self._snapshot(lambda: changes, state, rests=True, layout=layout)

    def drop(self) -> None:
        self._table = None
        with telling(self.place):
            catalog = self._catalog
            with suppress(iceberg.NoSuchTableError, iceberg.NoSuchNamespaceError):
                catalog.drop_table(self._name)
            remove_all_files(iceberg.load_file_io(catalog.properties, self._place), self._place)

    def vacuum(self, retain_hours: int) -> int:
        with telling(self.place):
            updates = expired(self._loaded.metadata, retain_hours)
            if updates:
                self._send(updates)
                self.load()
            return remove_unnamed_files(self._loaded, retain_hours)

    @property
    def _catalog(self) -> iceberg.Catalog:
        return self._connect()

    @property
    def _loaded(self) -> iceberg.Table:
        assert self._table is not None
        return self._table

    @property
    def _layout(self) -> Layout:
        table = self._loaded
        return Layout(table.schema(), columns_in(table.metadata.properties))

    @property
    def _rows(self) -> LiveRows:
        if self._live is None:
            self._live = LiveRows(self._loaded, self._manifests, self.place)
        return self._live

    @property
    def _partitioned_by(self) -> str | None:
        fields = self._loaded.spec().fields
        return fields[0].name if fields else None

    def _partition_of(self, file: iceberg.DataFile) -> dict[str, str | None]:
        fields = self._loaded.metadata.specs()[file.spec_id].fields
        return {each.name: str(file.partition[at]) for at, each in enumerate(fields)}

    def _see(self, table: iceberg.Table) -> None:
        self._table = table
        self._schema = self._layout.arrow()
        self._live = None
        self._written.clear()

    def _is_same(self, schema: pa.Schema) -> bool:
        return bool(schema.equals(self._schema, check_metadata=True))

    def _layout_for(self, schema: pa.Schema) -> Layout:
        """The columns of rows: those of the table, or those that it is to have instead."""
        return self._layout if schema.equals(self._schema) else self._planned_by_name(schema)

    def _planned_by_name(self, schema: pa.Schema) -> Layout:
        there = set(self._schema.names)
        return self._planned(schema, [name if name in there else None for name in schema.names])

    def _planned(self, schema: pa.Schema, was: Sequence[str | None]) -> Layout:
        metadata = self._loaded.metadata
        following = 1 + max(each.schema_id for each in metadata.schemas)
        return planned(schema, was, self._layout, metadata.last_column_id, following)

    def _written_file(
        self,
        rows: pa.Table,
        schema: iceberg.Schema,
        parquet: pa.Schema,
        partition: Sequence[object],
    ) -> DataFile:
        location = self._new_location("data")
        encoded = encode(rows, parquet)
        self._put(location, encoded.data)
        self._written[location] = described(location, encoded, schema, partition)
        return DataFile(location, rows.num_rows, len(encoded.data))

    def _written_deletes(
        self, keys: pa.Table, schema: iceberg.Schema, parquet: pa.Schema, ids: Sequence[int]
    ) -> iceberg.DataFile:
        location = self._new_location("deletes")
        encoded = encode(keys, parquet)
        self._put(location, encoded.data)
        return described(location, encoded, schema, (), ids)

    def _new_location(self, kind: str) -> str:
        return self._loaded.location_provider().new_data_location(f"{kind}-{uuid.uuid4()}.parquet")

    def _put(self, location: str, data: memoryview) -> None:
        with self._loaded.io.new_output(location).create() as out:
            out.write(data)  # type: ignore[arg-type]

    def _rewrite(self, files: list[iceberg.DataFile], gone: frozenset[str]) -> None:
        """The same rows in other files, which are as old as what was read to write them."""
        snapshot = self._loaded.metadata.current_snapshot()
        sequence = 0 if snapshot is None else snapshot.sequence_number

        def changes() -> Changes:
            unneeded = self._rows.unneeded_deletes(gone, sequence if files else None)
            return Changes(Operation.REPLACE, files, removed=gone | unneeded, sequence=sequence)

        self._snapshot(changes, None, rests=False)

    def _snapshot(
        self,
        changes: Callable[[], Changes],
        state: TableState | None,
        *,
        rests: bool,
        layout: Layout | None = None,
    ) -> None:
        """Commit a snapshot; if it ``rests`` on the files as they were, on these alone."""
        before = self._state
        for attempt in range(1, _TRIES_MAX + 1):
            try:
                with telling(self.place):
                    self._commit_snapshot(changes(), state, layout)
                return
            except ConflictError:
                if rests or attempt == _TRIES_MAX:
                    raise
            written, schema = dict(self._written), self._loaded.schema()
            moved = self.load() != before and state is not None
            if moved or self._loaded.schema() != schema:
                raise ConflictError(
                    f"another process has moved the position of the table at {self.place}",
                    fix="it is retried",
                )
            self._written = written

    def _commit_snapshot(
        self, changes: Changes, state: TableState | None, layout: Layout | None
    ) -> None:
        schema = self._loaded.schema() if layout is None else layout.schema
        snapshot = SnapshotWriter(self._loaded, schema, self._manifests).write(changes)
        updates: list[iceberg.TableUpdate] = [] if layout is None else _schema_updates(layout)
        updates += [
            iceberg.AddSnapshotUpdate(snapshot=snapshot),
            iceberg.SetSnapshotRefUpdate.model_validate(
                {
                    "ref-name": iceberg.MAIN_BRANCH,
                    "type": iceberg.SnapshotRefType.BRANCH,
                    "snapshot-id": snapshot.snapshot_id,
                }
            ),
        ]
        updates += too_many(self._loaded.metadata)
        if state is not None:
            updates.append(self._moves(state, layout))
        try:
            self._send(updates)
        except iceberg.CommitFailedException:
            raise
        except Exception:
            # The answer was lost, perhaps: the table itself says what became of the commit.
            if not self._has_snapshot(snapshot.snapshot_id):
                raise

    def _make_namespace(self) -> None:
        namespace = self._name[:-1]
        try:
            self._catalog.create_namespace_if_not_exists(namespace)
        except Exception:
            # Another writer may have made it in the same moment; each catalog says so in its words.
            if not self._catalog.namespace_exists(namespace):
                raise

    def _has_snapshot(self, number: int) -> bool:
        try:
            table = self._catalog.load_table(self._name)
        except Exception as error:
            raise TransientError(
                f"whether a commit of the table at {self.place} was done is not known, because its "
                "catalog does not answer",
                fix="it is retried: the position of the table is read before anything is written",
                detail=str(error),
            ) from error
        return table.metadata.snapshot_by_id(number) is not None

    def _send(self, updates: Sequence[iceberg.TableUpdate]) -> None:
        metadata = self._loaded.metadata
        rests_on: tuple[iceberg.TableRequirement, ...] = (
            iceberg.AssertTableUUID(uuid=metadata.table_uuid),
            iceberg.AssertRefSnapshotId.model_validate(
                {"ref": iceberg.MAIN_BRANCH, "snapshot-id": metadata.current_snapshot_id}
            ),
            iceberg.AssertCurrentSchemaId.model_validate(
                {"current-schema-id": metadata.current_schema_id}
            ),
            iceberg.AssertLastAssignedFieldId.model_validate(
                {"last-assigned-field-id": metadata.last_column_id}
            ),
        )
        done = self._catalog.commit_table(self._loaded, rests_on, tuple(updates))
        for location in forgotten(metadata, done.metadata):
            with suppress(OSError):  # it goes with the next vacuum
                self._loaded.io.delete(location)

    def _moves(self, state: TableState, layout: Layout | None) -> iceberg.SetPropertiesUpdate:
        properties = state_properties(self._owner, state)
        if layout is not None:
            properties |= column_properties(layout.columns)
        return iceberg.SetPropertiesUpdate(updates=properties)


def _schema_updates(layout: Layout) -> list[iceberg.TableUpdate]:
    return [
        iceberg.AddSchemaUpdate(schema=layout.schema),
        iceberg.SetCurrentSchemaUpdate.model_validate({"schema-id": -1}),
    ]
