"""The active segment as an earlier process left it, read and not changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cdc.cursor import Cursor
from cdc.log.manifest import Manifest
from cdc.log.segment import (
    DATA,
    ENTRY_BYTES,
    Scan,
    data_path,
    index_path,
    map_file,
    parse_index,
    scan,
    widened,
)


@dataclass(frozen=True)
class ActiveScan:
    """Both files, and what the frames up to the first that is not whole say."""

    data_path: Path
    data: pa.Buffer
    index: bytes
    first_batch: int
    sealed_end: Cursor
    scan: Scan

    @property
    def end(self) -> Cursor:
        return self.scan.high if self.scan.entries else self.sealed_end

    @property
    def next_batch(self) -> int:
        """The batch that was not found whole."""
        return self.first_batch + len(self.scan.entries)

    @property
    def indexed(self) -> int:
        """How many batches readers could have seen."""
        return len(self.index) // ENTRY_BYTES

    @property
    def is_exact(self) -> bool:
        """Whether the files hold the whole frames, and nothing else."""
        return (
            self.data_path.exists()
            and self.data.size == self.scan.end
            and self.index == self.scan.index
        )

    @property
    def where(self) -> str:
        return f"{self.data_path.stem}{DATA} is damaged at byte {self.scan.end} of {self.data.size}"

    def described(self, synced: Cursor) -> Scan:
        """All frames, those that are not whole as the index has them, up to what was ``synced``."""
        found, index = self.scan, parse_index(self.index).tolist()
        while (at := len(found.entries)) < len(index):
            entry = index[at]
            start, high = Cursor(*entry[4:6]), Cursor(*entry[6:8])
            end = found.high if found.entries else self.sealed_end
            follows = entry[:2] == (self.first_batch + at, found.end) and end <= start <= high
            if not follows or entry[2] <= 0 or high > synced:
                break
            more = scan(self.data, self.first_batch + at + 1, start=found.end + entry[2])
            found = Scan(
                [*found.entries, entry, *more.entries],
                more.end,
                found.rows + entry[3] + more.rows,
                widened(found.commits, more.commits),
            )
        return found


def find_active(directory: Path, manifest: Manifest) -> ActiveScan:
    name = manifest.active_name
    path, index = data_path(directory, name), index_path(directory, name)
    data = map_file(path) if path.exists() else pa.py_buffer(b"")
    return ActiveScan(
        data_path=path,
        data=data,
        index=index.read_bytes() if index.exists() else b"",
        first_batch=manifest.next_batch,
        sealed_end=manifest.end,
        scan=scan(data, manifest.next_batch),
    )
