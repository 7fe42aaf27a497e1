"""Files on a disk as the Iceberg library reads and writes them, durable when they are closed.

The library's own file access does not sync. A table whose catalog names a metadata file that a
power cut has taken is lost, so the names and contents of all files are synced before any catalog
names them.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from sinks.directory import make_directories, sync_directory
from sinks.lakehouse.iceberg import library as iceberg

_SCHEME = "file://"


def location_of(path: Path) -> str:
    """The location of a folder on this disk, as the library and other engines write it."""
    return f"{_SCHEME}{path.absolute()}"


def path_of(location: str) -> Path:
    """The path that a location on this disk means."""
    return Path(location.removeprefix(_SCHEME))


class _Synced:
    """A new file that is durable, with its name, once it is closed."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        make_directories(path.parent)
        self._path = path
        self._file: BinaryIO = path.open("wb" if overwrite else "xb")

    def write(self, data: bytes) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        if self._file.closed:
            return
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        sync_directory(self._path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Input(iceberg.InputFile):
    def __len__(self) -> int:
        return path_of(self.location).stat().st_size

    def exists(self) -> bool:
        return path_of(self.location).exists()

    def open(self, seekable: bool = True) -> BinaryIO:
        return path_of(self.location).open("rb")


class _Output(iceberg.OutputFile):
    def __len__(self) -> int:
        return path_of(self.location).stat().st_size

    def exists(self) -> bool:
        return path_of(self.location).exists()

    def to_input_file(self) -> _Input:
        return _Input(self.location)

    def create(self, overwrite: bool = False) -> _Synced:
        return _Synced(path_of(self.location), overwrite=overwrite)


class SyncedFiles(iceberg.FileIO):
    """The library's setting for tables on a disk."""

    def new_input(self, location: str) -> _Input:
        return _Input(location)

    def new_output(self, location: str) -> _Output:
        return _Output(location)

    def delete(self, location: str | iceberg.InputFile | iceberg.OutputFile) -> None:
        path_of(location if isinstance(location, str) else location.location).unlink()
