"""A table of Parquet files as one consumer writes it.

A commit replaces the manifest by one conditional put: files and position together, and only if the
manifest is the one that the commit rests on. So of two processes that deliver the same, one is
refused, and a file that no manifest names is seen by no reader who goes by it.

Columns change without a rewritten file: files from then on are of another version of the
columns, in a folder of their own, and those before stay as they were.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson
import pyarrow as pa
import structlog

from cdc.decoding.lossless_cast import conform
from cdc.errors import OperatorError
from cdc.failpoints import reached
from cdc.generation import FIRST, Generation
from sinks.directory import disk_error
from sinks.lakehouse.columns import DROPPED, Evolution, number_of
from sinks.lakehouse.files import in_schema
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.parquet.manifest import MANIFEST, VERSION, TableManifest, read_manifest
from sinks.lakehouse.parquet.places import Place, Stored, open_place
from sinks.lakehouse.partitions import partitions
from sinks.lakehouse.registry import REGISTRY
from sinks.lakehouse.table import ConflictError, DataFile, TableState

_SUPERSEDED = "_superseded/"
"""Notes of files that a merge replaced: readers of the manifest before it may have them open."""

_WRITTEN = re.compile(r"v\d+/(?:[^/]+=[^/]+/)*\.?part-[0-9a-f-]{36}\.parquet(?:\.new)?")
"""Files of the table, those too that a crash left half: all others are not ours."""

_logger = structlog.get_logger("walbrook.sink.lakehouse")


class ParquetTable:
    """The table in ``place``; its rows are to belong to the truncation of the generation.

    One that is not ``emptied`` by truncations says of which one the others are.
    """

    def __init__(
        self, place: Place, owner: str, generation: Generation, *, emptied: bool = True
    ) -> None:
        self._place = place
        self._owner = owner
        self._generation = generation
        self._emptied = emptied
        self._stored: Stored | None = None
        self._manifest: TableManifest | None = None

    @property
    def place(self) -> str:
        return self._place.name

    @property
    def schema(self) -> pa.Schema:
        return self._loaded.schema

    def probe(self) -> str:
        with self._telling():
            return self._place.probe()

    def load(self) -> TableState | None:
        with self._telling():
            stored = self._place.get(MANIFEST)
            if stored is None:
                return None
            if self._stored is None or stored.tag != self._stored.tag:
                manifest = read_manifest(stored.content, self.place)
                if manifest.consumer != self._owner:
                    raise OperatorError(
                        f"the table at {self.place} is of the consumer {manifest.consumer}, not of "
                        f"{self._owner}",
                        fix="give every consumer a place of its own; if the sink was renamed, name "
                        "it as it was",
                    )
                self._stored, self._manifest = stored, manifest
            if self._emptied and self.must_empty():
                self._empty()
            return self._loaded.state

    def must_empty(self) -> bool:
        """Whether it is of an earlier truncation. Raises OperatorError if it is of a later one."""
        return self._generation.must_empty(self._loaded.truncation)

    def truncated(self) -> None:
        """Say that the other tables are of the present truncation."""
        self._replace_by(self._loaded.truncated(self._generation.truncation))

    def create(self, schema: pa.Schema, partition_by: Sequence[str], state: TableState) -> None:
        truncation = self._generation.truncation
        manifest = TableManifest(self._owner, (schema,), tuple(partition_by), state, truncation)
        with self._telling():
            stored = self._place.put(MANIFEST, manifest.write(), None)
            self._place.check_conditions(MANIFEST, stored)
            self._stored, self._manifest = stored, manifest

    def alter(self, evolution: Evolution, state: TableState) -> bool:
        """All that changes is what files have from now on; none has a column that is gone."""
        columns = [each for each in evolution.schema if DROPPED not in (each.metadata or {})]
        self._replace_by(self._loaded.with_schema(pa.schema(columns), state))
        return True

    def files(self) -> list[DataFile]:
        return list(self._loaded.files)

    def read(self, file: DataFile, columns: Sequence[str] | None = None) -> pa.Table:
        schema = self._loaded.schemas[int(str(file.partition[VERSION])) - 1]
        with self._telling():
            rows = self._place.read(file.path)
        if rows is None:
            self._replace_by(self._loaded.changed((), [file.path], self._loaded.state))
            _logger.info("lakehouse.files_gone", table=self.place, files=1)
            raise ConflictError(
                f"a file of the table at {self.place} is gone", fix="it is left out from now on"
            )
        for name in self._loaded.partition_by:
            value = pa.scalar(file.partition[name], pa.string())
            rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
        found = in_schema(rows, schema, self.place)
        return found if columns is None else _named(found, self.schema, columns)

    def write(self, rows: pa.Table) -> list[DataFile]:
        version = self._loaded.version_of(rows.schema)
        written = []
        for folder, partition, part in partitions(rows, self._loaded.partition_by):
            path = f"v{version}/{folder}part-{uuid.uuid4()}.parquet"
            with self._telling():
                size = self._place.write(path, part)
            there = {VERSION: str(version), **partition}
            written.append(DataFile(path, rows=part.num_rows, size=size, partition=there))
        return written

    def commit(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], state: TableState | None
    ) -> None:
        manifest = self._loaded
        gone = {file.path for file in removed}
        if not gone <= {file.path for file in manifest.files}:
            raise ConflictError(
                f"the files of the table at {self.place} have changed", fix="it is retried"
            )
        self._supersede(gone)
        self._replace_by(manifest.changed(added, gone, manifest.state if state is None else state))

    def replace(self, added: Sequence[DataFile], schema: pa.Schema, state: TableState) -> None:
        manifest = self._loaded
        if not schema.equals(manifest.schema, check_metadata=True):
            manifest = manifest.with_schema(schema, state)
        gone = {file.path for file in manifest.files}
        self._supersede(gone)
        self._replace_by(manifest.changed(added, gone, state))

    def vacuum(self, retain_hours: int) -> int:
        """Remove files that are no longer read, and forget files that were moved away."""
        manifest, oldest_s = self._loaded, time.time() - retain_hours * 3600
        named = {file.path for file in manifest.files}
        with self._telling():
            there = list(self._place.listed())
            notes = [each for each in there if each.path.startswith(_SUPERSEDED)]
            young = [each.path for each in notes if each.modified_s > oldest_s]
            kept = named.union(*(self._noted(path) for path in young))
            files = [each for each in there if _WRITTEN.fullmatch(each.path)]
            gone = [
                each.path for each in files if each.path not in kept and each.modified_s <= oldest_s
            ]
        moved = named - {each.path for each in files}
        if gone or moved:
            # Another process may be about to commit a removed file: its manifest is older now.
            self._replace_by(manifest.changed((), moved, manifest.state))
        if moved:
            _logger.info("lakehouse.files_gone", table=self.place, files=len(moved))
        with self._telling():
            self._place.remove(gone)
            # Behind the files, so that a crash in between leaves them to be removed again.
            self._place.remove([each.path for each in notes if each.modified_s <= oldest_s])
        return len(gone)

    def drop(self) -> None:
        with self._telling():
            self._place.drop(MANIFEST)
        self._stored = self._manifest = None

    @property
    def _loaded(self) -> TableManifest:
        assert self._manifest is not None
        return self._manifest

    def _empty(self) -> None:
        """An operator asked for it: readers of an older manifest are not waited for."""
        manifest = self._loaded
        reached("truncating")
        self._replace_by(manifest.emptied(self._generation.truncation))
        reached("truncated")
        self._place.remove([file.path for file in manifest.files])

    def _supersede(self, paths: Collection[str]) -> None:
        """Note that files are about to be superseded: how long they are kept counts from here."""
        if paths:
            with self._telling():
                note = f"{_SUPERSEDED}{uuid.uuid4()}.json"
                self._place.put(note, orjson.dumps(sorted(paths)), None)

    def _noted(self, note: str) -> list[str]:
        found = self._place.get(note)
        return [] if found is None else list(orjson.loads(found.content))

    def _replace_by(self, manifest: TableManifest) -> None:
        with self._telling():
            self._stored = self._place.put(MANIFEST, manifest.write(), self._stored)
        self._manifest = manifest

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(Path(self.place), error) from error


def parquet_tables(
    root: str,
    owner: str,
    options: Mapping[str, str],
    *,
    compression: str = "zstd",
    generation: Generation = FIRST,
) -> Callable[[LakeTarget], ParquetTable]:
    """Opens the tables below a folder or a URL, as the consumer ``owner`` writes them."""

    def open_table(target: LakeTarget) -> ParquetTable:
        place = open_place(f"{root}/{target.folder}", options, compression)
        # What a truncation empties is found by the registry, which therefore stays.
        return ParquetTable(place, owner, generation, emptied=target != REGISTRY)

    return open_table


def _named(rows: pa.Table, schema: pa.Schema, names: Sequence[str]) -> pa.Table:
    """Rows of any version in columns as the table calls them now, in its types if none is lost."""
    numbers = {number_of(field): field.name for field in rows.schema}
    columns = []
    for name in names:
        field = schema.field(name)
        number = number_of(field)
        known = name if number is None or len(numbers) == 1 else numbers.get(number)
        if known not in rows.column_names:
            columns.append(pa.nulls(len(rows), field.type))
            continue
        values = rows.column(known).combine_chunks()
        if values.type != field.type and not pa.types.is_nested(values.type):
            found, bad = conform(values, field.type)
            values = values if bad.any() else found
        columns.append(values)
    return pa.Table.from_arrays(columns, names=list(names))
