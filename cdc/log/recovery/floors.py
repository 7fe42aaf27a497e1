"""What of a lost manifest could not be read from the segments: floors, term, and whose log it is.

Invariant: it is written before the manifest that says the same, so a rebuilt manifest
never promises what was already let go, and never takes another log's segments for its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from cdc.cursor import Cursor
from cdc.log.files import give_up_spare, write_synced
from cdc.log.manifest import Manifest

FILE_NAME = "floors"


@dataclass(frozen=True)
class Floors:
    """As in the manifest."""

    log_id: str
    term: int
    earliest: Cursor
    evicted: Cursor


def floors_of(manifest: Manifest) -> Floors:
    return Floors(manifest.log_id, manifest.term, manifest.earliest, manifest.evicted)


def new_log_id() -> str:
    """What tells one log from all others, wherever its segments lie."""
    return os.urandom(16).hex()


def write_floors(directory: Path, floors: Floors) -> None:
    body = orjson.dumps(floors, default=tuple)
    write_synced(directory / FILE_NAME, b"%016x %b\n" % (xxhash.xxh3_64_intdigest(body), body))


def read_floors(directory: Path) -> Floors | None:
    """What was written last; None if there is nothing that can be believed."""
    try:
        data = (directory / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return None
    body = data[17:-1]
    if data != b"%016x %b\n" % (xxhash.xxh3_64_intdigest(body), body):
        return None
    fields = orjson.loads(body)
    return Floors(
        fields["log_id"],
        fields["term"],
        Cursor(*fields["earliest"]),
        Cursor(*fields["evicted"]),
    )


def keep_floors(directory: Path, manifest: Manifest) -> None:
    """Write them unless they are there already; on a full disk the spare gives the room."""
    floors = floors_of(manifest)
    if read_floors(directory) == floors:
        return
    try:
        write_floors(directory, floors)
    except OSError as error:
        if not give_up_spare(directory, error):
            raise
        write_floors(directory, floors)
