"""Rebuilding a lost manifest from the segments.

Invariants: frames are taken only where they follow each other without a hole; of two
files for the same batches the one begun later counts. Floors come from the file that was kept for
this; without it the log begins at its first batch, which is never too low. How many histories there
were cannot be known: the caller begins a new one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from cdc.cursor import ORIGIN
from cdc.errors import CorruptionError
from cdc.log.frame import LOST_FIX
from cdc.log.manifest import Manifest, SegmentInfo, segment_name
from cdc.log.recovery.floors import Floors
from cdc.log.segment import (
    DATA,
    Scan,
    data_path,
    info_of,
    list_segments,
    map_file,
    parse_name,
    scan,
)
from cdc.log.tier.segment_reader import folder_at, reaching
from cdc.log.tier.tier import another_owner


def rebuild(directory: Path, place: str | None, floors: Floors | None) -> Manifest | None:
    """The manifest that fits the files here and in the tier's ``place``; None without any."""
    places = _found(directory, place, floors)
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
    active = _active(directory, chain[-1]) if not places[chain[-1]] else Scan([], 0, 0, (0, 0))
    found = Manifest(term=term, history=history, start_batch=first_batch, segments=tuple(segments))
    if floors is None:
        first = segments[0].first if segments else active.first
        return replace(found, earliest=first or ORIGIN)
    # What lies below the floor was let go before its files were.
    kept = tuple(segment for segment in segments if segment.high > floors.earliest)
    if not kept and active.entries and active.high <= floors.earliest:
        found = replace(found, start_batch=first_batch + len(active.entries))
    elif not kept and segments:
        found = replace(found, start_batch=segments[-1].next_batch)
    return replace(
        found,
        segments=kept,
        earliest=floors.earliest,
        evicted=floors.evicted,
        log_id=floors.log_id,
    )


def _active(directory: Path, name: tuple[int, int, int]) -> Scan:
    return scan(map_file(data_path(directory, segment_name(*name))), name[0])


def _found(
    directory: Path, place: str | None, floors: Floors | None
) -> dict[tuple[int, int, int], str]:
    """Where each segment lies; the log's own directory before the tier."""
    places: dict[tuple[int, int, int], str] = {}
    if place is not None:
        for file_name in _cold(place, "" if floors is None else floors.log_id):
            name = parse_name(file_name)
            if name is not None and file_name.endswith(DATA):
                places[name] = place
    for stem in list_segments(directory):
        name = parse_name(stem + DATA)
        if name is not None:
            places[name] = ""
    return places


def _cold(place: str, log_id: str) -> list[str]:
    """The files in the tier's folder, which must not be another log's."""
    with reaching(place):
        folder = folder_at(place)
        owner = folder.owner()
        if owner not in (None, log_id):
            raise another_owner(place, owner or "")
        return folder.names()


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
        with reaching(place):
            folder = folder_at(place)
            data = pa.py_buffer(folder.read(path.name))
            at = folder.modified_at(path.name) or time.time()
    else:
        data, at = map_file(path), path.stat().st_mtime
    found = scan(data, first_batch, batches=batches)
    if not found.entries or batches not in (None, len(found.entries)):
        raise CorruptionError(
            f"the segment {path.name} is damaged at byte {found.end} of {data.size}, or one "
            "behind it is missing",
            fix=LOST_FIX,
            kind="log_damaged",
        )
    return info_of(found, first_batch, term=term, history=history, at=at, place=place)
