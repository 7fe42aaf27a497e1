"""Files of JSON lines: one message a line, in cursor order, each message once.

The directory holds ``changes-<first cursor>.jsonl`` files, which sort in the order they were
written, and ``.position``, the commit point: the file, its committed length and the last cursor.
Invariants: bytes beyond the committed length were never counted as delivered, and are
cut off before anything is appended. Another process may deliver, or die delivering, between two
deliveries: the folder is listed for what it left behind whenever the lock was in other hands. A
file that an operator moved away is not missed; it is the position that says what was delivered.

A new generation is a directory of its own beside the first, ``<path>.generation-2``.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import MessageBatch
from cdc.cursor import ORIGIN, Cursor
from cdc.cursor_columns import prefix_at_or_below
from cdc.decoding.joins import joined
from cdc.errors import CorruptionError, WalbrookError
from cdc.generation import FIRST, Generation
from sinks.base import Delivery
from sinks.columns import pieces, text_bytes
from sinks.directory import (
    disk_error,
    locked,
    make_directories,
    new_holder,
    probe_directory,
    refuse_strangers,
    sync_directory,
    write_all,
)
from sinks.position import Position, PositionFile, cursor_name, place_of, point_to

_APPEND_BYTES_MAX = 32 << 20
_PRINTED = 0x20
"""Below it are control characters, of which JSON has none but line breaks and tabs as spacing."""


class FileSink:
    """Appends to rolling files in one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        consumer: str,
        rotate_bytes: int,
        generation: Generation = FIRST,
        lock_wait_s: float = 30.0,
    ) -> None:
        self._directory = place_of(directory, generation)
        self._pointer = directory / ".generation"
        self._generation = generation
        self._rotate_bytes = rotate_bytes
        self._lock_wait_s = lock_wait_s
        self._position = PositionFile(self._directory / ".position", consumer)
        self._holder = new_holder()
        self._clean = False  # whether our last delivery left nothing uncommitted

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Append what the files do not hold yet, and commit it."""
        settled = absorbed = 0
        top: Cursor | None = None
        try:
            make_directories(self._directory)
            with locked(
                self._directory / ".lock", wait_s=self._lock_wait_s, holder=self._holder
            ) as undisturbed:
                listed, self._clean = not (undisturbed and self._clean), False
                position = self._recover(listed=listed)
                top = position.cursor
                settled = absorbed = prefix_at_or_below(batch.rows, position.cursor)
                rest = batch.slice(absorbed)
                for piece, _ in pieces(
                    rest,
                    batch.shape.message_parts,
                    messages_max=len(rest),
                    bytes_max=_APPEND_BYTES_MAX,
                ):
                    position = self._append(position, piece)
                    settled += len(piece)
                self._clean = True
        except OSError as error:
            return Delivery(settled, absorbed, disk_error(self._directory, error), top=top)
        except WalbrookError as error:
            return Delivery(settled, absorbed, error, top=top)
        return Delivery(settled, absorbed, top=top)

    def probe(self) -> str:
        """Whether the directory can be written to and is this consumer's; nothing is made there."""
        found = probe_directory(self._directory)
        if self._directory.is_dir() and self._position.read() is None:
            refuse_strangers(self._directory, _is_data)
        return f"{self._directory} {found}"

    def close(self) -> None:
        """Nothing stays open between deliveries."""

    def _append(self, position: Position, piece: MessageBatch) -> Position:
        lines = memoryview(_lines(piece))
        file, start = position.files[0] if position.files else "", position.file_bytes
        if not file or start >= self._rotate_bytes or not (self._directory / file).exists():
            file, start = f"changes-{cursor_name(piece.cursor(0))}.jsonl", 0
        flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_APPEND if start else os.O_CREAT | os.O_TRUNC)
        descriptor = os.open(self._directory / file, flags, 0o644)
        try:
            write_all(descriptor, lines)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if not start:
            sync_directory(self._directory)
        committed = Position(
            piece.cursor(-1), (file,), start + len(lines), self._generation.truncation
        )
        self._position.commit(committed)
        return committed

    def _recover(self, *, listed: bool) -> Position:
        """The committed position, once nothing uncommitted is left behind it.

        Unless ``listed``, no file can be there that is not committed.
        """
        position = self._position.read()
        if position is None:
            refuse_strangers(self._directory, _is_data)
            point_to(self._pointer, self._directory, self._generation)
            position = Position(ORIGIN, (), truncation=self._generation.truncation)
            self._position.commit(position)
        if self._generation.must_empty(position.truncation) or position.truncating:
            position = self._position.truncate(self._generation, self._remove_all)
        if listed:
            for name in filter(_is_data, os.listdir(self._directory)):
                if not position.files or name > position.files[0]:
                    os.unlink(self._directory / name)
        if position.files:
            _cut(self._directory / position.files[0], position.file_bytes)
        return position

    def _remove_all(self) -> None:
        for name in filter(_is_data, os.listdir(self._directory)):
            os.unlink(self._directory / name)
        sync_directory(self._directory)


def _is_data(name: str) -> bool:
    return name.startswith("changes-") and name.endswith(".jsonl")


def _cut(path: Path, committed_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return
    if found < committed_bytes:
        raise CorruptionError(
            f"{path} holds {found} bytes, but {committed_bytes} were committed",
            fix="restore it, or move it away: delivery goes on in a new file, and the loss stays",
        )
    if found > committed_bytes:
        os.truncate(path, committed_bytes)


def _lines(batch: MessageBatch) -> pa.Buffer:
    lines = text_bytes(batch.messages("\n"))
    octets = np.frombuffer(lines, dtype=np.uint8)
    if np.count_nonzero(octets < _PRINTED) == len(batch):
        return lines
    # A json column keeps its own spacing, line breaks included; outside of strings they are
    # only spacing, and inside strings JSON has none.
    shaped = batch.messages()
    for line_break in ("\n", "\r"):
        shaped = pc.replace_substring(shaped, line_break, " ")
    return text_bytes(joined(shaped, "\n"))
