"""Decoded slices on their way from the partition that decoded them to the task that delivers.

They go by reference: the partition leaves them in a file, only their markers pass through the JVM,
and the delivering task maps the file. Rows that cross the JVM cost more than all the rest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import xxhash

from cdc.cursor import Cursor
from cdc.errors import TransientError

_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_FREE_MIN = 1 << 30
_LOCK = "owner.lock"
_owned: dict[Path, int] = {}  # folders in shared memory of this process, and their locks
_PLANNED = "planned.json"
_PRESSURE = "pressure.json"
_FOLLOWED = "followed.json"


@dataclass(frozen=True)
class SliceMarker:
    """A slice that was decoded: where it belongs, where it lies, and how far its batch reaches."""

    range_start: int  # the micro-batch's range of batches, the same in every marker of it
    range_end: int
    batch_idx: int
    part: int
    parts: int
    rows: int
    high: Cursor
    commit_us: int  # when the last of its rows was committed, Unix microseconds; 0 without rows
    path: str  # empty for one whose rows went through Spark
    position: int  # which record batch of the file
    offset: int  # and from which row of it; without a file, of its batch
    errors: int = 0  # how many of its rows could not be decoded
    # Schema and name of the tables that it may have rows of; None: of any.
    tables: tuple[tuple[str, str], ...] | None = None
    logged_us: int = 0  # when its batch was logged, Unix microseconds; 0: not noted


MARKER_SCHEMA = pa.schema(
    [
        ("range_start", pa.int64()),
        ("range_end", pa.int64()),
        ("batch_idx", pa.int64()),
        ("part", pa.int32()),
        ("parts", pa.int32()),
        ("rows", pa.int64()),
        ("high_lsn", pa.int64()),
        ("high_idx", pa.int64()),
        ("commit_us", pa.int64()),
        ("path", pa.string()),
        ("position", pa.int32()),
        ("offset", pa.int64()),
        ("errors", pa.int64()),
        ("tables", pa.string()),  # as JSON
        ("logged_us", pa.int64()),
    ]
)


def markers_to_arrow(markers: Sequence[SliceMarker]) -> pa.RecordBatch:
    rows = [
        {
            **vars(marker),
            "high_lsn": marker.high.lsn,
            "high_idx": marker.high.idx,
            "tables": orjson.dumps(marker.tables).decode(),
        }
        for marker in markers
    ]
    return pa.RecordBatch.from_pylist(rows, schema=MARKER_SCHEMA)


def markers_from_arrow(table: pa.Table | pa.RecordBatch) -> list[SliceMarker]:
    return [
        SliceMarker(
            range_start=row["range_start"],
            range_end=row["range_end"],
            batch_idx=row["batch_idx"],
            part=row["part"],
            parts=row["parts"],
            rows=row["rows"],
            high=Cursor(row["high_lsn"], row["high_idx"]),
            commit_us=row["commit_us"],
            path=row["path"],
            position=row["position"],
            offset=row["offset"],
            errors=row["errors"],
            tables=_tables(row["tables"]),
            logged_us=row["logged_us"],
        )
        for row in table.to_pylist()
    ]


def _tables(text: str) -> tuple[tuple[str, str], ...] | None:
    tables = orjson.loads(text)
    return None if tables is None else tuple((schema, name) for schema, name in tables)


def _shared_memory(scratch: Path) -> Path | None:
    """A directory in shared memory that belongs to this stage, if there may be one."""
    place = _SHARED_MEMORY / f"walbrook-{xxhash.xxh3_64_hexdigest(os.fsencode(scratch))}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or status.st_mode & 0o077 or not _own(place):
            return None
        _empty(place)
        enough = shutil.disk_usage(place).free >= _SHARED_MEMORY_FREE_MIN
    except OSError:
        return None
    return place if enough else None


def _own(place: Path) -> bool:
    """Lock a folder for the life of this process; returns whether it is ours."""
    if place in _owned:
        return True
    lock = os.open(place / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:  # else a sweep removed it before it was locked
            _owned[place] = lock
            return True
    except OSError:
        pass
    os.close(lock)
    return False


def _disown(place: Path) -> None:
    """Remove a folder in shared memory that holds nothing but its lock."""
    if place in _owned and [path.name for path in place.iterdir()] == [_LOCK]:
        shutil.rmtree(place, ignore_errors=True)
        os.close(_owned.pop(place))


def sweep_shared_memory() -> None:
    """Remove the folders of processes of this account that were killed."""
    for place in _SHARED_MEMORY.glob("walbrook-*"):
        with suppress(OSError):
            if place in _owned or place.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(place / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)


def _empty(directory: Path) -> None:
    for left in directory.iterdir():
        shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True)
class PlannedRange:
    """The batches ``[start, end)`` that Spark planned a micro-batch for, and their rows."""

    start: int
    end: int
    rows: int


class Exchange:
    """A directory of one stage, in which executors leave what they decoded.

    Invariant: a file has one owner, the plan whose partitions wrote it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def create(cls, scratch: Path) -> Exchange:
        """In shared memory where there is enough of it, else in ``scratch``.

        The place is the same for every run of a stage, so that what a killed one left is removed.
        Decoded rows are private: no other user may read the directory.
        """
        parent = _shared_memory(scratch) or scratch
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _empty(parent)
        directory = parent / uuid.uuid4().hex
        directory.mkdir(mode=0o700)
        return cls(directory)

    def planned(self) -> PlannedRange | None:
        """What the source's side noted for the micro-batch that is under way, if it has any rows.

        The first micro-batch of a query over an idle log has none.
        """
        try:
            return PlannedRange(**orjson.loads((self.directory / _PLANNED).read_bytes()))
        except FileNotFoundError:
            return None

    def widen(self, by: float) -> None:
        """Note for the source's side by how much longer micro-batches may take."""
        with suppress(FileNotFoundError):  # of a stage that has ended nothing is left
            _note(self.directory / _PRESSURE, {"widened_by": by})

    def note_followed(self, followed: Overrun) -> None:
        """Tell the source's side where the next micro-batch begins."""
        with suppress(FileNotFoundError):
            _note(self.directory / _FOLLOWED, followed)

    def clear(self, keep: Collection[str] = ()) -> None:
        """Remove what a query left, its files and its notes, but for those to ``keep``.

        How much longer micro-batches may take is not a query's: it is known until it changes.
        """
        for path in self.directory.iterdir():
            if str(path) not in keep and path.name != _PRESSURE:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        with suppress(OSError):
            _disown(self.directory.parent)


def note_planned(directory: Path, planned: PlannedRange) -> None:
    """Spark does not show a micro-batch's offsets to ``foreachBatch``; this note does."""
    _note(directory / _PLANNED, planned)


@dataclass(frozen=True)
class Overrun:
    """How far a micro-batch got beyond its planned range, and the time that this took."""

    batch: int = 0
    spent_s: float = 0.0


def followed(exchange: str) -> Overrun:
    """What the driver noted for the source's side; nothing without an exchange, or a note in it."""
    if exchange:
        with suppress(FileNotFoundError):
            return Overrun(**orjson.loads((Path(exchange) / _FOLLOWED).read_bytes()))
    return Overrun()


def widened_by(exchange: str) -> float:
    """What the driver noted for the source's side; 1 without an exchange, or a note in it."""
    if not exchange:
        return 1.0
    try:
        return float(orjson.loads((Path(exchange) / _PRESSURE).read_bytes())["widened_by"])
    except FileNotFoundError:
        return 1.0


def _note(path: Path, content: object) -> None:
    """Whole or not at all: the other side may be reading it."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(orjson.dumps(content))
    temporary.replace(path)


def leave(directory: Path, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Path:
    """Write decoded slices to a new file of the exchange."""
    path = directory / f"{uuid.uuid4().hex}.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def pick_up(markers: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
    """The slices of ``markers`` in their order, mapped; neighbours come as one."""
    opened: dict[str, pa.ipc.RecordBatchFileReader] = {}
    for path, position, offset, rows in runs(markers):
        reader = opened.get(path)
        if reader is None:
            reader = opened[path] = _opened(path)
        yield reader.get_batch(position).slice(offset, rows)


def whole(path: str) -> pa.Table:
    """All that was left in a file, mapped."""
    return _opened(path).read_all()


def _opened(path: str) -> pa.ipc.RecordBatchFileReader:
    try:
        with pa.memory_map(path) as file:
            return pa.ipc.open_file(file.read_buffer())
    except FileNotFoundError:
        raise TransientError(
            "what was decoded for a micro-batch is no longer there: its stage has ended"
        ) from None


def runs(markers: Sequence[SliceMarker]) -> Iterator[tuple[str, int, int, int]]:
    """Path, record batch, offset and rows of slices that lie side by side."""
    run: tuple[str, int, int, int] | None = None
    for marker in markers:
        if run is not None:
            path, position, offset, rows = run
            if (marker.path, marker.position, marker.offset) == (path, position, offset + rows):
                run = (path, position, offset, rows + marker.rows)
                continue
            yield run
        run = (marker.path, marker.position, marker.offset, marker.rows)
    if run is not None:
        yield run
