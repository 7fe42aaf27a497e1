"""Whether a sealed segment is whole: the one place that decides it.

Its index must match the checksum in the manifest, and its frames their own and their entries. An
index that is damaged or gone can be made again from whole frames; a frame cannot. Invariant:
nothing is changed here, and a tier that cannot be reached is never taken for damage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import xxhash

from cdc.cursor import Cursor
from cdc.errors import CorruptionError
from cdc.log.frame import LOST_FIX, read_marker
from cdc.log.manifest import SegmentInfo
from cdc.log.segment import (
    DATA,
    data_path,
    high_of,
    index_entry,
    map_file,
    parse_index,
    scan,
)
from cdc.log.tier.segment_reader import (
    folder_at,
    index_matches,
    reaching,
    read_index,
    require_reachable,
)


@dataclass(frozen=True)
class CheckedSegment:
    """A sealed segment as it was found."""

    segment: SegmentInfo
    index: bytes  # of all frames in front of the damage
    index_stored: bool  # the index lies there as it must
    damaged_at: int | None  # the byte of the first frame that is not whole
    damaged_entry: bytes | None = None  # what the index says of that frame, if it can be believed

    @property
    def whole(self) -> bool:
        return self.damaged_at is None

    @property
    def whole_to(self) -> Cursor:
        """Up to where the segment can be read from its start."""
        kept = self.kept
        return self.segment.first if kept is None else kept.high

    @property
    def lost(self) -> tuple[Cursor, Cursor]:
        """The bounds of the damaged batch; of the rest of the segment if no index has them."""
        if self.damaged_entry is None:
            return self.whole_to, self.segment.high
        entry = parse_index(self.damaged_entry)[0]
        return Cursor(int(entry["first_lsn"]), int(entry["first_idx"])), high_of(entry)

    @property
    def kept(self) -> SegmentInfo | None:
        """The segment up to its damage; None if nothing stands before it."""
        entries = parse_index(self.index)
        if not len(entries):
            return None
        return replace(
            self.segment,
            batches=len(entries),
            rows=int(entries["rows"].sum()),
            bytes=int(entries["bytes"].sum()),
            high=high_of(entries[-1]),
            index_xxh3=xxhash.xxh3_64_intdigest(self.index),
        )

    @property
    def what(self) -> str:
        """The damage in words."""
        size = self.segment.bytes
        return f"{self.segment.name}{DATA} is damaged at byte {self.damaged_at} of {size}"

    def require_whole(self) -> None:
        if not self.whole:
            raise CorruptionError(
                f"the sealed segment {self.what}", fix=LOST_FIX, kind="log_damaged"
            )


def examine(directory: Path, segment: SegmentInfo, frames_above: Cursor | None) -> CheckedSegment:
    """Look at a segment, and at its frames that reach above ``frames_above`` (None: at none).

    Without a sound index all frames are read, because nothing else says where each one starts.
    """
    try:
        index = read_index(directory, segment)
    except FileNotFoundError:
        index = b""
    stored = index_matches(segment, index)
    if stored and frames_above is None and _size(directory, segment) >= segment.bytes:
        return CheckedSegment(segment, index, True, None)
    data = read_data(directory, segment)
    if not stored:
        found = scan(data, segment.first_batch, batches=segment.batches)
        damaged_at = None if index_matches(segment, found.index) else found.end
        return CheckedSegment(segment, found.index, False, damaged_at)
    for entry in parse_index(index):
        if frames_above is not None and high_of(entry) <= frames_above:
            continue
        offset = int(entry["offset"])
        marker = read_marker(data, offset)
        if marker is None or index_entry(marker, offset) != entry.item():
            at = int(entry["batch_idx"]) - segment.first_batch
            damaged = index[at * entry.nbytes : (at + 1) * entry.nbytes]
            return CheckedSegment(segment, index[: at * entry.nbytes], True, offset, damaged)
    return CheckedSegment(segment, index, True, None)


def read_data(directory: Path, segment: SegmentInfo) -> pa.Buffer:
    """The segment's bytes; none at all if they are gone, which is damage from its start on."""
    try:
        if segment.place:
            with reaching(segment.place):
                folder = folder_at(segment.place)
                return pa.py_buffer(folder.read(segment.name + DATA, segment.bytes))
        data = map_file(data_path(directory, segment.name))
        return data.slice(0, min(segment.bytes, data.size))
    except FileNotFoundError:
        require_reachable(segment.place)
        return pa.py_buffer(b"")


def _size(directory: Path, segment: SegmentInfo) -> int:
    try:
        if segment.place:
            with reaching(segment.place):
                return folder_at(segment.place).size(segment.name + DATA)
        return data_path(directory, segment.name).stat().st_size
    except FileNotFoundError:
        return 0
