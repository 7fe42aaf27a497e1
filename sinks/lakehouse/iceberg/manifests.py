"""The files of a snapshot: reading its manifests, and writing those of the next one.

A commit writes one manifest per kind of file that it adds, rewrites those that name a file it
removes, and keeps the others. Small manifests are merged before there are too many of them, because
every commit and every query reads the list of all.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.table import ConflictError

_MANIFESTS_MAX: Final = 100  # of one kind, before they are merged
_MERGED_ENTRIES_MAX: Final = 5_000  # of a manifest that others are merged into
_CODEC: Final = "deflate"

Status = iceberg.ManifestEntryStatus
Content = iceberg.ManifestContent


@dataclass(frozen=True)
class Changes:
    """What a snapshot does to the files of a table.

    ``sequence`` is that of the added data files where they have the rows of older ones.
    """

    operation: iceberg.Operation
    added: Sequence[iceberg.DataFile] = ()
    deletes: Sequence[iceberg.DataFile] = ()
    removed: Collection[str] = field(default_factory=frozenset)
    removes_all: bool = False
    sequence: int | None = None


class ManifestReader:
    """The live entries of manifests; those of the last snapshot that was read stay in memory."""

    def __init__(self) -> None:
        self._entries: dict[str, list[iceberg.ManifestEntry]] = {}

    def of_table(self, table: iceberg.Table) -> list[iceberg.ManifestFile]:
        """The manifests of the current snapshot."""
        snapshot = table.metadata.current_snapshot()
        manifests = [] if snapshot is None else snapshot.manifests(table.io)
        known = {each.manifest_path for each in manifests}
        self._entries = {path: found for path, found in self._entries.items() if path in known}
        return manifests

    def entries(
        self, table: iceberg.Table, manifest: iceberg.ManifestFile
    ) -> list[iceberg.ManifestEntry]:
        path = manifest.manifest_path
        if path not in self._entries:
            self._entries[path] = manifest.fetch_manifest_entry(table.io)
        return self._entries[path]


class _DeleteManifestWriter(iceberg.ManifestWriterV2):
    """The library writes manifests of data files alone; this is all that differs."""

    def content(self) -> iceberg.ManifestContent:
        return Content.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class SnapshotWriter:
    """Writes the metadata files of one snapshot, which no reader sees until it is committed."""

    def __init__(
        self, table: iceberg.Table, schema: iceberg.Schema, reader: ManifestReader
    ) -> None:
        self._table = table
        self._schema = schema
        self._reader = reader
        self._id = table.metadata.new_snapshot_id()
        self._name = uuid.uuid4()
        self._written = 0
        self._gone: list[iceberg.DataFile] = []

    def write(self, changes: Changes) -> iceberg.Snapshot:
        """Raises ConflictError if a file that is to be removed is not there."""
        metadata = self._table.metadata
        kept = [
            each
            for manifest in self._reader.of_table(self._table)
            for each in self._without(manifest, changes)
        ]
        missing = set(changes.removed) - {file.file_path for file in self._gone}
        if missing:
            raise ConflictError(
                f"another writer has removed {len(missing)} of the files of the table at "
                f"{metadata.location} that were to be replaced",
                fix="it is retried",
            )
        added = [
            *self._manifest(Content.DATA, Status.ADDED, changes.added, changes.sequence),
            *self._manifest(Content.DELETES, Status.ADDED, changes.deletes, None),
        ]
        manifests = [*added, *self._merged(kept)]
        sequence = metadata.next_sequence_number()
        parent = metadata.current_snapshot_id
        place = self._place(f"snap-{self._id}-0-{self._name}.avro")
        with iceberg.write_manifest_list(
            2, self._table.io.new_output(place), self._id, parent, sequence, _CODEC
        ) as writer:
            writer.add_manifests(manifests)
        return iceberg.Snapshot.model_validate(
            {
                "snapshot-id": self._id,
                "parent-snapshot-id": parent,
                "manifest-list": place,
                "sequence-number": sequence,
                "summary": self._summary(changes),
                "schema-id": self._schema.schema_id,
            }
        )

    def _without(
        self, manifest: iceberg.ManifestFile, changes: Changes
    ) -> list[iceberg.ManifestFile]:
        """A manifest of the last snapshot without the files that are removed."""
        if not changes.removed and not changes.removes_all:
            # It may name nothing that is alive; then the next one need not.
            return [manifest] if manifest.has_added_files() or manifest.has_existing_files() else []
        entries = self._reader.entries(self._table, manifest)
        goes = [
            changes.removes_all or entry.data_file.file_path in changes.removed for entry in entries
        ]
        if not any(goes):
            return [manifest] if entries else []
        with self._writer(manifest) as writer:
            for entry, is_gone in zip(entries, goes, strict=True):
                if is_gone:
                    self._gone.append(entry.data_file)
                    writer.delete(entry)
                else:
                    writer.existing(entry)
        return [writer.to_manifest_file()]

    def _merged(self, manifests: list[iceberg.ManifestFile]) -> list[iceberg.ManifestFile]:
        found: list[iceberg.ManifestFile] = []
        for content in (Content.DATA, Content.DELETES):
            alike = [each for each in manifests if each.content == content]
            mine = [each for each in alike if each.added_snapshot_id == self._id]
            small = [each for each in alike if each not in mine and _count(each) is not None]
            if len(alike) <= _MANIFESTS_MAX or len(small) < 2:
                found += alike
                continue
            merged, left = _groups(small)
            found += [*mine, *[each for each in alike if each not in mine and each not in small]]
            found += left
            for group in merged:
                with self._writer(group[0]) as writer:
                    for manifest in group:
                        for entry in self._reader.entries(self._table, manifest):
                            writer.existing(entry)
                found.append(writer.to_manifest_file())
        return found

    def _manifest(
        self,
        content: iceberg.ManifestContent,
        status: iceberg.ManifestEntryStatus,
        files: Sequence[iceberg.DataFile],
        sequence: int | None,
    ) -> Iterable[iceberg.ManifestFile]:
        if not files:
            return
        with self._new_writer(content, self._table.metadata.default_spec_id) as writer:
            for file in files:
                writer.add(
                    iceberg.ManifestEntry.from_args(
                        status=status,
                        snapshot_id=self._id,
                        sequence_number=sequence,
                        file_sequence_number=None,
                        data_file=file,
                    )
                )
        yield writer.to_manifest_file()

    def _writer(self, manifest: iceberg.ManifestFile) -> iceberg.ManifestWriterV2:
        return self._new_writer(manifest.content, manifest.partition_spec_id)

    def _new_writer(
        self, content: iceberg.ManifestContent, spec_id: int
    ) -> iceberg.ManifestWriterV2:
        kind = iceberg.ManifestWriterV2 if content == Content.DATA else _DeleteManifestWriter
        place = self._place(f"{self._name}-m{self._written}.avro")
        self._written += 1
        spec = self._table.metadata.specs()[spec_id]
        return kind(spec, self._schema, self._table.io.new_output(place), self._id, _CODEC)

    def _place(self, name: str) -> str:
        return self._table.location_provider().new_metadata_location(name)

    def _summary(self, changes: Changes) -> iceberg.Summary:
        collector = iceberg.SnapshotSummaryCollector()
        spec = self._table.metadata.spec()
        for file in (*changes.added, *changes.deletes):
            collector.add_file(file, self._schema, spec)
        for file in self._gone:
            collector.remove_file(file, self._schema, spec)
        said = collector.build()
        before = self._table.metadata.current_snapshot()
        old = before.summary if before is not None else None
        for what, more, less in _TOTALS:
            known = "0" if before is None else None if old is None else old.get(what)
            if known is not None:
                said[what] = str(int(known) + int(said.get(more, 0)) - int(said.get(less, 0)))
        return iceberg.Summary(operation=changes.operation, **said)


_TOTALS: Final = (
    ("total-data-files", "added-data-files", "deleted-data-files"),
    ("total-delete-files", "added-delete-files", "removed-delete-files"),
    ("total-records", "added-records", "deleted-records"),
    ("total-files-size", "added-files-size", "removed-files-size"),
    ("total-equality-deletes", "added-equality-deletes", "removed-equality-deletes"),
    ("total-position-deletes", "added-position-deletes", "removed-position-deletes"),
)


def _count(manifest: iceberg.ManifestFile) -> int | None:
    """How many files a manifest names; None if it is large enough already."""
    count = (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)
    return count if count < _MERGED_ENTRIES_MAX else None


def _groups(
    manifests: list[iceberg.ManifestFile],
) -> tuple[list[list[iceberg.ManifestFile]], list[iceberg.ManifestFile]]:
    """Manifests of one partitioning to be merged, within the bound, and those left alone."""
    groups: list[list[iceberg.ManifestFile]] = []
    entries = 0
    for manifest in manifests:
        count = _count(manifest) or 0
        fits = groups and entries + count <= _MERGED_ENTRIES_MAX
        if fits and groups[-1][0].partition_spec_id == manifest.partition_spec_id:
            groups[-1].append(manifest)
            entries += count
        else:
            groups.append([manifest])
            entries = count
    merged = [group for group in groups if len(group) > 1]
    return merged, [group[0] for group in groups if len(group) == 1]
