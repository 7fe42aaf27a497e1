"""The chunks of backfills as rows: how each was read, and how far it is delivered.

Invariants: a chunk's file is recorded once it is whole on disk. A piece of a chunk has its place
among the changes recorded before anything of it is sent, and counts as delivered in the transaction
that settles the consumer's cursor behind it. So a crash repeats a piece under the same cursors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdc.backfill.ranges import BlockRange, GoneRows, Range, ReloadStep, ValueRange
from cdc.backfill.snapshot import Snapshot
from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn, parse_lsn
from cdc.generation import Generation
from cdc.state.backfill_keys import searched
from cdc.state.backfills import Backfill, as_int, as_text, open_backfills, require_latest

ATTEMPTS_MAX = 10
"""Most times that one chunk is read, whatever it has to be read again for."""

_CHUNKS = """
SELECT number, leaf_schema, leaf_name, leaf_oid::int8, filenode, kind, first_block, end_block,
       after_value, until_value, state, snapshot, read_lsn::text, look_lsn::text, file, rows,
       delivered, piece_rows, place_lsn::text, place_idx, attempts
  FROM walbrook.backfill_chunks
 WHERE backfill = %s AND state IN ('planned', 'read', 'delivering')
   AND (kind = 'drop') = %s
 ORDER BY place_lsn IS NULL, state = 'planned', state, number LIMIT %s
"""
_PLAN = """
INSERT INTO walbrook.backfill_chunks
       (backfill, number, leaf_schema, leaf_name, leaf_oid, filenode, kind, first_block, end_block,
        after_value, until_value)
VALUES (%s, (SELECT coalesce(max(number), 0) + 1 FROM walbrook.backfill_chunks WHERE backfill = %s),
        %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_ADD_SWAP = """
INSERT INTO walbrook.backfill_chunks
       (backfill, number, leaf_schema, leaf_name, leaf_oid, filenode, kind)
SELECT b.id, (SELECT max(number) + 1 FROM walbrook.backfill_chunks WHERE backfill = b.id),
       b.table_schema, b.table_name, 0, 0, 'swap'
  FROM walbrook.backfills b
 WHERE b.id = %(id)s AND NOT EXISTS (SELECT FROM walbrook.backfill_chunks k
                                      WHERE k.backfill = b.id AND k.kind = 'swap')
"""
_MARK_READY = """
UPDATE walbrook.backfill_chunks
   SET state = 'read', rows = 1, bytes = 0, read_lsn = '0/0', look_lsn = '0/0',
       read_at = clock_timestamp()
 WHERE backfill = %s AND number = %s AND state = 'planned'
"""
_PLANNED = """
UPDATE walbrook.backfills
   SET state = 'running', reason = NULL, waits_for = NULL, waits_since = NULL,
       planned = planned OR %(planned)s,
       started_at = coalesce(started_at, clock_timestamp()),
       estimated_rows = coalesce(%(rows)s, estimated_rows),
       estimated_bytes = coalesce(%(bytes)s, estimated_bytes)
 WHERE id = %(id)s AND state IN ('waiting', 'running')
"""
_READ = """
UPDATE walbrook.backfill_chunks
   SET state = 'read', snapshot = %(snapshot)s, read_lsn = %(lsn)s::pg_lsn,
       look_lsn = %(look)s::pg_lsn, file = %(file)s, rows = %(rows)s, bytes = %(bytes)s,
       delivered = 0, piece_rows = NULL, place_lsn = NULL, place_idx = NULL,
       read_at = clock_timestamp(), error = NULL
 WHERE backfill = %(backfill)s AND number = %(number)s AND state = 'planned'
"""
_SAME_PLACE = """
SELECT FROM walbrook.consumers c
  JOIN walbrook.backfills b ON (b.source, b.consumer) = (c.source, c.name)
 WHERE b.id = %s AND (c.generation, c.truncation) = (%s, %s) FOR SHARE OF c
"""
_PLACE = """
UPDATE walbrook.backfill_chunks k
   SET state = 'delivering', piece_rows = %s, place_lsn = %s::pg_lsn, place_idx = %s
  FROM walbrook.backfills b
 WHERE k.backfill = %s AND k.number = %s AND b.id = k.backfill
   AND (b.state IN ('waiting', 'running') OR k.kind = 'drop')
   AND k.state IN ('read', 'delivering')
"""
_BEGUN = "UPDATE walbrook.backfills SET begun_lsn = %s::pg_lsn WHERE id = %s"
_PLACED = """
SELECT k.backfill, k.number FROM walbrook.backfill_chunks k
  JOIN walbrook.backfills b ON b.id = k.backfill
 WHERE b.source = %s AND b.consumer = %s AND k.place_lsn IS NOT NULL
   AND (b.state IN ('waiting', 'running', 'paused', 'failed') OR k.kind = 'drop')
"""
_LOCK = "SELECT FROM walbrook.backfills WHERE id = %s FOR NO KEY UPDATE"
PIECE_DONE = """
UPDATE walbrook.backfill_chunks
   SET delivered = delivered + %(rows)s, dropped = dropped + %(dropped)s,
       merged = merged + %(merged)s, piece_rows = NULL, place_lsn = NULL, place_idx = NULL,
       state = CASE WHEN delivered + %(rows)s >= rows THEN 'done' ELSE state END,
       done_at = CASE WHEN delivered + %(rows)s >= rows THEN clock_timestamp() END
 WHERE backfill = %(backfill)s AND number = %(number)s AND piece_rows IS NOT NULL
"""
_EMPTY_DONE = """
UPDATE walbrook.backfill_chunks SET state = 'done', done_at = clock_timestamp()
 WHERE backfill = %s AND number = %s
"""
_AGAIN = """
UPDATE walbrook.backfill_chunks
   SET state = 'planned', snapshot = NULL, read_lsn = NULL, look_lsn = NULL, file = NULL,
       rows = NULL, bytes = NULL, delivered = 0, piece_rows = NULL, place_lsn = NULL,
       place_idx = NULL, attempts = attempts + %(failed)s, error = %(error)s
 WHERE backfill = %(backfill)s
   AND CASE WHEN %(number)s::integer IS NULL THEN state IN ('read', 'delivering')
            ELSE number = %(number)s END
"""
_UNPLACE = """
UPDATE walbrook.backfill_chunks SET piece_rows = NULL, place_lsn = NULL, place_idx = NULL
 WHERE backfill = %s AND number = %s
"""
_CUT = """
UPDATE walbrook.backfill_chunks SET end_block = %s
 WHERE backfill = %s AND number = %s AND state = 'planned'
"""
_REPLACE = """
UPDATE walbrook.backfill_chunks SET state = 'replaced', file = NULL
 WHERE backfill = %s AND leaf_oid = %s AND state IN ('planned', 'read') AND kind <> 'deletes'
"""
_LEAVES = """
SELECT DISTINCT ON (leaf_oid) leaf_oid::int8, state = 'replaced' FROM walbrook.backfill_chunks
 WHERE backfill = %s AND kind IN ('blocks', 'values')
 ORDER BY leaf_oid, number DESC
"""
_LEFT = """
SELECT EXISTS (SELECT FROM walbrook.backfill_chunks
                WHERE backfill = %(id)s AND state NOT IN ('done', 'replaced')),
       EXISTS (SELECT FROM walbrook.backfill_keys WHERE backfill = %(id)s),
       EXISTS (SELECT FROM walbrook.backfill_chunks
                WHERE backfill = %(id)s AND kind = 'swap' AND state = 'done')
"""
_FILES = """
SELECT file FROM walbrook.backfill_chunks k JOIN walbrook.backfills b ON b.id = k.backfill
 WHERE b.source = %s AND b.consumer = %s AND k.file IS NOT NULL
   AND b.state NOT IN ('done', 'cancelled', 'skipped') AND k.state IN ('read', 'delivering')
"""


@dataclass(frozen=True)
class Chunk:
    """A part of a table, and how far it is."""

    backfill: int
    number: int
    leaf: TableName
    leaf_oid: int
    filenode: int
    range: Range | None  # None: rows by their keys
    state: str
    snapshot: Snapshot | None
    read_lsn: int
    look_lsn: int
    file: Path | None
    rows: int
    delivered: int
    piece_rows: int | None
    place: Cursor | None
    attempts: int


@dataclass(frozen=True)
class PieceDone:
    """A piece of a chunk that ends: so many rows of it are settled."""

    backfill: int
    number: int
    rows: int
    dropped: int
    merged: int


def placed_chunk(
    connection: Connection, source: str, consumer: str
) -> tuple[Backfill, Chunk] | None:
    """The chunk with a piece that has a place and is not settled; a consumer has at most one."""
    row = connection.execute(_PLACED, (source, consumer)).fetchone()
    if row is None:
        return None
    backfill, number = as_int(row[0]), as_int(row[1])
    (found,) = open_backfills(connection, source, consumer, only=backfill)
    chunks = chunks_of(connection, backfill, ended=found.has_ended)
    chunk = next(each for each in chunks if each.number == number)
    return found, chunk


def chunks_of(
    connection: Connection, backfill: int, most: int = 1_000, *, ended: bool = False
) -> list[Chunk]:
    """The chunks that are not done, those that were read first; of one that has ended its last."""
    rows = connection.execute(_CHUNKS, (backfill, ended, most)).fetchall()
    return [_chunk(backfill, row) for row in rows]


def add_chunks(
    connection: Connection,
    source: str,
    term: int,
    backfill: int,
    chunks: Iterable[tuple[TableName, int, int, Range | None]],
    *,
    planned: bool,
    rows: int | None = None,
    size: int | None = None,
) -> None:
    """More chunks: leaf, its oid, its file, and which rows. ``planned``: there are no others."""
    with connection.transaction():
        require_latest(connection, source, term)
        with connection.cursor() as cursor:
            cursor.executemany(
                _PLAN,
                [
                    (backfill, backfill, leaf.schema, leaf.table, oid, filenode, *_range(given))
                    for leaf, oid, filenode, given in chunks
                ],
            )
        figures = {"id": backfill, "planned": planned, "rows": rows, "bytes": size}
        connection.execute(_PLANNED, figures)


def replace_leaf(
    connection: Connection,
    source: str,
    term: int,
    backfill: int,
    old: int,
    chunks: Iterable[tuple[TableName, int, int, Range | None]],
) -> None:
    """Plan a leaf again whose rows have moved; what was delivered of it comes once more."""
    with connection.transaction():
        connection.execute(_REPLACE, (backfill, old))
        add_chunks(connection, source, term, backfill, chunks, planned=False)


def split_chunk(connection: Connection, source: str, term: int, chunk: Chunk, middle: int) -> None:
    """Two chunks in place of one that took too long."""
    assert isinstance(chunk.range, BlockRange)
    with connection.transaction():
        connection.execute(_CUT, (middle, chunk.backfill, chunk.number))
        rest = BlockRange(middle, chunk.range.end)
        more = [(chunk.leaf, chunk.leaf_oid, chunk.filenode, rest)]
        add_chunks(connection, source, term, chunk.backfill, more, planned=False)


def chunk_read(
    connection: Connection,
    source: str,
    term: int,
    chunk: Chunk,
    generation: Generation,
    *,
    snapshot: Snapshot,
    lsn: int,
    look_lsn: int,
    file: Path,
    rows: int,
    size: int,
) -> bool:
    """A chunk's rows are in its file, whole and on disk.

    Returns False if they are to be read again: they were read for another ``generation``, to which
    changes went that the present one does not get, or the chunk was replaced meanwhile.
    """
    with connection.transaction():
        require_latest(connection, source, term)
        place = (chunk.backfill, *generation)
        if connection.execute(_SAME_PLACE, place).fetchone() is None:
            return False
        read = connection.execute(
            _READ,
            {
                "snapshot": str(snapshot),
                "lsn": format_lsn(lsn),
                "look": format_lsn(look_lsn),
                "file": str(file),
                "rows": rows,
                "bytes": size,
                "backfill": chunk.backfill,
                "number": chunk.number,
            },
        )
        if read.rowcount and not rows:
            nothing_left(connection, chunk)
        return bool(read.rowcount)


def mark_ready(connection: Connection, chunk: Chunk) -> None:
    """A mark of a reload needs no reading: its worker may place it."""
    connection.execute(_MARK_READY, (chunk.backfill, chunk.number))


def add_swap(connection: Connection, source: str, term: int, backfill: int) -> None:
    """All rows are in the shadow: the mark comes that swaps it in, once."""
    with connection.transaction():
        require_latest(connection, source, term)
        connection.execute(_ADD_SWAP, {"id": backfill})


def nothing_left(connection: Connection, chunk: Chunk) -> None:
    """A chunk without rows is done."""
    connection.execute(_EMPTY_DONE, (chunk.backfill, chunk.number))


def place_piece(
    connection: Connection,
    source: str,
    term: int,
    chunk: Chunk,
    place: Cursor,
    rows: int,
    *,
    looked_lsn: int | None,
    incomplete: Sequence[Sequence[str]],
) -> int | None:
    """Record where the next piece of a chunk stands, before anything of it is sent.

    ``incomplete`` are keys of rows whose values a change left out, as the log has it up to
    ``looked_lsn``. Returns how many such keys there are; None if an operator has paused or ended
    the backfill.
    """
    lsn, idx = place
    with connection.transaction():
        require_latest(connection, source, term)
        if chunk.range is ReloadStep.BEGIN:  # a cancel sees its place, or is seen here
            connection.execute(_LOCK, (chunk.backfill,))
        placed = connection.execute(
            _PLACE, (rows, format_lsn(lsn), idx, chunk.backfill, chunk.number)
        )
        if not placed.rowcount:
            return None
        if chunk.range is ReloadStep.BEGIN:
            connection.execute(_BEGUN, (format_lsn(lsn), chunk.backfill))
        if looked_lsn is None:
            return 0
        return searched(connection, chunk.backfill, looked_lsn, incomplete)


def read_again(
    connection: Connection, chunk: Chunk, *, error: str | None = None, failed: bool = False
) -> None:
    """Forget what was read of a chunk: it is read once more."""
    connection.execute(
        _AGAIN,
        {"error": error, "failed": int(failed), "backfill": chunk.backfill, "number": chunk.number},
    )


def all_read_again(connection: Connection, backfill: int) -> None:
    """Forget what was read of a backfill and is not delivered: it is read once more."""
    connection.execute(_AGAIN, {"error": None, "failed": 0, "backfill": backfill, "number": None})


def forget_place(connection: Connection, chunk: Chunk) -> None:
    """A piece was not delivered at its place, and gets another one."""
    connection.execute(_UNPLACE, (chunk.backfill, chunk.number))
    if chunk.range is ReloadStep.BEGIN:
        connection.execute(_BEGUN, (None, chunk.backfill))


def planned_leaves(connection: Connection, backfill: int) -> set[int] | None:
    """The leaves, by oid, that have chunks; None: only rows with some keys are read.

    A leaf that left the table, and whose rest was left out, may come back.
    """
    found = connection.execute(_LEAVES, (backfill,)).fetchall()
    return {as_int(oid) for oid, replaced in found if not replaced} if found else None


def what_is_left(connection: Connection, backfill: int) -> tuple[bool, bool, bool]:
    """Whether chunks are left, rows to be read by their keys, and whether a shadow is swapped."""
    row = connection.execute(_LEFT, {"id": backfill}).fetchone()
    assert row is not None
    chunks, keys, swapped = map(bool, row)
    return chunks, keys, swapped


def recorded_files(connection: Connection, source: str, consumer: str) -> set[Path]:
    """The files of chunks that are to be delivered yet."""
    return {Path(str(row[0])) for row in connection.execute(_FILES, (source, consumer)).fetchall()}


def _range(given: Range | None) -> tuple[object, ...]:
    if given is None:
        return ("keys", None, None, None, None)
    if isinstance(given, BlockRange):
        return ("blocks", given.first, given.end, None, None)
    if isinstance(given, GoneRows):
        return ("deletes", None, None, None, None)
    if isinstance(given, ReloadStep):
        return (str(given), None, None, None, None)
    return ("values", None, None, given.after, given.until)


def _chunk(backfill: int, row: tuple[object, ...]) -> Chunk:
    (number, schema, name, oid, filenode, kind, first, end, after, until, state, snapshot, read_lsn,
     look_lsn, file, rows, delivered, piece_rows, place_lsn, place_idx, attempts) = row  # fmt: skip
    given: Range | None = None
    if kind == "blocks":
        given = BlockRange(as_int(first), None if end is None else as_int(end))
    elif kind == "deletes":
        given = GoneRows()
    elif kind == "values":
        given = ValueRange(as_text(after), as_text(until))
    elif kind != "keys":
        given = ReloadStep(str(kind))
    place = None
    if place_lsn is not None:
        place = cursor_of(place_lsn, place_idx)
    return Chunk(
        backfill=backfill,
        number=as_int(number),
        leaf=TableName(str(schema), str(name)),
        leaf_oid=as_int(oid),
        filenode=as_int(filenode),
        range=given,
        state=str(state),
        snapshot=None if snapshot is None else Snapshot.parse(str(snapshot)),
        read_lsn=0 if read_lsn is None else parse_lsn(str(read_lsn)),
        look_lsn=0 if look_lsn is None else parse_lsn(str(look_lsn)),
        file=None if file is None else Path(str(file)),
        rows=0 if rows is None else as_int(rows),
        delivered=as_int(delivered),
        piece_rows=None if piece_rows is None else as_int(piece_rows),
        place=place,
        attempts=as_int(attempts),
    )
