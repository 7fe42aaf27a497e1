"""Old snapshots expire, and files that none of the others has are removed.

Invariants: a snapshot that a branch or a tag names stays; a file goes only if no snapshot that is
left names it and it is older than the time that versions are kept, so that files of a commit under
way stay. What a crash has left behind goes in the same way. Only what lies below the table's own
location is looked at.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow.fs as pafs

from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.iceberg.disk import SyncedFiles, path_of
from sinks.lakehouse.iceberg.stores import StoreFileIO

SNAPSHOTS_MAX: Final = 500
"""Each commit writes the names of all snapshots, so there are never more."""

_REMOVED_MAX: Final = 20_000  # files at a time


def too_many(metadata: iceberg.TableMetadata) -> Sequence[iceberg.TableUpdate]:
    """What a commit removes, so that there are not too many snapshots: a tenth, the oldest."""
    if len(metadata.snapshots) < SNAPSHOTS_MAX:
        return ()
    return _removal(_unnamed(metadata)[: SNAPSHOTS_MAX // 10])


def expired(metadata: iceberg.TableMetadata, retain_hours: int) -> Sequence[iceberg.TableUpdate]:
    """What removes the snapshots that are older than that."""
    since_ms = (time.time() - retain_hours * 3600) * 1000
    return _removal([each for each in _unnamed(metadata) if each.timestamp_ms < since_ms])


def forgotten(before: iceberg.TableMetadata, after: iceberg.TableMetadata) -> set[str]:
    """Metadata files of older versions that a commit has dropped from the table's own list."""
    known = {entry.metadata_file for entry in after.metadata_log}
    return {entry.metadata_file for entry in before.metadata_log} - known


def remove_unnamed_files(table: iceberg.Table, retain_hours: int) -> int:
    """Remove files that no snapshot of the table names. Returns how many."""
    since_s = time.time() - retain_hours * 3600
    named = {_path_in(table.io, location) for location in _named(table)}
    removed = 0
    for location, changed_s in _listed(table):
        if changed_s < since_s and _path_in(table.io, location) not in named:
            table.io.delete(location)
            removed += 1
            if removed == _REMOVED_MAX:
                break
    return removed


def remove_all_files(io: iceberg.FileIO, location: str) -> None:
    """Remove the files of a table that no catalog names any more; there may be none."""
    if isinstance(io, SyncedFiles):
        shutil.rmtree(path_of(location), ignore_errors=not path_of(location).exists())
        return
    assert isinstance(io, StoreFileIO)
    scheme, netloc, folder = io.parse_location(location)
    with suppress(FileNotFoundError):
        io.fs_by_scheme(scheme, netloc).delete_dir(folder)


def _unnamed(metadata: iceberg.TableMetadata) -> list[iceberg.Snapshot]:
    """The snapshots that no branch and no tag names, the oldest first."""
    named = {ref.snapshot_id for ref in metadata.refs.values()}
    found = [each for each in metadata.snapshots if each.snapshot_id not in named]
    return sorted(found, key=lambda each: each.timestamp_ms)


def _removal(snapshots: Sequence[iceberg.Snapshot]) -> Sequence[iceberg.TableUpdate]:
    if not snapshots:
        return ()
    ids = [each.snapshot_id for each in snapshots]
    return (iceberg.RemoveSnapshotsUpdate.model_validate({"snapshot-ids": ids}),)


def _named(table: iceberg.Table) -> Iterator[str]:
    """Every file that the table's metadata names, the metadata files too."""
    metadata = table.metadata
    yield table.metadata_location
    yield from (entry.metadata_file for entry in metadata.metadata_log)
    yield from (each.statistics_path for each in metadata.statistics)
    read: set[str] = set()
    for snapshot in metadata.snapshots:
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path in read:
                continue
            read.add(manifest.manifest_path)
            yield manifest.manifest_path
            for entry in manifest.fetch_manifest_entry(table.io):
                yield entry.data_file.file_path


def _listed(table: iceberg.Table) -> Iterator[tuple[str, float]]:
    """Every file below the location of the table, and when it was last changed."""
    location = table.location()
    if isinstance(table.io, SyncedFiles):
        for path in _files_below(path_of(location)):
            yield str(path), path.stat().st_mtime
        return
    assert isinstance(table.io, StoreFileIO)
    scheme, netloc, folder = table.io.parse_location(location)
    store = table.io.fs_by_scheme(scheme, netloc)
    for info in store.get_file_info(pafs.FileSelector(folder, recursive=True)):
        if info.type == pafs.FileType.File:
            yield f"{scheme}://{info.path}", info.mtime.timestamp()


def _files_below(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*") if path.is_file())


def _path_in(io: iceberg.FileIO, location: str) -> str:
    """A location without its scheme and its account: s3 and s3a name the same."""
    if isinstance(io, StoreFileIO):
        return io.parse_location(location)[2]
    return str(path_of(location))
