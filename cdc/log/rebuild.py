"""A manifest that was lost, made anew from the segments.

What must always hold: frames are taken only where they follow each other without a hole; of two
files for the same batches the one begun later counts. What nobody can know any more (what was
evicted, how many histories there were) is not guessed: the caller begins a new history.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError
from cdc.log.manifest import Manifest, SegmentInfo, segment_name
from cdc.log.segment import DATA, data_path, info_of, list_segments, map_file, parse_name, scan
from cdc.log.tier import Folder


def rebuild(directory: Path, place: str | None) -> Manifest | None:
    """The manifest that fits the files here and in the tier's ``place``; None without any."""
    places = _found(directory, place)
    chain = _chain(list(places))
    if not chain:
        return None
    segments: list[SegmentInfo] = []
    for current, following in pairwise(chain):
        segments.append(_sealed(directory, places[current], current, following[0]))
    first_batch, term, history = chain[-1]
    if places[chain[-1]]:
        # The tier holds only sealed segments: a new active one follows.
        segments.append(_sealed(directory, places[chain[-1]], chain[-1], None))
    return Manifest(
        term=term,
        history=history,
        earliest=_earliest(directory, chain[0], segments),
        start_batch=first_batch,
        segments=tuple(segments),
    )


def _earliest(directory: Path, name: tuple[int, int, int], segments: list[SegmentInfo]) -> Cursor:
    """Batch 0 means that nothing was ever removed; else the log is complete from its start on."""
    if segments or not name[0]:
        return segments[0].first if name[0] else ORIGIN
    found = scan(map_file(data_path(directory, segment_name(*name))), name[0], batches=1)
    return Cursor(*found.entries[0][4:6]) if found.entries else ORIGIN


def _found(directory: Path, place: str | None) -> dict[tuple[int, int, int], str]:
    """Where each segment lies; the log's own directory before the tier."""
    places: dict[tuple[int, int, int], str] = {}
    if place is not None:
        for file_name in Folder(place).names():
            name = parse_name(file_name)
            if name is not None and file_name.endswith(DATA):
                places[name] = place
    for stem in list_segments(directory):
        name = parse_name(stem + DATA)
        if name is not None:
            places[name] = ""
    return places


def _chain(names: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The segments that follow each other; terms and histories never go down along them."""
    chain: list[tuple[int, int, int]] = []
    for name in sorted(names):
        if chain and name[1:] < chain[-1][1:]:
            continue  # left over from before a cut
        if chain and name[0] == chain[-1][0]:
            chain.pop()
        chain.append(name)
    return chain


def _sealed(
    directory: Path, place: str, name: tuple[int, int, int], following: int | None
) -> SegmentInfo:
    first_batch, term, history = name
    path = data_path(directory, segment_name(*name))
    batches = None if following is None else following - first_batch
    if place:
        with Folder(place).open(path.name) as file:
            data, at = pa.py_buffer(file.read()), 0.0
    else:
        data, at = map_file(path), path.stat().st_mtime
    found = scan(data, first_batch, batches=batches)
    if not found.entries or batches not in (None, len(found.entries)):
        raise CorruptionError(
            f"the segment {path.name} is damaged at byte {found.end} of {data.size}, or one "
            "behind it is missing",
            fix="restore it from a copy, or remove the source's log directory to read "
            "again from the slot, which still holds everything above the restart cursor",
            kind="log_damaged",
        )
    return info_of(found, first_batch, term=term, history=history, at=at, place=place)
