"""How far a destination on disk has come: one small file that is the commit point.

Invariants: whatever the position names is durable before the position is; a position that was read
is durable before anything is counted as delivered because of it; a position names the consumer that
it is of, and no other consumer reads or replaces it. To another consumer it would say that messages
are there which never were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import xxhash

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, OperatorError
from cdc.failpoints import reached
from cdc.generation import Generation
from sinks.directory import make_directories, publish, sync_directory


def cursor_name(cursor: Cursor) -> str:
    """A cursor as a part of a file name: names sort as cursors do, on every file system."""
    return f"{cursor.lsn >> 32:08X}-{cursor.lsn & 0xFFFFFFFF:08X}-{cursor.idx:010d}"


def place_of(directory: Path, generation: Generation) -> Path:
    """The directory of a generation: beside the first one, whose readers must not see it."""
    return directory.with_name(generation.named(directory.name))


def point_to(pointer: Path, place: Path, generation: Generation) -> None:
    """Say at the first generation where the current one is; an older one changes nothing."""
    if generation.number == 1:
        return
    try:
        known = int(orjson.loads(pointer.read_bytes())["generation"])
    except FileNotFoundError:
        known = 1
    if known < generation.number:
        make_directories(pointer.parent)
        found = {"generation": generation.number, "path": str(place.absolute())}
        publish(pointer, orjson.dumps(found) + b"\n")


@dataclass(frozen=True)
class Position:
    """Everything at or below ``cursor`` is at the destination, in ``files``."""

    cursor: Cursor
    files: tuple[str, ...]  # those of the last commit
    file_bytes: int = 0  # for a destination that appends: the committed length of its one file
    truncation: int = 0  # cdc.generation: the one that the content belongs to
    truncating: bool = False  # whether content of an earlier truncation may still be there


class PositionFile:
    """The position of a destination, read and replaced under that destination's lock."""

    def __init__(self, path: Path, consumer: str) -> None:
        self._path = path
        self._consumer = consumer
        self._durable: bytes | None = None

    def read(self) -> Position | None:
        """The committed position, or none when nothing was ever committed."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        position = self._parse(content)
        if content != self._durable:
            # The writer may have died between the rename and the sync.
            sync_directory(self._path.parent)
            self._durable = content
        return position

    def commit(self, position: Position) -> None:
        """Make ``position`` the committed one."""
        body = orjson.dumps(
            {
                "consumer": self._consumer,
                "cursor": str(position.cursor),
                "files": position.files,
                "file_bytes": position.file_bytes,
                "truncation": position.truncation,
                "truncating": position.truncating,
            }
        )
        content = body + b"\n" + xxhash.xxh64_hexdigest(body).encode() + b"\n"
        publish(self._path, content)
        self._durable = content

    def truncate(self, generation: Generation, remove: Callable[[], None]) -> Position:
        """Empty the destination: first say so, then ``remove`` its content, then say it is done.

        After a crash in between the position still says so, and it is done again.
        """
        emptied = Position(ORIGIN, (), truncation=generation.truncation)
        self.commit(replace(emptied, truncating=True))
        reached("truncating")
        remove()
        self.commit(emptied)
        reached("truncated")
        return emptied

    def _parse(self, content: bytes) -> Position:
        body, _, check = content.partition(b"\n")
        if check.strip() != xxhash.xxh64_hexdigest(body).encode():
            raise CorruptionError(
                f"the position in {self._path} does not match its checksum",
                fix="restore the file, or move all that the destination holds elsewhere: delivery "
                "then goes on there from the consumer's cursor",
            )
        fields = orjson.loads(body)
        if fields["consumer"] != self._consumer:
            raise OperatorError(
                f"{self._path} is the position of the consumer {fields['consumer']}, not of "
                f"{self._consumer}",
                fix="give every consumer a directory of its own; if the sink was renamed, name it "
                f"{fields['consumer']} again, or point it at an empty directory",
            )
        return Position(
            Cursor.parse(fields["cursor"]),
            tuple(fields["files"]),
            fields["file_bytes"],
            fields["truncation"],
            fields["truncating"],
        )
