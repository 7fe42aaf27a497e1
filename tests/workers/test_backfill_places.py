"""The places of pieces when backfills fail, are cancelled, or begin again for another place."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc.backfill.ranges import ReloadStep
from cdc.backfill.reading import ChunkRead, ChunkTask, read_chunk
from cdc.connection import Connection, connect
from cdc.connection_pool import ConnectionPool
from cdc.cursor import Cursor
from cdc.decoding.format import Wanted
from cdc.errors import OperatorError, TransientError
from cdc.state.backfill_chunks import (
    Chunk,
    add_chunks,
    chunks_of,
    mark_ready,
    place_piece,
    placed_chunk,
)
from cdc.state.backfills import Backfill, open_backfills
from spark_pipeline.backfill import pieces as pieces_of
from spark_pipeline.backfill import runner
from spark_pipeline.backfill.mark import MarkPiece
from spark_pipeline.backfill.piece import Piece
from spark_pipeline.backfill.pieces import Pieces, ReadyChunk
from spark_pipeline.stage.worker import Worker
from tests.backfill_rig import SOURCE, Rig
from tests.fix_postgres import Database
from tests.waiting import until

_PLACED = "SELECT place_lsn::text FROM walbrook.backfill_chunks WHERE place_lsn IS NOT NULL"
_ITEMS = """
CREATE TABLE item (id int PRIMARY KEY, version int);
INSERT INTO item SELECT i, 1 FROM generate_series(1, 400) i
"""


def test_a_piece_that_was_not_delivered_when_its_backfill_failed_comes_when_that_is_retried(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    tries: list[Any] = []
    serves = Worker._serve_to

    def refused(worker: Worker, decoded: Any, end: Any) -> Any:
        if isinstance(decoded, Piece):
            tries.append(decoded.place)
            raise TransientError("the destination is away", fix="it is tried again")
        return serves(worker, decoded, end)

    with rig.running():
        with monkeypatch.context() as away:
            away.setattr(Worker, "_serve_to", refused)
            backfill = rig.start("item", rows_per_second=100)
            until("a piece to be placed", lambda: tries and rig.rows(_PLACED))
            rig.rows(
                "UPDATE walbrook.backfills SET state = 'failed', error = 'of another chunk' "
                "RETURNING 1"
            )
            database.execute("UPDATE item SET version = 2 WHERE id = 1")
        rig.until_delivered()
        rig.rows(f"SELECT walbrook.retry_backfill({backfill})")
        rig.hurry()
        rig.until_state(backfill)
        rig.until_delivered()
        assert len(rig.table()) == 400
        reads = [each for each in rig.messages() if each["action"] == "read"]
        assert len(reads) == 400, "none comes twice"


def test_a_chunk_read_for_a_place_that_is_left_is_read_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that overtook a row went to the old place alone, so the row must not be dropped."""
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    has_read, goes_on = threading.Event(), threading.Event()

    def late(task: ChunkTask) -> ChunkRead:
        done = read_chunk(task)
        has_read.set()
        assert goes_on.wait(30)
        return done

    monkeypatch.setattr(runner, "read_chunk", late)
    with rig.running():
        rig.rows("UPDATE walbrook.consumers SET rewind_ways = '{truncate}' RETURNING 1")
        backfill = rig.start("item")
        assert has_read.wait(30)
        database.execute("UPDATE item SET version = 2 WHERE id = 5")
        rig.until_delivered()
        ((stands,),) = rig.rows(
            "SELECT cursor_lsn || ':' || cursor_idx FROM walbrook.consumers WHERE name = 'files'"
        )
        rig.rows(
            f"SELECT walbrook.rewind('files', to_cursor => '{stands}', destination => 'truncate')"
        )
        goes_on.set()
        rig.until_state(backfill)
        rig.until_delivered()
    reads = [each["record"] for each in rig.messages() if each["action"] == "read"]
    assert {"id": 5, "version": 2} in reads
    assert len(reads) == 400


def test_steps_are_short_while_changes_come(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(_ITEMS.replace("400", "60000"))
    rig = Rig(database, tmp_path)
    monkeypatch.setattr(pieces_of, "_LIVE_FOR_S", 600.0)
    counts: list[int] = []
    delivered = Pieces.delivered

    def slow(pieces: Pieces, piece: Piece, rows: int, _took_s: float) -> None:
        counts.append(rows)
        delivered(pieces, piece, rows, 1.0)

    monkeypatch.setattr(Pieces, "delivered", slow)
    with rig.running():
        database.execute("UPDATE item SET version = 2 WHERE id = 1")
        rig.until_delivered()
        rig.backfilled("item")
    assert sum(counts) == 60_000
    assert set(counts[1:]) == {5_000}


def test_a_piece_ends_before_a_change_that_waits_and_the_rest_of_its_rows_comes_behind_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, steps = _stepping(database, tmp_path, monkeypatch)

    def change(worker: Worker, piece: Piece) -> None:
        if len(steps) == 1:
            assert worker._cursor < piece.high
            database.execute("UPDATE item SET version = 2 WHERE id IN (1, 20000)")
            until("the change to wait", lambda: worker._input.has_next)

    with rig.running():
        _call_behind_steps(monkeypatch, steps, change)
        rig.backfilled("item")
        rig.until_delivered()
    assert steps[1][0] != steps[0][0], "the rest has another place"
    found = [(each["action"], each["record"]["id"]) for each in rig.messages()]
    assert found.index(("read", 1)) < found.index(("update", 1)) < found.index(("read", 19_999))
    assert ("read", 20_000) not in found, "the change has overtaken the row"
    assert len(found) == 20_000 - 1 + 2


def test_a_piece_of_which_something_may_have_been_sent_does_not_end_early(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, steps = _stepping(database, tmp_path, monkeypatch)

    def break_down(worker: Worker, _piece: Piece) -> None:
        if len(steps) == 1:
            database.execute("UPDATE item SET version = 2 WHERE id = 1")
            until("the change to wait", lambda: worker._input.has_next)
            raise TransientError("the destination is away", fix="it is tried again")

    with rig.running():
        _call_behind_steps(monkeypatch, steps, break_down)
        rig.backfilled("item")
        rig.until_delivered()
    assert [place for place, _ in steps[:2]] == [steps[0][0]] * 2
    assert steps[1][1] == 20_000, "all of it comes at its place"
    found = [(each["action"], each["record"]["id"]) for each in rig.messages()]
    assert found[-1] == ("update", 1)
    assert len(found) == 20_000 + 1


Steps = list[tuple[Cursor, int]]
"""Of each step the place of its piece, and where it ends in it."""


def _stepping(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Rig, Steps]:
    """A table whose backfill is delivered in pieces of 20,000 rows, in steps of 5,000."""
    database.execute(_ITEMS.replace("400", "20000"))
    monkeypatch.setattr(Pieces, "_step_s", lambda _pieces: 0.0)
    return Rig(database, tmp_path), []


def _call_behind_steps(
    monkeypatch: pytest.MonkeyPatch, steps: Steps, call: Callable[[Worker, Piece], None]
) -> None:
    """Before a step is reported."""
    reports = Worker._report

    def report(worker: Worker, decoded: Any, share: Any, outcome: Any, took_s: float) -> Any:
        if isinstance(decoded, Piece):
            steps.append((decoded.place, outcome.cursor.idx - decoded.place.idx))
            call(worker, decoded)
        return reports(worker, decoded, share, outcome, took_s)

    monkeypatch.setattr(Worker, "_report", report)


def _marks(rig: Rig, connection: Connection) -> tuple[Backfill, Chunk]:
    """A reload whose begin may be placed."""
    number = rig.start("item", reload=True)
    term = rig.source.term
    (backfill,) = open_backfills(connection, SOURCE, "files", only=number)
    begin = (backfill.table, 0, 0, ReloadStep.BEGIN)
    add_chunks(connection, SOURCE, term, number, [begin], planned=True)
    return backfill, _ready(connection, number)


def _ready(connection: Connection, number: int, *, ended: bool = False) -> Chunk:
    (chunk,) = chunks_of(connection, number, ended=ended)
    mark_ready(connection, chunk)
    (chunk,) = chunks_of(connection, number, ended=ended)
    return chunk


def _pieces(rig: Rig, pool: ConnectionPool) -> Pieces:
    return Pieces(SOURCE, rig.source.term, "files", Wanted(), pool)


_NO_LOG: Any = None  # marks overtake nothing


def test_no_mark_takes_the_place_of_one_that_was_cancelled_and_may_be_at_its_sink(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    pool, end = ConnectionPool(rig.state_dsn, name="test"), Cursor(8_000_001, 0)
    with connect(rig.state_dsn, name="test") as state:
        backfill, begin = _marks(rig, state)
        pieces = _pieces(rig, pool)
        pieces.begin(state, end, end)
        assert pieces.offer(ReadyChunk(backfill, begin, may_omit=True), pieces.generation)
        placed = pieces.next(end, _NO_LOG, behind=False)
        assert isinstance(placed, MarkPiece)
        # The process dies before it is settled, and the source is idle.
        state.execute("SELECT walbrook.cancel_backfill(%s)", (backfill.id,))
        pieces = _pieces(rig, pool)
        pieces.begin(state, end, end)
        drop = _ready(state, backfill.id, ended=True)
        assert pieces.offer(ReadyChunk(backfill, drop, may_omit=True), pieces.generation)
        dropped = pieces.next(end, _NO_LOG, behind=False)
        assert isinstance(dropped, MarkPiece)
        assert dropped.place >= placed.high
        # A sink that refuses it is not asked at once again.
        pieces.mark_refused(dropped, OperatorError("it may not", fix="let it"))
        (drop,) = chunks_of(state, backfill.id, ended=True)
        assert pieces.offer(ReadyChunk(backfill, drop, may_omit=True), pieces.generation)
        assert pieces.next(end, _NO_LOG, behind=False) is None
    pool.end()


def test_a_piece_that_is_handed_out_again_is_held_once_whatever_the_runner_offers(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    pool, end = ConnectionPool(rig.state_dsn, name="test"), Cursor(8_000_001, 0)
    with connect(rig.state_dsn, name="test") as state:
        backfill, begin = _marks(rig, state)
        pieces = _pieces(rig, pool)
        pieces.begin(state, end, end)
        assert pieces.offer(ReadyChunk(backfill, begin, may_omit=True), pieces.generation)
        assert pieces.next(end, _NO_LOG, behind=False)

        def looked_up(*given: Any) -> tuple[Backfill, Chunk] | None:
            """The runner looks in the same moment."""
            found = placed_chunk(*given)
            assert found is not None
            pieces.offer(ReadyChunk(*found, may_omit=True), pieces.generation)
            return found

        monkeypatch.setattr(pieces_of, "placed_chunk", looked_up)
        pieces.begin(state, end, end)
        assert pieces.held() == [(backfill.id, begin.number)]
    pool.end()


def test_the_pace_of_a_new_backfill_may_be_asked_for_while_those_of_others_are_forgotten() -> None:
    pieces = Pieces(SOURCE, 1, "files", Wanted(), ConnectionPool("", name="test"))
    ended, before = threading.Event(), sys.getswitchinterval()
    known = set(range(500))
    for number in known:
        pieces._pace(number)

    def ask() -> None:
        number = len(known)
        while not ended.is_set():
            pieces._pace(number := number + 1)

    asking = threading.Thread(target=ask)
    sys.setswitchinterval(1e-6)
    try:
        asking.start()
        for _ in range(2_000):
            pieces.forget_others(known)
    finally:
        sys.setswitchinterval(before)
        ended.set()
        asking.join()


def test_a_reload_that_is_being_cancelled_does_not_begin(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with connect(rig.state_dsn, name="test") as state, connect(rig.state_dsn, name="op") as other:
        backfill, begin = _marks(rig, state)
        placed: list[int | None] = []

        def place() -> None:
            placed.append(
                place_piece(
                    state,
                    SOURCE,
                    rig.source.term,
                    begin,
                    Cursor(8_000_001, 0),
                    1,
                    looked_lsn=None,
                    incomplete=[],
                )
            )

        with other.transaction():
            other.execute("SELECT walbrook.cancel_backfill(%s)", (backfill.id,))
            thread = threading.Thread(target=place)
            thread.start()
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            until("it waits", lambda: placed or rig.rows(waits) != [(0,)])
        thread.join(30)
        assert placed == [None]
        assert chunks_of(state, backfill.id, ended=True) == []
