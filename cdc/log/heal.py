"""Finding the first damaged frame among those that may still be needed.

Data is read and checked in full, one segment at a time; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import xxhash

from cdc.cursor import Cursor
from cdc.log.manifest import SegmentInfo
from cdc.log.segment import DATA, data_path, info_of, map_file, scan
from cdc.log.tier import Folder


@dataclass(frozen=True)
class Damage:
    """Where the damage is, and the segments before it; the last one cut at its last whole frame."""

    where: str
    kept: tuple[SegmentInfo, ...]


def find_damage(
    directory: Path, segments: Sequence[SegmentInfo], unsettled_from: Cursor
) -> Damage | None:
    """The first damage in a segment that reaches above ``unsettled_from``."""
    for position, segment in enumerate(segments):
        if segment.high <= unsettled_from:
            continue
        found = scan(_data(directory, segment), segment.first_batch, batches=segment.batches)
        if xxhash.xxh3_64_intdigest(found.index) == segment.index_xxh3:
            continue
        kept = tuple(segments[:position])
        if found.entries:
            whole = info_of(
                found,
                segment.first_batch,
                term=segment.term,
                history=segment.history,
                at=segment.sealed_at,
            )
            kept = (*kept, replace(whole, place=segment.place))
        return Damage(f"{segment.name}{DATA} at byte {found.end}", kept)
    return None


def _data(directory: Path, segment: SegmentInfo) -> pa.Buffer:
    """The segment's bytes; none at all if they are gone, which is damage from its start on."""
    try:
        if segment.place:
            return pa.py_buffer(Folder(segment.place).read(segment.name + DATA, segment.bytes))
        data = map_file(data_path(directory, segment.name))
        return data.slice(0, min(segment.bytes, data.size))
    except FileNotFoundError:
        return pa.py_buffer(b"")
