"""Where the rows of transactions wait that are sent before they end: a folder beside the log.

Invariants:

- The rows of a prepared transaction can be had from its PREPARE until the log keeps them: they are
  in this folder, and named in its list, or the source sends them again. The source sends again what
  lies at or above the position that was confirmed, so no position is confirmed before the list is
  on disk that is complete up to there (``secure``), and is asked to start no higher (``start``).
- Those of a transaction that is only streamed are gone with the connection: the source streams it
  again.
- The folder never holds more than ``bytes_max``.

Syncing is by position and not by transaction: however many are prepared and committed between two
positions, those that have ended in between are never synced.
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

from cdc.cursor import Cursor, format_lsn
from cdc.errors import CorruptionError, GapError, OperatorError, TransientError
from cdc.log.files import make_directory, make_private, private, sync_directory
from cdc.replication.spill.spill_file import SpilledRows, SpillFile, encode_spilled
from cdc.replication.wire.relations import Relations

_ROWS, _LIST = ".rows", "prepared.json"


class NotStreamableError(TransientError):
    """A transaction cannot be taken in pieces: reconnect without streaming until it has ended.

    The kind is ``spill_full``, or ``message_in_doubt``: a logical message does not say of which
    subtransaction it is, so where one is rolled back its messages are unknown.
    """


@dataclass
class UnendedTransaction:
    """A transaction that has not ended, as far as it was sent."""

    xid: int
    streamed: bool
    file: SpillFile
    relations: Relations = field(default_factory=Relations)
    aborted: set[int] = field(default_factory=set)  # subtransactions that were rolled back
    aborted_at: int = -1  # number of the message that said so last
    has_messages: bool = False


@dataclass(frozen=True)
class _Prepared:
    """A prepared transaction: what is left out of it, and where its rows are."""

    aborted: tuple[int, ...]
    rows: str  # the file's name
    bytes: int
    # Once it is committed and published: where it ends in the log.
    commit_lsn: int = 0
    end_idx: int = 0

    @property
    def end(self) -> Cursor:
        return Cursor(self.commit_lsn, self.end_idx)


class Spill:
    """The folder; outlives connections.

    A prepared transaction goes by its xid, which is its own until it has ended. Its gid is not: on
    a connection with another encoding it has other bytes.
    """

    def __init__(self, directory: Path, *, source: str = "", bytes_max: int = 8 << 30) -> None:
        """``source`` is its name in advice."""
        self._directory = directory
        self._source = source
        self._bytes_max = bytes_max
        self._waiting: dict[int, UnendedTransaction] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._next_file = 0
        # Every PREPARE below was received; none: no prepared transactions are asked for.
        self._complete_to: int | None = None
        self._resume_lsn: int | None = None  # where the log went on at the last start
        self._listed: object = None  # what the list on disk says
        self._listed_rows: set[str] = set()  # the files that it names, all of them synced
        self._ended: list[str] = []  # files that go once it does not name them any more
        self.size_bytes = 0
        """What the folder holds now."""
        if directory.exists():
            make_private(directory)
            self._find_prepared()

    @property
    def transactions(self) -> int:
        """How many transactions wait for their end."""
        undecided = sum(not prepared.commit_lsn for prepared in self._prepared.values())
        return len(self._waiting) + undecided

    def start(self, resume_lsn: int, confirmed_lsn: int, *, two_phase: bool) -> int:
        """A connection begins: where it has to start so that no prepared transaction is missing.

        ``resume_lsn`` is where the log goes on, ``confirmed_lsn`` the position that was confirmed
        last.
        """
        if not two_phase:
            self._complete_to = None
            return resume_lsn
        known = resume_lsn if self._complete_to is None else self._complete_to
        self._complete_to = max(known, confirmed_lsn)
        self._received_to(resume_lsn)
        self._resume_lsn = resume_lsn
        self._put_list()
        return min(resume_lsn, self._complete_to)

    def secure(self, safe_lsn: int, end_lsn: int) -> int:
        """The position that may be confirmed to the source, at most ``safe_lsn``.

        ``end_lsn`` is the end of the log.
        """
        if self._complete_to is None:
            return safe_lsn
        self._received_to(end_lsn)
        self._put_list()
        return min(safe_lsn, self._complete_to)

    def _received_to(self, end_lsn: int) -> None:
        """A log that has grown since the start has all that the source sent below its end."""
        if self._complete_to is None or self._resume_lsn is None:
            return
        if end_lsn > self._resume_lsn:
            self._complete_to = max(self._complete_to, end_lsn)

    def forget_waiting(self) -> None:
        """A connection is over; what it had not finished is sent again on the next."""
        for waiting in list(self._waiting.values()):
            self.drop(waiting)

    def settled(self, kept: Cursor) -> None:
        """The log keeps what is below ``kept``: of that no rows are needed here.

        The source may send a commit again at which the log ends. Until the log goes on beyond it,
        the transaction stays in the list, without rows.
        """
        for xid, prepared in list(self._prepared.items()):
            if not prepared.commit_lsn or prepared.end > kept:
                continue
            self.drop_prepared(xid)
            if prepared.commit_lsn == kept.lsn:
                self._prepared[xid] = replace(prepared, bytes=0)

    def waiting(self, xid: int) -> UnendedTransaction | None:
        return self._waiting.get(xid)

    def wait(self, xid: int, *, streamed: bool) -> UnendedTransaction:
        """A transaction begins to come."""
        with self._writable():
            make_directory(self._directory)
        path = self._directory / f"{self._next_file:08d}{_ROWS}"
        self._next_file += 1
        waiting = self._waiting[xid] = UnendedTransaction(xid, streamed, SpillFile(path))
        return waiting

    def append(
        self, waiting: UnendedTransaction, rows: pa.RecordBatch, schemas: Mapping[int, bytes]
    ) -> None:
        header, body = encode_spilled(rows, schemas)
        size = len(header) + body.size
        if self.size_bytes + size > self._bytes_max:
            raise self._full(waiting)
        try:
            waiting.file.append(header, body)
        except OSError as error:
            what = f"rows of transaction {waiting.xid} could not be put aside: {error}"
            fix = f"make room for {self._directory}"
            if waiting.streamed:
                raise NotStreamableError(what, fix=fix, kind="spill_full") from error
            raise TransientError(what, fix=fix, kind="spill_full") from error
        self.size_bytes += size

    def drop(self, waiting: UnendedTransaction) -> None:
        """It ended: by its commit, when all of it is published, or by its abort."""
        waiting.file.remove()
        self.size_bytes -= waiting.file.bytes
        del self._waiting[waiting.xid]

    def prepare(self, waiting: UnendedTransaction) -> None:
        """It is prepared; an earlier copy, from a prepare that was sent before, gives way."""
        self.drop_prepared(waiting.xid)
        file = waiting.file
        self._prepared[waiting.xid] = _Prepared(tuple(waiting.aborted), file.path.name, file.bytes)
        del self._waiting[waiting.xid]

    def prepared(self, xid: int) -> tuple[frozenset[int], Iterator[SpilledRows]] | None:
        """Of a prepared transaction the subtransactions to leave out, and its rows."""
        prepared = self._prepared.get(xid)
        if prepared is None:
            return None
        return frozenset(prepared.aborted), self._file_of(prepared).frames()

    def published(self, xid: int, end: Cursor) -> None:
        """Its rows are in the log up to ``end``; they stay here until the log keeps them."""
        self._prepared[xid] = replace(self._prepared[xid], commit_lsn=end.lsn, end_idx=end.idx)

    def drop_prepared(self, xid: int) -> None:
        """It was rolled back, or the log keeps it; else there is nothing to do."""
        prepared = self._prepared.pop(xid, None)
        if prepared is None:
            return
        self.size_bytes -= prepared.bytes
        self._ended.append(prepared.rows)
        if prepared.rows not in self._listed_rows:
            self._remove_ended()

    def missing(self, gid: str, commit_lsn: int) -> GapError:
        at = format_lsn(commit_lsn)
        return GapError(
            f"the prepared transaction '{gid}' is committed at {at}, and its rows, which the "
            f"source sent once, at PREPARE, are not in {self._directory}",
            fix="put back the spill folder of the log directory that was in use at PREPARE; or, to "
            "go on without these rows, stop the service and call "
            f"SELECT walbrook.accept_gap('{self._source}', '{format_lsn(commit_lsn + 1)}')",
            kind="prepared_missing",
        )

    def _full(self, waiting: UnendedTransaction) -> OperatorError | TransientError:
        what = (
            f"transactions hold {self.size_bytes} bytes in {self._directory}; with transaction "
            f"{waiting.xid} it would be more than the {self._bytes_max} allowed"
        )
        more = "raise log.max_bytes, of which half is for them"
        if any(other.streamed for other in self._waiting.values()):
            return NotStreamableError(
                what, fix="it is read at its commit instead", kind="spill_full"
            )
        if any(prepared.commit_lsn for prepared in self._prepared.values()):
            return TransientError(
                f"{what}. Some are committed and stay until the log keeps them",
                fix=f"find the consumer that is behind (walbrook status), or {more}; reading goes "
                "on by itself",
                kind="spill_full",
            )
        return OperatorError(
            f"{what}. All of them are prepared and have not ended",
            fix=f"{more}; pg_prepared_xacts shows those that somebody may have forgotten",
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
        path = self._directory / _LIST
        if path.exists():
            self._complete_to, self._prepared = _read_list(path)
        kept = self._files()
        for other in self._directory.iterdir():
            if other.name not in kept and other != path:
                other.unlink()
        self._listed_rows = kept
        self._listed = (self._complete_to, dict(self._prepared))
        self.size_bytes = sum(prepared.bytes for prepared in self._prepared.values())
        taken = [int(one.rows.removesuffix(_ROWS)) for one in self._prepared.values()]
        self._next_file = max(taken, default=-1) + 1

    def _put_list(self) -> None:
        """Put the list on disk, and the rows that it names; then what it named before may go."""
        listed = (self._complete_to, dict(self._prepared))
        if listed == self._listed:
            return
        with self._writable():
            make_directory(self._directory)
            for prepared in self._prepared.values():
                if prepared.rows not in self._listed_rows:
                    self._file_of(prepared).sync()
            _write_list(self._directory / _LIST, *listed)
        self._listed = listed
        self._listed_rows = self._files()
        self._remove_ended()

    def _remove_ended(self) -> None:
        """Remove what the list on disk does not name; what cannot be goes at the next start."""
        for rows in self._ended:
            if rows not in self._listed_rows:
                with suppress(OSError):
                    (self._directory / rows).unlink(missing_ok=True)
        self._ended = [rows for rows in self._ended if rows in self._listed_rows]

    def _files(self) -> set[str]:
        return {prepared.rows for prepared in self._prepared.values() if prepared.bytes}

    def _file_of(self, prepared: _Prepared) -> SpillFile:
        return SpillFile(self._directory / prepared.rows, prepared.bytes)


def _read_list(path: Path) -> tuple[int, dict[int, _Prepared]]:
    checksum, _, text = path.read_text(errors="replace").partition("\n")
    if _checksum(text) != checksum:
        raise CorruptionError(
            f"{path} does not match its checksum",
            fix="restore it from a copy; without it the prepared transactions that it names are "
            "missing when they are committed",
            kind="spill_damaged",
        )
    fields = json.loads(text)
    prepared = {
        int(xid): _Prepared(**{**one, "aborted": tuple(one["aborted"])})
        for xid, one in fields["prepared"].items()
    }
    return int(fields["complete_to"]), prepared


def _write_list(path: Path, complete_to: int | None, prepared: Mapping[int, _Prepared]) -> None:
    text = json.dumps(
        {"complete_to": complete_to, "prepared": {xid: asdict(p) for xid, p in prepared.items()}}
    )
    fresh = path.with_suffix(".tmp")
    with open(fresh, "w", opener=private) as file:
        file.write(f"{_checksum(text)}\n{text}")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_directory(path.parent)


def _checksum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
