"""The records of a source's deliveries as files beside its change log: written, and read back.

The current file is appended to, one line of JSON per record; a full one is compressed, and its name
says which cursors it speaks of. The oldest go when all together take more than their bound.

Invariants: records are written before what they speak of is settled, so what is settled has one,
as long as it is kept and the machine did not lose power. A disk that takes no records stops no
delivery; the next line that it takes counts those that are missing.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import pyarrow as pa
import structlog

from cdc.cursor import END, ORIGIN, Cursor
from cdc.error_text import public_text
from cdc.log.files import FILE_MODE, make_private, write_synced
from cdc.trace.records import Line, cursors_of

_logger = structlog.get_logger("walbrook.trace")

FOLDER: Final = "deliveries"
"""The folder within the directory of a source's log."""
RECORDS_BYTES: Final = 64 << 20
"""How much the records of one source take, if the configuration says nothing."""
_FILE_BYTES: Final = 8 << 20
_FILES_MIN: Final = 4  # of which the bound is made, so that little goes at once
_CODEC: Final = "zstd"
_OPEN = re.compile(r"(\d{12})\.jsonl")
_SEALED = re.compile(r"(\d{12})-(\d+)\.(\d+)-(\d+)\.(\d+)\.jsonl\.zst")


class RecordWriter:
    """Appends for one source. All methods may be called from any thread."""

    def __init__(self, log_directory: Path, bytes_max: int = RECORDS_BYTES) -> None:
        """With ``bytes_max`` 0 nothing is kept."""
        self._directory = log_directory / FOLDER
        self._bytes_max = bytes_max
        self._file_bytes = max(1, min(_FILE_BYTES, bytes_max // _FILES_MIN))
        self._lock = threading.Lock()
        self._handle = -1
        self._path = Path()
        self._size = 0
        self._bounds: tuple[Cursor, Cursor] | None = None
        self._missing = 0

    def append(self, lines: Sequence[Line]) -> None:
        """Write these lines at once; what cannot be written is counted."""
        if not lines or not self._bytes_max:
            return
        with self._lock:
            try:
                self._append(lines)
            except Exception as error:  # most often of the disk; what is delivered is settled
                if not self._missing:
                    what = public_text(error)
                    _logger.warning("trace.unwritten", directory=str(self._directory), error=what)
                self._missing += len(lines)
                self._let_go()

    def close(self) -> None:
        with self._lock:
            self._let_go()

    def _append(self, lines: Sequence[Line]) -> None:
        if self._handle >= 0 and self._size >= self._file_bytes:
            self._seal()
        if self._handle < 0:
            self._open()
        if self._missing:
            lines = [{"kind": "missing", "records": self._missing}, *lines]
        data = b"".join(
            orjson.dumps(line, default=list, option=orjson.OPT_APPEND_NEWLINE) for line in lines
        )
        written = os.write(self._handle, data)
        self._size += written
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were taken")
        self._missing = 0
        for line in lines:
            self._bounds = _widened(self._bounds, cursors_of(line))

    def _open(self) -> None:
        """Go on in the file that an earlier process left, or begin one."""
        make_private(self._directory)
        files = list_files(self._directory)
        last = files[-1] if files else None
        goes_on = last is not None and last.bounds is None
        number = 0 if last is None else last.number + (not goes_on)
        self._path = self._directory / f"{number:012}.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._handle = os.open(self._path, flags, FILE_MODE)
        self._size, self._bounds = os.fstat(self._handle).st_size, None
        if self._size:
            # A process that was killed may have left half a line.
            self._size += os.write(self._handle, b"\n")
            for line in _read(self._path).lines:
                self._bounds = _widened(self._bounds, cursors_of(line))

    def _seal(self) -> None:
        """Compress the file under a name that says what it speaks of, and begin another one."""
        (low, high), number = self._bounds or (ORIGIN, END), self._path.name[:12]
        name = f"{number}-{low.lsn}.{low.idx}-{high.lsn}.{high.idx}.jsonl.zst"
        data = self._path.read_bytes()
        packed = pa.compress(data, codec=_CODEC, asbytes=True)
        write_synced(self._path.with_name(name), len(data).to_bytes(8, "little") + packed)
        self._let_go()
        self._path.unlink()
        self._trim()

    def _trim(self) -> None:
        files = list_files(self._directory)
        left = sum(file.size for file in files) + self._file_bytes
        for file in files:
            if left <= self._bytes_max:
                return
            file.path.unlink()
            left -= file.size

    def _let_go(self) -> None:
        if self._handle >= 0:
            with suppress(OSError):
                os.close(self._handle)
        self._handle = -1


@dataclass(frozen=True)
class RecordFile:
    """A file of records; ``bounds`` are None while it is written."""

    path: Path
    number: int
    size: int
    bounds: tuple[Cursor, Cursor] | None

    def may_have(self, cursor: Cursor) -> bool:
        return self.bounds is None or self.bounds[0] <= cursor <= self.bounds[1]


@dataclass(frozen=True)
class RecordLines:
    """What a file holds; ``damaged`` counts lines that cannot be read."""

    lines: tuple[Line, ...]
    damaged: int = 0


class RecordReader:
    """Reads the records of one source; what was read of a sealed file is kept."""

    def __init__(self, log_directory: Path) -> None:
        self._directory = log_directory / FOLDER
        self._read: dict[tuple[str, int], RecordLines] = {}

    def about(self, cursor: Cursor) -> tuple[list[RecordLines], bool]:
        """The files that may speak of a cursor, the oldest first; and whether older ones are gone.

        A file that is sealed or removed meanwhile is looked up again.
        """
        while True:
            files = list_files(self._directory)
            wanted = [file.may_have(cursor) for file in files]
            # That something was settled may stand in the file behind it.
            wanted = [one or before for one, before in zip(wanted, [False, *wanted], strict=False)]
            try:
                found = [
                    self._lines(file)
                    for file, is_wanted in zip(files, wanted, strict=True)
                    if is_wanted
                ]
            except FileNotFoundError:
                continue
            return found, bool(files) and files[0].number > 0

    def _lines(self, file: RecordFile) -> RecordLines:
        key = file.path.name, file.size
        if key not in self._read:
            self._read = {known: lines for known, lines in self._read.items() if known[0] != key[0]}
            self._read[key] = _read(file.path)
        return self._read[key]


def list_files(directory: Path) -> list[RecordFile]:
    """The files of records, the oldest first."""
    found: dict[int, RecordFile] = {}
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    for name in names:
        is_open, sealed = _OPEN.fullmatch(name), _SEALED.fullmatch(name)
        path, bounds = directory / name, None
        if sealed is not None:
            low_lsn, low_idx, high_lsn, high_idx = map(int, sealed.groups()[1:])
            bounds = Cursor(low_lsn, low_idx), Cursor(high_lsn, high_idx)
        elif is_open is None:
            continue
        number = int(name[:12])
        # A process that ended while it sealed has left both: the sealed one is whole.
        if number not in found or bounds is not None:
            with suppress(FileNotFoundError):
                found[number] = RecordFile(path, number, path.stat().st_size, bounds)
    return [found[number] for number in sorted(found)]


def _read(path: Path) -> RecordLines:
    data = path.read_bytes()
    if path.name.endswith(".zst"):
        size = int.from_bytes(data[:8], "little")
        data = pa.decompress(data[8:], decompressed_size=size, codec=_CODEC, asbytes=True)
    lines: list[Line] = []
    damaged = 0
    for text in data.split(b"\n"):
        if not text:
            continue
        try:
            lines.append(orjson.loads(text))
        except orjson.JSONDecodeError:
            damaged += 1
    return RecordLines(tuple(lines), damaged)


def _widened(
    one: tuple[Cursor, Cursor] | None, other: tuple[Cursor, Cursor] | None
) -> tuple[Cursor, Cursor] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])
