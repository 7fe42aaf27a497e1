"""The pieces that a worker delivers: from chunks that were read, each at a place of its own.

Backfills take turns, piece by piece: neither a large chunk nor a limit on rows per second of one
holds up another.

A worker asks with its cursor. Where the next piece has to stand further on, the worker serves
changes up to there first (``cut``). The place is behind every change that the chunk's snapshot
contains; changes that it does not contain and that come before the place have overtaken rows.

Invariants: a place is recorded before its piece is handed out, and is taken by one piece. It lies
above all that the destination can have: what a worker delivered and did not settle before it began
again is in the log by then, or is a piece with a place. A piece that was placed and not settled is
handed out again before the worker passes its place, unless an operator has ended its backfill.

A piece is delivered in steps, which take a bounded time beside changes. Behind each step a piece
may end, so that changes which came meanwhile go first; the rest of its rows gets another place. A
piece that is handed out again never ends early: the destination may have any of its rows.
``offer``, ``held``, ``held_up`` and ``forget_others`` may be called from any thread; all else is
the worker's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, replace

import pyarrow as pa
import structlog

from cdc.backfill.chunk_file import ChunkFile
from cdc.backfill.log_scan import NewerScan, TooFarError, incomplete_keys
from cdc.backfill.overtaken import remaining
from cdc.backfill.ranges import ReloadStep
from cdc.connection import Connection
from cdc.connection_pool import ConnectionPool
from cdc.cursor import ORIGIN, Cursor, free_place, idle_place, is_free
from cdc.decoding.format import Wanted
from cdc.errors import GapError, OperatorError, WalbrookError
from cdc.log.view import LogReader
from cdc.state.backfill_chunks import (
    ATTEMPTS_MAX,
    Chunk,
    PieceDone,
    all_read_again,
    forget_place,
    place_piece,
    placed_chunk,
    read_again,
)
from cdc.state.backfill_keys import KEYS_MAX, drop_keys, searched_to
from cdc.state.backfills import Backfill, Wait, fail, placed_end, waits
from spark_pipeline.backfill.mark import MarkPiece
from spark_pipeline.backfill.piece import Piece

_logger = structlog.get_logger("walbrook.backfill")

_ROWS_FIRST, _ROWS_MIN, _ROWS_MAX = 20_000, 5_000, 100_000
_BYTES_MAX = 32 << 20  # of a piece, if it has more than one batch of the chunk's file
_LIVE_S, _ALONE_S = 0.05, 0.5  # how long a step may take beside changes, and a piece
_LIVE_FOR_S = 1.0  # how long a change is followed by another one, as far as is known
_HELD_UP_S = 5.0  # how long a sink may be behind with changes before that is said
_SILENT_S = 30.0  # how long a worker may not ask for rows
_DROP_AGAIN_S = 10.0  # until a shadow is dropped again whose sink refused that


@dataclass(eq=False)
class ReadyChunk:
    """A chunk whose rows are in its file."""

    backfill: Backfill
    chunk: Chunk
    may_omit: bool  # whether changes may leave out values of its rows
    keys: list[list[str]] | None = None  # those it was read by
    file: ChunkFile | None = None
    scan: NewerScan | None = None

    def open(self) -> tuple[ChunkFile, NewerScan]:
        assert self.chunk.file is not None
        assert self.chunk.snapshot is not None
        if self.file is None or self.scan is None:
            self.file = ChunkFile(self.chunk.file)
            self.scan = NewerScan(
                self.file.oid, self.chunk.snapshot, Cursor(self.chunk.look_lsn, 0)
            )
        return self.file, self.scan


@dataclass
class _Pace:
    """How large the next piece of a backfill may be, and when it may be placed."""

    rows: int = _ROWS_FIRST  # at most
    rows_per_s: float = _ROWS_FIRST / _LIVE_S  # as the last step was delivered
    not_before: float = 0.0  # monotonic: what a limit on rows per second allows

    def in_time(self, seconds: float) -> int:
        """How many rows may be delivered at once, so that it takes no longer."""
        return max(_ROWS_MIN, min(int(self.rows_per_s * seconds), self.rows))


class Pieces:
    """Those of one consumer."""

    def __init__(
        self,
        source: str,
        term: int,
        consumer: str,
        wanted: Wanted,
        connections: ConnectionPool,
        *,
        in_steps: bool = True,
    ) -> None:
        """Without ``in_steps`` a piece is delivered at once, and is short beside changes."""
        self._source, self._term, self._consumer = source, term, consumer
        self._in_steps = in_steps
        self._wanted = wanted
        self._connections = connections
        self._lock = threading.Lock()
        self._ready: deque[ReadyChunk] = deque()
        self._current: ReadyChunk | None = None
        self._generation = 0
        self._floor = ORIGIN  # nothing new stands below
        self._paces: dict[int, _Pace] = {}  # by backfill
        self._live_until = 0.0  # monotonic
        self._asked = self._fresh = time.monotonic()  # when the worker asked, and was not behind
        self._refused: int | None = None  # the backfill whose rows are to be read again
        self.changed = threading.Event()
        """Set when a chunk is done, or has to be read again."""

    @property
    def generation(self) -> int:
        """To be read before chunks are looked for, and given to ``offer`` with what was found."""
        with self._lock:
            return self._generation

    @property
    def has_any(self) -> bool:
        """Whether a chunk waits for the worker; most often none does."""
        return self._current is not None or bool(self._ready)

    def offer(self, ready: ReadyChunk, generation: int) -> bool:
        """Hand over a chunk that was read; returns whether it is new."""
        with self._lock:
            known = [*self._ready, *([self._current] if self._current else [])]
            named = (ready.chunk.backfill, ready.chunk.number)
            if generation != self._generation or named in map(_name, known):
                return False
            if not known:
                self._asked = self._fresh = time.monotonic()
            self._ready.append(ready)
            return True

    def forget_others(self, backfills: Set[int]) -> None:
        """Of all backfills but these nothing comes any more."""
        for gone in self._paces.keys() - backfills:
            self._paces.pop(gone, None)  # the worker may add others meanwhile

    def held(self) -> list[tuple[int, int]]:
        """The chunks that wait for the worker: backfill and number."""
        with self._lock:
            known = [*self._ready, *([self._current] if self._current else [])]
            return [_name(each) for each in known]

    def held_up(self) -> Wait | None:
        """Why rows that were read are not delivered; None: they are, or there are none."""
        now = time.monotonic()
        if not self.has_any:
            return None
        if now - self._asked > _SILENT_S:
            return Wait.SINK
        return Wait.CHANGES if now - self._fresh > _HELD_UP_S else None

    def begin(self, state: Connection, cursor: Cursor, log_end: Cursor) -> None:
        """The worker begins at a cursor that was read from its row.

        Below ``log_end`` the destination may have more than is settled.
        """
        if self._refused is not None:
            all_read_again(state, self._refused)
            self._refused = None
        above = placed_end(state, self._source, self._consumer, log_end)
        placed = self._placed(state, cursor)
        with self._lock:  # all at once: what is offered from now on knows of the placed chunk
            self._floor = max(log_end, above)
            self._generation += 1
            self._ready.clear()
            self._current = placed

    def cut(self, cursor: Cursor) -> Cursor | None:
        """Where the next piece has to stand, if that lies beyond the cursor."""
        if not self.has_any:
            return None
        current = self._take()
        if current is None:
            return None
        place = self._place(current.chunk, cursor)
        return place if place > cursor else None

    def next(self, cursor: Cursor, log: LogReader, *, behind: bool) -> Piece | MarkPiece | None:
        """The next piece, if it stands at the cursor and may be delivered now.

        While the worker is ``behind`` with changes, nothing new is placed.
        """
        self._asked = time.monotonic()
        if not behind:
            self._fresh = self._asked
        current = self._take()
        if current is None:
            return None
        if _is_passed(current.chunk, cursor):  # it was put down there
            with self._connections.connection() as state:
                forget_place(state, current.chunk)
            current.chunk = replace(current.chunk, place=None, piece_rows=None)
        chunk = current.chunk
        if chunk.place is None and behind:
            return None
        place = self._place(chunk, cursor)
        if place > cursor and not (place.lsn == cursor.lsn and is_free(place.lsn)):
            return None
        try:
            if isinstance(chunk.range, ReloadStep):
                return self._mark(current, chunk.range, place)
            return self._piece(current, place, log)
        except (GapError, TooFarError, OSError, pa.ArrowException) as error:
            # What lies behind its snapshot cannot be looked at any more, or its file cannot.
            _logger.info("backfill.read_again", consumer=self._consumer, error=error)
            with self._connections.connection() as state:
                read_again(state, chunk, error=str(error), failed=True)
                if chunk.attempts + 1 >= ATTEMPTS_MAX:
                    fail(state, chunk.backfill, _read_too_often(error))
            self._drop(current)
            return None
        except OperatorError as error:
            with self._connections.connection() as state:
                fail(state, chunk.backfill, str(error))
            self._put_down()
            return None

    def refused(self, piece: Piece, error: WalbrookError) -> None:
        """The sink refuses the table as it was when it was read, and took nothing of the piece.

        When the worker begins again all of it is read again, with the table as it is then.
        """
        self._refused = piece.chunk.backfill
        with self._connections.connection() as state:
            waits(state, piece.chunk.backfill, Wait.RETRY, f"its sink refuses its rows: {error}")

    def mark_settled(self) -> None:
        """The sink has a mark, and that is settled."""
        assert self._current is not None
        self._drop(self._current)

    def mark_refused(self, mark: MarkPiece, error: WalbrookError) -> None:
        """The sink cannot do what a mark says, and has done nothing of it."""
        _logger.warning("backfill.mark_refused", consumer=self._consumer, error=error)
        with self._connections.connection() as state:
            fail(state, mark.chunk.backfill, f"its {mark.step} failed: {error}")
            forget_place(state, mark.chunk)
        if mark.step is ReloadStep.DROP:  # what was cancelled cannot fail, and is tried again
            pace = self._pace(mark.chunk.backfill)
            pace.not_before = time.monotonic() + _DROP_AGAIN_S
        self._put_down()

    def changes_came(self) -> None:
        """The worker served changes: steps are short while others may follow."""
        self._live_until = time.monotonic() + _LIVE_FOR_S

    def step_end(self, piece: Piece, cursor: Cursor) -> Cursor:
        """Where the step of a piece ends that begins at a cursor within it."""
        if piece.repeated or not self._in_steps:
            return piece.high
        rows = self._pace(piece.chunk.backfill).in_time(self._step_s())
        return min(piece.high, Cursor(cursor.lsn, cursor.idx + rows))

    def delivered(self, piece: Piece, rows: int, took_s: float) -> None:
        """So many rows of a piece were delivered in one step."""
        pace = self._pace(piece.chunk.backfill)
        # The rest of a piece says nothing of larger steps, unless it was slow.
        if rows >= pace.in_time(self._step_s()) or took_s > self._step_s():
            pace.rows_per_s = rows / max(took_s, 0.001)
            pace.rows = max(pace.rows, min(rows * 4, _ROWS_MAX))

    def settled(self, done: PieceDone) -> None:
        """A piece has ended and is settled."""
        current = self._current
        assert current is not None
        chunk = current.chunk
        delivered = chunk.delivered + done.rows
        current.chunk = replace(chunk, delivered=delivered, place=None, piece_rows=None)
        limit = current.backfill.rows_per_second
        if limit is not None:
            self._pace(chunk.backfill).not_before = time.monotonic() + done.rows / limit
        if delivered >= chunk.rows:
            if current.keys:
                with self._connections.connection() as state:
                    drop_keys(state, chunk.backfill, current.keys)
            self._drop(current)
        else:
            self._let_others_go_first(current)

    def _placed(self, state: Connection, cursor: Cursor) -> ReadyChunk | None:
        """The chunk whose piece has to be handed out again, if there is one."""
        found = placed_chunk(state, self._source, self._consumer)
        if found is None:
            return None
        backfill, chunk = found
        is_mark = isinstance(chunk.range, ReloadStep)
        lacks_file = not is_mark and (chunk.file is None or not chunk.file.exists())
        if _is_passed(chunk, cursor) or lacks_file:
            forget_place(state, chunk)
            return None
        return ReadyChunk(backfill, chunk, may_omit=True)

    def _pace(self, backfill: int) -> _Pace:
        return self._paces.setdefault(backfill, _Pace())

    def _step_s(self) -> float:
        return _LIVE_S if time.monotonic() < self._live_until else _ALONE_S

    def _piece_s(self) -> float:
        return _ALONE_S if self._in_steps else self._step_s()

    def _take(self) -> ReadyChunk | None:
        """The chunk whose turn it is, if its backfill may go on now."""
        with self._lock:
            if self._current is None:
                now = time.monotonic()
                for ready in self._ready:
                    if self._pace(ready.chunk.backfill).not_before <= now:
                        self._ready.remove(ready)
                        self._current = ready
                        break
            return self._current

    def _let_others_go_first(self, current: ReadyChunk) -> None:
        """The chunk waits for its next turn: behind other backfills, before the rest of its own."""
        mine = current.chunk.backfill
        with self._lock:
            others = [each for each in self._ready if each.chunk.backfill != mine]
            rest = [each for each in self._ready if each.chunk.backfill == mine]
            self._ready = deque([*others, current, *rest])
            self._current = None

    def _drop(self, current: ReadyChunk) -> None:
        """The chunk is done, or has to be read again."""
        self._put_down()
        if current.chunk.file is not None:
            current.chunk.file.unlink(missing_ok=True)

    def _put_down(self) -> None:
        """The chunk stays in SQL for the resumed backfill."""
        with self._lock:
            self._current = None
        self.changed.set()

    def _place(self, chunk: Chunk, cursor: Cursor) -> Cursor:
        if chunk.place is not None:
            return chunk.place
        return free_place(max(cursor, self._floor, idle_place(chunk.read_lsn)))

    def _piece(self, current: ReadyChunk, place: Cursor, log: LogReader) -> Piece | None:
        chunk = current.chunk
        file, scan = current.open()
        newer = scan.up_to(log, place)
        limit = current.backfill.rows_per_second or _ROWS_MAX
        within = file.within(chunk.delivered, _BYTES_MAX)
        pace = self._pace(chunk.backfill)
        count = chunk.piece_rows or min(pace.in_time(self._piece_s()), limit, within)
        stored = file.stored(chunk.delivered, count)
        keys = stored.keys if newer.raw.num_rows else None
        left = remaining(stored, file.schemas, newer, keys)
        repeated = chunk.place is not None
        if not repeated:
            if not self._record(current, place, count, log, file.oid):
                self._put_down()
                return None
            current.chunk = replace(chunk, place=place, piece_rows=count)
        decoded = stored.decoded(self._wanted)
        return Piece(
            current.chunk,
            place,
            count,
            left,
            decoded,
            file.schemas,
            self._wanted,
            log.history(),
            current.backfill.id if current.backfill.reload else None,
            repeated,
        )

    def _mark(self, current: ReadyChunk, step: ReloadStep, place: Cursor) -> MarkPiece | None:
        if current.chunk.place is None:
            with self._connections.connection() as state:
                placed = place_piece(
                    state, self._source, self._term, current.chunk, place, 1,
                    looked_lsn=None, incomplete=[],
                )  # fmt: skip
            if placed is None:
                self._put_down()
                return None
            current.chunk = replace(current.chunk, place=place, piece_rows=1)
        return MarkPiece(current.chunk, step, place)

    def _record(
        self, current: ReadyChunk, place: Cursor, count: int, log: LogReader, oid: int
    ) -> bool:
        """Record a piece's place; returns whether its backfill is still under way."""
        chunk, looked, incomplete = current.chunk, None, []
        with self._connections.connection() as state:
            if current.may_omit and chunk.range is not None:
                begun = searched_to(state, chunk.backfill) or chunk.look_lsn
                if place > (known := Cursor(begun, 0)):
                    incomplete = incomplete_keys(log, oid, known, place)
                looked = place.lsn
            found = place_piece(
                state, self._source, self._term, chunk, place, count,
                looked_lsn=looked, incomplete=incomplete,
            )  # fmt: skip
            if found is None:
                return False
            if found > KEYS_MAX:
                fail(state, chunk.backfill, TOO_MANY_KEYS)
        return True


TOO_MANY_KEYS = (
    f"more than {KEYS_MAX} rows were updated without their large values while the table was read. "
    "To fix it: give the table REPLICA IDENTITY FULL, or backfill it while fewer rows change; then "
    "cancel this backfill and start it again"
)


def _read_too_often(error: Exception) -> str:
    return (
        f"a chunk was read {ATTEMPTS_MAX} times, and what lies behind its snapshot could not be "
        f"looked at: {error}. To fix it: backfill the table while fewer rows change, or let the "
        "log keep more (log.max_bytes); then retry the backfill"
    )


def _is_passed(chunk: Chunk, cursor: Cursor) -> bool:
    """Whether the worker went on behind the piece that has a place."""
    if chunk.place is None or chunk.piece_rows is None:
        return False
    return cursor >= Cursor(chunk.place.lsn, chunk.place.idx + chunk.piece_rows)


def _name(ready: ReadyChunk) -> tuple[int, int]:
    return ready.chunk.backfill, ready.chunk.number
