"""A second place for sealed segments: a folder of another filesystem, local or remote.

Invariants: a segment counts as moved only after its copy was read back and matched; it
is never changed there afterwards. Each log has a folder of its own below the tier's URL, because
what the log does not know of in that folder is removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
import xxhash

from cdc.errors import OperatorError, TransientError
from cdc.log.files import TEMPORARY, make_directory, make_private, private, sync_directory

_CHUNK_BYTES = 4 << 20
# Beside the folder, which holds segments and nothing else.
_OWNER = ".owner"


@dataclass(frozen=True)
class TierSettings:
    """Where sealed segments go, and how many bytes of them stay in the log's directory."""

    url: str  # a URL that Arrow knows (file://, s3://, gs://, …) or a plain directory
    hot_bytes: int = 4 << 30

    def place_of(self, directory: Path) -> str:
        """The folder of the log in ``directory``: its name below the URL."""
        if "://" not in self.url:
            return str(Path(self.url).absolute() / directory.name)
        parts = urlsplit(self.url)
        return parts._replace(path=f"{parts.path.rstrip('/')}/{directory.name}").geturl()

    def require_elsewhere(self, directory: Path) -> None:
        """What the log does not know of in its folder is removed: that must not be the log."""
        place = self.place_of(directory)
        local = urlsplit(place).path if place.startswith("file:") else place
        if "://" in local:
            return
        folder, own = Path(unquote(local)).resolve(), directory.resolve()
        if folder == own or own in folder.parents:
            raise OperatorError(
                f"the tier's folder {folder} lies in the log's own directory",
                fix="set log.tier.url to a place outside log.directory",
            )


class Folder:
    """One folder of the tier: whole files go in, ranges come out."""

    def __init__(self, place: str) -> None:
        try:
            if "://" in place:
                self._files, self._path = pafs.FileSystem.from_uri(place)
            else:
                self._files, self._path = pafs.LocalFileSystem(), place
        except (OSError, pa.ArrowException) as error:
            raise TransientError(
                f"the log's tier at {place} cannot be opened: {error}",
                fix="check log.tier.url and that its host can be reached",
                kind="tier",
            ) from error
        self._local = isinstance(self._files, pafs.LocalFileSystem)

    def put(self, file_name: str, chunks: Iterator[pa.Buffer]) -> None:
        """Write a file, synced where that is possible, and read it back; a mismatch is an error."""
        self._put(f"{self._path}/{file_name}", chunks)

    def claim(self, log_id: str, known: str | None) -> None:
        """Say whose folder this is, before anything in it is believed or removed.

        ``known`` is a file that lies here if this is the place that the log means.
        """
        owner = self.owner()
        if owner == log_id:
            return
        if owner is not None:
            raise another_owner(self._path, owner)
        if known is not None and not self._exists(f"{self._path}/{known}"):
            raise OSError(f"{self._path} holds nothing of what was moved there: is it mounted?")
        self._put(f"{self._path}{_OWNER}", iter([pa.py_buffer(log_id.encode())]))

    def keep_private(self) -> None:
        """Where the folder is one of this machine, only the service's account may look into it."""
        if self._local:
            make_private(Path(self._path))

    def owner(self) -> str | None:
        """The log whose folder this is; None while it is not known."""
        path = f"{self._path}{_OWNER}"
        if not self._exists(path):
            return None
        with self._files.open_input_stream(path) as stream:
            owner: str = stream.read().decode()
        return owner

    def size(self, file_name: str) -> int:
        with self.open(file_name) as file:
            size: int = file.size()
        return size

    def modified_at(self, file_name: str) -> float | None:
        """When a file was written, in unix seconds, where the filesystem knows it."""
        found = self._files.get_file_info(f"{self._path}/{file_name}").mtime_ns
        return None if found is None else found / 1e9

    def _exists(self, path: str) -> bool:
        found: bool = self._files.get_file_info(path).type != pafs.FileType.NotFound
        return found

    def _put(self, path: str, chunks: Iterator[pa.Buffer]) -> None:
        writing = f"{path}{TEMPORARY}" if self._local else path
        if self._local:
            make_directory(Path(path).parent)
            with open(writing, "wb", opener=private):
                pass  # opened again below, it keeps its mode
        else:
            self._files.create_dir(os.path.dirname(path), recursive=True)
        written = xxhash.xxh3_64()
        with self._files.open_output_stream(writing) as stream:
            for chunk in chunks:
                stream.write(chunk)
                written.update(chunk)
        if self._local:
            # It takes its name only whole and on disk; elsewhere closing is what makes a file.
            with open(writing, "rb") as file:
                os.fsync(file.fileno())
            os.replace(writing, path)
            sync_directory(Path(path).parent)
        found = xxhash.xxh3_64()
        with self._files.open_input_stream(path) as stream:
            while data := stream.read(_CHUNK_BYTES):
                found.update(data)
        if found.digest() != written.digest():
            raise OSError(f"the copy at {path} does not match what was written")

    def open(self, file_name: str) -> pa.NativeFile:
        """Open for reading by ranges; FileNotFoundError if it is not there."""
        return self._files.open_input_file(f"{self._path}/{file_name}")

    def read(self, file_name: str, size: int | None = None) -> bytes:
        """A file, or its first ``size`` bytes."""
        with self.open(file_name) as file:
            data: bytes = file.read(size)
        return data

    def names(self) -> list[str]:
        found = self._files.get_file_info(pafs.FileSelector(self._path, allow_not_found=True))
        return sorted(file.base_name for file in found if file.is_file)

    def delete(self, file_name: str) -> None:
        """Remove a file; one that is not there needs no removing."""
        path = f"{self._path}/{file_name}"
        if self._exists(path):
            self._files.delete_file(path)


def another_owner(place: str, owner: str) -> OperatorError:
    return OperatorError(
        f"the tier's folder {place} belongs to another log ({owner})",
        fix="give each service a log.tier.url of its own; if that folder is this log's and its "
        f"directory was lost, remove the file {place}{_OWNER}",
        kind="tier_owner",
    )


def chunks_of(buffer: pa.Buffer) -> Iterator[pa.Buffer]:
    """The buffer in pieces, so that copying one can be stopped."""
    for start in range(0, buffer.size, _CHUNK_BYTES):
        yield buffer.slice(start, min(_CHUNK_BYTES, buffer.size - start))
