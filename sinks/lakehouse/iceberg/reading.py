"""The rows of a table's files without those that are deleted.

An equality delete takes the rows with one of its keys out of all files that are older than it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cdc.errors import OperatorError
from sinks.lakehouse.files import in_schema
from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.iceberg.encoding import bounds_of, by_number
from sinks.lakehouse.iceberg.manifests import Content, ManifestReader
from sinks.lakehouse.iceberg.schema import Columns, Layout
from sinks.lakehouse.merging import KeyIndex

Kind = iceberg.DataFileContent


class LiveRows:
    """The files of one snapshot."""

    def __init__(self, table: iceberg.Table, manifests: ManifestReader, place: str) -> None:
        self._table = table
        self._place = place
        self._kinds = {
            column.field_id: field.type
            for column, field in zip(
                table.schema().fields, Layout(table.schema(), Columns()).arrow(), strict=True
            )
        }
        self.files: dict[str, iceberg.ManifestEntry] = {}
        self.deletes: list[iceberg.ManifestEntry] = []
        for manifest in manifests.of_table(table):
            entries = manifests.entries(table, manifest)
            if manifest.content == Content.DATA:
                self.files |= {entry.data_file.file_path: entry for entry in entries}
            else:
                self.deletes += entries

    def delete_ids(self) -> set[tuple[int, ...]]:
        """By which columns rows are deleted, as their numbers."""
        return {tuple(entry.data_file.equality_ids or ()) for entry in self.deletes}

    def deletes_of(self, path: str) -> list[iceberg.ManifestEntry]:
        """The deletes that concern a file."""
        sequence = _sequence(self.files[path])
        found = [entry for entry in self.deletes if _sequence(entry) >= sequence]
        if any(entry.data_file.content != Kind.EQUALITY_DELETES for entry in found):
            raise OperatorError(
                f"the table at {self._place} has position deletes of another writer, which the "
                "sink does not read",
                fix="rewrite its data files with the tool that wrote them",
            )
        return [entry for entry in found if _sequence(entry) > sequence]

    def delete_count(self, path: str) -> int:
        """How many keys a reader of a file has to look up in it."""
        found = self.deletes_of(path)
        if not found:
            return 0
        schema = self._table.schema()
        bounds = bounds_of(self.files[path].data_file, schema)
        return sum(
            entry.data_file.record_count
            for entry in found
            if _overlap(bounds, bounds_of(entry.data_file, schema))
        )

    def unneeded_deletes(self, gone: Collection[str], added: int | None) -> frozenset[str]:
        """The delete files that concern no file once some are ``gone`` and others are ``added``."""
        stays = [_sequence(entry) for path, entry in self.files.items() if path not in gone]
        if added is not None:
            stays.append(added)
        oldest = min(stays, default=None)
        return frozenset(
            entry.data_file.file_path
            for entry in self.deletes
            if oldest is None or _sequence(entry) <= oldest
        )

    def read(self, path: str, schema: pa.Schema) -> pa.Table:
        """The live rows of a file, in their order, in these columns of the table."""
        numbers = {each.name: each.field_id for each in self._table.schema().fields}
        wanted = [numbers[name] for name in schema.names]
        groups = _by_columns(self.deletes_of(path))
        keys = {number for ids in groups for number in ids}
        there = self._columns(path, {*wanted, *keys})
        count = self.files[path].data_file.record_count
        alive = np.ones(count, bool)
        for ids, entries in groups.items():
            taken = pa.concat_tables([self._keys(entry, ids) for entry in entries])
            alive &= KeyIndex(taken).find(self._named(there, ids)) < 0
        found = pa.table(
            [there[number] for number in wanted if number in there],
            [name for name, number in zip(schema.names, wanted, strict=True) if number in there],
        )
        if not found.num_columns:
            found = pa.table({"": pa.nulls(count)})
        rows = in_schema(found, schema, self._place)
        return rows if alive.all() else rows.filter(pa.array(alive))

    def _keys(self, entry: iceberg.ManifestEntry, ids: Sequence[int]) -> pa.Table:
        return self._named(self._columns(entry.data_file.file_path, ids), ids)

    def _named(self, columns: Mapping[int, pa.ChunkedArray], ids: Sequence[int]) -> pa.Table:
        """Key columns by their numbers, in the types of the table: files may have narrower ones."""
        cast = [columns[number].cast(self._kinds[number]) for number in ids]
        return pa.table(cast, [str(number) for number in ids])

    def _columns(self, path: str, numbers: Collection[int]) -> dict[int, pa.ChunkedArray]:
        with self._table.io.new_input(path).open() as opened:
            file = pq.ParquetFile(opened)
            schema = file.schema_arrow
            known = by_number(schema.empty_table())
            chosen = [
                name for name, number in zip(schema.names, known, strict=True) if number in numbers
            ]
            return by_number(file.read(chosen))


def _by_columns(
    entries: Iterable[iceberg.ManifestEntry],
) -> dict[tuple[int, ...], list[iceberg.ManifestEntry]]:
    found: dict[tuple[int, ...], list[iceberg.ManifestEntry]] = {}
    for entry in entries:
        found.setdefault(tuple(entry.data_file.equality_ids or ()), []).append(entry)
    return found


def _sequence(entry: iceberg.ManifestEntry) -> int:
    return entry.sequence_number or 0


def _overlap(
    one: Mapping[str, tuple[object, object]], other: Mapping[str, tuple[object, object]]
) -> bool:
    """Whether the bounds of two files leave room for a common row."""
    for name in one.keys() & other.keys():
        bounds = (*one[name], *other[name])
        numbers = [each for each in bounds if isinstance(each, int)]
        if len(numbers) == len(bounds):
            low, high, lowest, highest = numbers
            if high < lowest or highest < low:
                return False
    return True
