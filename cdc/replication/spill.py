"""Where the rows of transactions wait that are sent before they end: a folder beside the log.

What must always hold:

- The rows of a prepared transaction are on disk, and found again after a crash, from the moment
  ``prepare`` returns until the source was told a position beyond its commit. Until then it may
  send the outcome again, and without the rows.
- Those of a transaction that is only streamed are gone with the connection: the source streams it
  again.
- The folder never holds more than ``bytes_max``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import xxhash

from cdc.cursor import format_lsn
from cdc.errors import CorruptionError, GapError, OperatorError, TransientError
from cdc.replication.relations import Relations
from cdc.replication.spill_file import SpilledRows, SpillFile, encode_spilled

_ROWS, _NOTE, _FRESH = ".rows", ".prepared", ".tmp"


class NotStreamableError(TransientError):
    """A transaction cannot be taken in pieces: reconnect without streaming until it has ended.

    The kind is ``spill_full``, or ``message_in_doubt``: a logical message does not say of which
    subtransaction it is, so where one is rolled back it cannot be told which messages go with it.
    """


@dataclass
class Waiting:
    """A transaction that has not ended, as far as it was sent."""

    xid: int
    streamed: bool
    file: SpillFile
    relations: Relations = field(default_factory=Relations)
    aborted: set[int] = field(default_factory=set)  # subtransactions that were rolled back
    aborted_at: int = -1  # number of the message that said so last
    has_messages: bool = False


@dataclass(frozen=True)
class _Note:
    """What stands beside the rows of a prepared transaction; the moment it is there they count."""

    xid: int
    gid: str
    prepare_lsn: int
    aborted: tuple[int, ...]
    rows: str  # the file's name
    bytes: int
    commit_lsn: int = 0  # once it is committed and published


class Spill:
    """The folder; outlives connections."""

    def __init__(self, directory: Path, *, bytes_max: int = 8 << 30) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._waiting: dict[int, Waiting] = {}
        self._prepared: dict[tuple[int, str], _Note] = {}
        self._next_file = 0
        if directory.exists():
            self._find_prepared()

    @property
    def size_bytes(self) -> int:
        """What the folder holds now."""
        prepared = sum(note.bytes for note in self._prepared.values())
        return prepared + sum(waiting.file.bytes for waiting in self._waiting.values())

    @property
    def transactions(self) -> int:
        """How many transactions wait for their end."""
        undecided = sum(not note.commit_lsn for note in self._prepared.values())
        return len(self._waiting) + undecided

    def forget_waiting(self) -> None:
        """A connection is over; what it had not finished is sent again on the next."""
        for waiting in self._waiting.values():
            waiting.file.remove()
        self._waiting.clear()

    def settled(self, confirmed_lsn: int) -> None:
        """The source was told ``confirmed_lsn``: it sends no outcome below it again."""
        for key, note in list(self._prepared.items()):
            if 0 < note.commit_lsn < confirmed_lsn:
                self._remove_note(key)

    def waiting(self, xid: int) -> Waiting | None:
        return self._waiting.get(xid)

    def wait(self, xid: int, *, streamed: bool) -> Waiting:
        """A transaction begins to come."""
        with self._writable():
            self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._next_file:08d}{_ROWS}"
        self._next_file += 1
        waiting = self._waiting[xid] = Waiting(xid, streamed, SpillFile(path))
        return waiting

    def append(self, waiting: Waiting, rows: pa.RecordBatch, schemas: Mapping[int, bytes]) -> None:
        header, body = encode_spilled(rows, schemas)
        if self.size_bytes + len(header) + body.size > self._bytes_max:
            raise self._full(waiting)
        try:
            waiting.file.append(header, body)
        except OSError as error:
            what = f"rows of transaction {waiting.xid} could not be put aside: {error}"
            fix = f"make room for {self._directory}"
            if waiting.streamed:
                raise NotStreamableError(what, fix=fix, kind="spill_full") from error
            raise TransientError(what, fix=fix, kind="spill_full") from error

    def drop(self, waiting: Waiting) -> None:
        """It ended: by its commit, when all of it is published, or by its abort."""
        waiting.file.remove()
        del self._waiting[waiting.xid]

    def prepare(self, waiting: Waiting, gid: str, prepare_lsn: int) -> None:
        """It is prepared; an earlier copy, from a prepare that was sent before, gives way."""
        key, file = (waiting.xid, gid), waiting.file
        note = _Note(
            waiting.xid, gid, prepare_lsn, tuple(waiting.aborted), file.path.name, file.bytes
        )
        earlier = self._prepared.get(key)
        with self._writable():
            file.sync()
        self._write_note(note)
        if earlier is not None:
            (self._directory / earlier.rows).unlink(missing_ok=True)
        del self._waiting[waiting.xid]

    def prepared(self, xid: int, gid: str) -> tuple[frozenset[int], Iterator[SpilledRows]] | None:
        """Of a prepared transaction the subtransactions to leave out, and its rows."""
        note = self._prepared.get((xid, gid))
        if note is None:
            return None
        return frozenset(note.aborted), self._file_of(note).frames()

    def published(self, xid: int, gid: str, commit_lsn: int) -> None:
        """Its rows are in the log; they are kept until ``settled`` passes the commit."""
        self._write_note(replace(self._prepared[xid, gid], commit_lsn=commit_lsn))

    def drop_prepared(self, xid: int, gid: str) -> None:
        """It was rolled back; when the source says so again there is nothing left to do."""
        if (xid, gid) in self._prepared:
            self._remove_note((xid, gid))

    def missing(self, gid: str, commit_lsn: int) -> GapError:
        at = format_lsn(commit_lsn)
        return GapError(
            f"the prepared transaction '{gid}' is committed at {at}, and its rows, which the "
            f"source sent once, at PREPARE, are not in {self._directory}",
            fix="put back the spill folder of the log directory that was in use at PREPARE; or, to "
            "go on without these rows, stop the service and call "
            f"SELECT walbrook.accept_gap(source, '{format_lsn(commit_lsn + 1)}')",
            kind="prepared_missing",
        )

    def _full(self, waiting: Waiting) -> OperatorError | TransientError:
        what = (
            f"transactions that have not ended hold {self.size_bytes} bytes in {self._directory}; "
            f"with transaction {waiting.xid} it would be more than the {self._bytes_max} allowed"
        )
        if any(other.streamed for other in self._waiting.values()):
            return NotStreamableError(
                what, fix="it is read at its commit instead", kind="spill_full"
            )
        return OperatorError(
            what,
            fix="end the prepared transactions that SELECT gid, prepared FROM pg_prepared_xacts "
            "shows, or allow more",
            kind="spill_full",
        )

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TransientError(
                f"the spill cannot be written: {error}",
                fix=f"make {self._directory} writable and make room; it is tried again",
                kind="spill_full",
            ) from error

    def _find_prepared(self) -> None:
        for path in self._directory.glob(f"*{_NOTE}"):
            note = _read_note(path)
            self._prepared[note.xid, note.gid] = note
        kept = {note.rows for note in self._prepared.values()}
        for path in self._directory.iterdir():
            if path.name not in kept and path.suffix in (_ROWS, _FRESH):
                path.unlink()
        taken = [int(name.removesuffix(_ROWS)) for name in kept]
        self._next_file = max(taken, default=-1) + 1

    def _write_note(self, note: _Note) -> None:
        path, text = self._note_path(note.xid, note.gid), json.dumps(asdict(note))
        fresh = path.with_suffix(_FRESH)
        with self._writable():
            with fresh.open("w") as file:
                file.write(f"{_checksum(text)}\n{text}")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            for directory in (self._directory, self._directory.parent):
                _sync_directory(directory)
        self._prepared[note.xid, note.gid] = note

    def _remove_note(self, key: tuple[int, str]) -> None:
        # The note goes first, and what cannot be removed now is removed another time.
        with suppress(OSError):
            self._note_path(*key).unlink(missing_ok=True)
            self._file_of(self._prepared.pop(key)).remove()

    def _note_path(self, xid: int, gid: str) -> Path:
        return self._directory / f"{xid}-{_checksum(gid)}{_NOTE}"

    def _file_of(self, note: _Note) -> SpillFile:
        return SpillFile(self._directory / note.rows, note.bytes)


def _read_note(path: Path) -> _Note:
    checksum, _, text = path.read_text(errors="replace").partition("\n")
    if _checksum(text) != checksum:
        raise CorruptionError(
            f"{path} does not match its checksum",
            fix="restore it from a copy; without it the prepared transaction it describes is "
            "missing when it is committed",
            kind="spill_damaged",
        )
    fields = json.loads(text)
    return _Note(**{**fields, "aborted": tuple(fields["aborted"])})


def _checksum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
