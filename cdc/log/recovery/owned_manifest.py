"""The manifest in its writer's hands.

Invariant: it is swapped only while no newer term has written it, the floors go to disk
before it, and a little room is kept for the next swap on a disk that is full.
"""

from __future__ import annotations

from pathlib import Path

from cdc.errors import CorruptionError, OperatorError
from cdc.log.files import keep_spare, sync_directory
from cdc.log.manifest import FILE_NAME, Manifest, read_manifest, stamp_of, swap_manifest
from cdc.log.recovery.floors import keep_floors

_SEGMENT_BYTES = 256  # what a segment takes in the manifest, at most


class UnsureError(OSError):
    """The manifest has taken its place, but it may not survive a crash."""


class OwnedManifest:
    """The current manifest, and how it is replaced."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """``manifest`` is what lies in ``directory``."""
        self._directory = directory
        self._path = str(directory / FILE_NAME)
        self._take(manifest)
        self._stamp = stamp_of(self._path)
        self.keep_spare()

    @property
    def is_own(self) -> bool:
        """Whether no other process has written it."""
        return stamp_of(self._path) == self._stamp

    def require(self) -> None:
        """Refuse to go on once a newer term has written the manifest."""
        if self.is_own:
            return
        try:
            found = read_manifest(self._directory)
        except CorruptionError:
            found = None
        if found is not None and found.term >= self.current.term:
            raise fenced(self._directory, found.term, self.current.term)
        # Removed, or written by an older term that woke between its check and its swap.
        self._put(self.current)

    def swap(self, manifest: Manifest) -> None:
        self.require()
        self._put(manifest)

    def keep_spare(self) -> None:
        """Reserve room for the next swap, where there is any."""
        keep_spare(self._directory, len(self.current.segments) * _SEGMENT_BYTES)

    def _put(self, manifest: Manifest) -> None:
        keep_floors(self._directory, manifest)
        swap_manifest(self._directory, manifest)
        self._take(manifest)
        try:
            self._stamp = stamp_of(self._path)
            sync_directory(self._directory)
        except OSError as error:
            raise UnsureError(error.errno, error.strerror) from error

    def _take(self, manifest: Manifest) -> None:
        self.current = manifest
        self.bytes = sum(segment.bytes for segment in manifest.segments)


def fenced(directory: Path, other: int, own: int) -> OperatorError:
    return OperatorError(
        f"the log in {directory} is written by term {other}; this is term {own}",
        fix="stop this service if a newer one has taken over. If there is none, the log belongs to "
        "another state database: give this one another log.directory, or empty that one",
        kind="fenced",
    )
