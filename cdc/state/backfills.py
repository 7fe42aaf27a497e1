"""Backfills and their chunks as rows: what is asked for, how far it is, what it waits for.

Invariants: a chunk's file is recorded once it is whole on disk. A piece of a chunk has its place
among the changes recorded before anything of it is sent, and counts as delivered in the transaction
that settles the consumer's cursor behind it. So a crash repeats a piece under the same cursors. A
start of the service that another one has replaced writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from cdc.backfill.ranges import BlockRange, Range, ValueRange
from cdc.backfill.snapshot import Snapshot
from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn, parse_lsn
from cdc.state.fence import FENCE, fenced

KEYS_MAX = 1_000_000
"""Most rows of one table that are read once more by their key."""

_OPEN_CONSUMERS = """
SELECT DISTINCT consumer FROM walbrook.backfills
 WHERE source = %(source)s AND state IN ('waiting', 'running')
 UNION
SELECT name FROM walbrook.consumers
 WHERE source = %(source)s AND active AND initial_backfill IS NOT NULL
"""
_OPEN = """
SELECT id, table_schema, table_name, where_sql, sort_column, start_position, chunk_bytes,
       rows_per_second, connections, planned, looked_lsn::text, attempts
  FROM walbrook.backfills
 WHERE source = %(source)s AND consumer = %(consumer)s AND (%(id)s::bigint IS NULL
       AND state IN ('waiting', 'running') OR id = %(id)s)
 ORDER BY id
"""
_CHUNKS = """
SELECT number, leaf_schema, leaf_name, leaf_oid::int8, filenode, kind, first_block, end_block,
       after_value, until_value, state, snapshot, read_lsn::text, look_lsn::text, file, rows,
       delivered, piece_rows, place_lsn::text, place_idx, attempts
  FROM walbrook.backfill_chunks
 WHERE backfill = %s AND state IN ('planned', 'read', 'delivering')
 ORDER BY place_lsn IS NULL, state = 'planned', state, number LIMIT %s
"""
_INITIAL = """
SELECT initial_backfill FROM walbrook.consumers
 WHERE source = %s AND name = %s AND initial_backfill IS NOT NULL FOR NO KEY UPDATE
"""
_ADD = """
INSERT INTO walbrook.backfills (source, consumer, table_schema, table_name)
VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
_EXPANDED = "UPDATE walbrook.consumers SET initial_backfill = NULL WHERE source = %s AND name = %s"
_ADD_PART = """
INSERT INTO walbrook.backfills
       (source, consumer, table_schema, table_name, where_sql, sort_column, start_position,
        chunk_bytes, rows_per_second, connections)
SELECT source, consumer, %(schema)s, %(table)s, where_sql, sort_column, start_position, chunk_bytes,
       rows_per_second, connections
  FROM walbrook.backfills WHERE id = %(id)s ON CONFLICT DO NOTHING
"""
_REMOVE = "DELETE FROM walbrook.backfills WHERE id = %s"
_PLAN = """
INSERT INTO walbrook.backfill_chunks
       (backfill, number, leaf_schema, leaf_name, leaf_oid, filenode, kind, first_block, end_block,
        after_value, until_value)
VALUES (%s, (SELECT coalesce(max(number), 0) + 1 FROM walbrook.backfill_chunks WHERE backfill = %s),
        %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_PLANNED = """
UPDATE walbrook.backfills
   SET state = 'running', reason = NULL, planned = planned OR %(planned)s,
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
 WHERE backfill = %(backfill)s AND number = %(number)s
"""
_PLACE = """
UPDATE walbrook.backfill_chunks k
   SET state = 'delivering', piece_rows = %s, place_lsn = %s::pg_lsn, place_idx = %s
  FROM walbrook.backfills b
 WHERE k.backfill = %s AND k.number = %s AND b.id = k.backfill
   AND b.state IN ('waiting', 'running') AND k.state IN ('read', 'delivering')
"""
_PLACED = """
SELECT k.backfill, k.number FROM walbrook.backfill_chunks k
  JOIN walbrook.backfills b ON b.id = k.backfill
 WHERE b.source = %s AND b.consumer = %s AND b.state IN ('waiting', 'running', 'paused')
   AND k.place_lsn IS NOT NULL
"""
_LOOKED = "UPDATE walbrook.backfills SET looked_lsn = %s::pg_lsn WHERE id = %s"
_ADD_KEYS = """
INSERT INTO walbrook.backfill_keys (backfill, key)
SELECT %s, k::jsonb FROM unnest(%s::text[]) AS k ON CONFLICT DO NOTHING
"""
_COUNT_KEYS = "SELECT count(*) FROM walbrook.backfill_keys WHERE backfill = %s"
_TAKE_KEYS = """
SELECT key::text FROM walbrook.backfill_keys WHERE backfill = %s ORDER BY key LIMIT %s
"""
PIECE_DONE = """
UPDATE walbrook.backfill_chunks
   SET delivered = delivered + piece_rows, dropped = dropped + %(dropped)s,
       merged = merged + %(merged)s, piece_rows = NULL, place_lsn = NULL, place_idx = NULL,
       state = CASE WHEN delivered + piece_rows >= rows THEN 'done' ELSE state END,
       done_at = CASE WHEN delivered + piece_rows >= rows THEN clock_timestamp() END
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
 WHERE backfill = %(backfill)s AND number = %(number)s
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
 WHERE backfill = %s AND leaf_oid = %s AND state IN ('planned', 'read')
"""
_LEFT = """
SELECT EXISTS (SELECT FROM walbrook.backfill_chunks
                WHERE backfill = %(id)s AND state NOT IN ('done', 'replaced')),
       EXISTS (SELECT FROM walbrook.backfill_keys WHERE backfill = %(id)s)
"""
_FINISH = """
UPDATE walbrook.backfills SET state = 'done', reason = NULL, finished_at = clock_timestamp()
 WHERE id = %s AND state IN ('waiting', 'running')
"""
_FAIL = """
UPDATE walbrook.backfills SET state = 'failed', reason = NULL, error = %s
 WHERE id = %s AND state IN ('waiting', 'running')
"""
_WAIT = """
UPDATE walbrook.backfills SET reason = %s
 WHERE id = %s AND reason IS DISTINCT FROM %s AND state IN ('waiting', 'running')
"""
_UNDER_WAY = "SELECT state IN ('waiting', 'running') FROM walbrook.backfills WHERE id = %s"
_FILES = """
SELECT file FROM walbrook.backfill_chunks k JOIN walbrook.backfills b ON b.id = k.backfill
 WHERE b.source = %s AND b.consumer = %s AND k.file IS NOT NULL
   AND b.state NOT IN ('done', 'cancelled', 'skipped') AND k.state IN ('read', 'delivering')
"""


@dataclass(frozen=True)
class Backfill:
    """One table of one consumer."""

    id: int
    table: TableName
    where: str | None
    sort_column: str | None
    start_position: str | None
    chunk_bytes: int
    rows_per_second: int | None
    connections: int
    planned: bool
    looked_lsn: int | None
    attempts: int


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
    """A piece of a chunk whose last row is settled."""

    backfill: int
    number: int
    dropped: int
    merged: int


def consumers_with_backfills(connection: Connection, source: str) -> set[str]:
    """The consumers of a source that are to get existing rows."""
    rows = connection.execute(_OPEN_CONSUMERS, {"source": source}).fetchall()
    return {str(row[0]) for row in rows}


def initial_tables(connection: Connection, source: str, consumer: str) -> list[str] | None:
    """The tables of a new consumer that are not in ``walbrook.backfills`` yet; ``*`` for all."""
    row = connection.execute(_INITIAL, (source, consumer)).fetchone()
    return None if row is None else [str(name) for name in row[0]]  # type: ignore[attr-defined]


def add_initial(
    connection: Connection, source: str, term: int, consumer: str, tables: Iterable[TableName]
) -> None:
    with connection.transaction():
        _require_latest(connection, source, term)
        for table in tables:
            connection.execute(_ADD, (source, consumer, table.schema, table.table))
        connection.execute(_EXPANDED, (source, consumer))


def split_by_parts(
    connection: Connection, source: str, term: int, backfill: Backfill, parts: Sequence[TableName]
) -> None:
    """In place of a partitioned table whose partitions are published, a backfill of each."""
    with connection.transaction():
        _require_latest(connection, source, term)
        for part in parts:
            named = {"schema": part.schema, "table": part.table, "id": backfill.id}
            connection.execute(_ADD_PART, named)
        connection.execute(_REMOVE, (backfill.id,))


def placed_chunk(
    connection: Connection, source: str, consumer: str
) -> tuple[Backfill, Chunk] | None:
    """The chunk with a piece that has a place and is not settled; a consumer has at most one."""
    row = connection.execute(_PLACED, (source, consumer)).fetchone()
    if row is None:
        return None
    backfill, number = _int(row[0]), _int(row[1])
    (found,) = open_backfills(connection, source, consumer, only=backfill)
    chunk = next(each for each in chunks_of(connection, backfill) if each.number == number)
    return found, chunk


def open_backfills(
    connection: Connection, source: str, consumer: str, only: int | None = None
) -> list[Backfill]:
    """Those that are waiting or running; with ``only`` that one, whatever its state."""
    named = {"source": source, "consumer": consumer, "id": only}
    rows = connection.execute(_OPEN, named).fetchall()
    return [
        Backfill(
            id=int(str(row[0])),
            table=TableName(str(row[1]), str(row[2])),
            where=_text(row[3]),
            sort_column=_text(row[4]),
            start_position=_text(row[5]),
            chunk_bytes=int(str(row[6])),
            rows_per_second=None if row[7] is None else int(str(row[7])),
            connections=int(str(row[8])),
            planned=bool(row[9]),
            looked_lsn=None if row[10] is None else parse_lsn(str(row[10])),
            attempts=int(str(row[11])),
        )
        for row in rows
    ]


def chunks_of(connection: Connection, backfill: int, most: int = 1_000) -> list[Chunk]:
    """The chunks that are not done, those that were read first."""
    rows = connection.execute(_CHUNKS, (backfill, most)).fetchall()
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
        _require_latest(connection, source, term)
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
    *,
    snapshot: Snapshot,
    lsn: int,
    look_lsn: int,
    file: Path,
    rows: int,
    size: int,
) -> None:
    """A chunk's rows are in its file, whole and on disk."""
    with connection.transaction():
        _require_latest(connection, source, term)
        connection.execute(
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
        if not rows:
            nothing_left(connection, chunk)


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
        _require_latest(connection, source, term)
        placed = connection.execute(
            _PLACE, (rows, format_lsn(lsn), idx, chunk.backfill, chunk.number)
        )
        if not placed.rowcount:
            return None
        if looked_lsn is not None:
            connection.execute(_LOOKED, (format_lsn(looked_lsn), chunk.backfill))
        if not incomplete:
            return 0
        keys = [orjson.dumps(key).decode() for key in incomplete]
        connection.execute(_ADD_KEYS, (chunk.backfill, keys))
        row = connection.execute(_COUNT_KEYS, (chunk.backfill,)).fetchone()
    return 0 if row is None else int(str(row[0]))


def read_again(
    connection: Connection, chunk: Chunk, *, error: str | None = None, failed: bool = False
) -> None:
    """Forget what was read of a chunk: it is read once more."""
    connection.execute(
        _AGAIN,
        {"error": error, "failed": int(failed), "backfill": chunk.backfill, "number": chunk.number},
    )


def forget_place(connection: Connection, chunk: Chunk) -> None:
    """The consumer was moved beyond the place of a piece: it gets another one."""
    connection.execute(_UNPLACE, (chunk.backfill, chunk.number))


def incomplete_keys(connection: Connection, backfill: int, most: int) -> list[list[str]]:
    rows = connection.execute(_TAKE_KEYS, (backfill, most)).fetchall()
    return [orjson.loads(str(row[0])) for row in rows]


def drop_keys(connection: Connection, backfill: int, keys: Sequence[Sequence[str]]) -> None:
    """These rows were read: their chunk is recorded in the same transaction of the caller."""
    connection.execute(
        "DELETE FROM walbrook.backfill_keys k USING unnest(%s::text[]) AS g (key) "
        "WHERE k.backfill = %s AND k.key = g.key::jsonb",
        ([orjson.dumps(key).decode() for key in keys], backfill),
    )


def what_is_left(connection: Connection, backfill: int) -> tuple[bool, bool]:
    """Whether chunks are left, and whether rows are to be read by their keys."""
    row = connection.execute(_LEFT, {"id": backfill}).fetchone()
    return (False, False) if row is None else (bool(row[0]), bool(row[1]))


def finish(connection: Connection, backfill: int) -> None:
    connection.execute(_FINISH, (backfill,))


def fail(connection: Connection, backfill: int, error: str) -> None:
    """Only an operator can go on with it, or without it; all others go on."""
    connection.execute(_FAIL, (error, backfill))


def waits(connection: Connection, backfill: int, reason: str | None) -> None:
    connection.execute(_WAIT, (reason, backfill, reason))


def is_under_way(connection: Connection, backfill: int) -> bool:
    """Whether no operator has paused or cancelled it."""
    row = connection.execute(_UNDER_WAY, (backfill,)).fetchone()
    return row is not None and bool(row[0])


def recorded_files(connection: Connection, source: str, consumer: str) -> set[Path]:
    """The files of chunks that are to be delivered yet."""
    return {Path(str(row[0])) for row in connection.execute(_FILES, (source, consumer)).fetchall()}


def _require_latest(connection: Connection, source: str, term: int) -> None:
    if connection.execute(FENCE, (source, term)).fetchone() is None:
        raise fenced(source)


def _range(given: Range | None) -> tuple[object, ...]:
    if given is None:
        return ("keys", None, None, None, None)
    if isinstance(given, BlockRange):
        return ("blocks", given.first, given.end, None, None)
    return ("values", None, None, given.after, given.until)


def _chunk(backfill: int, row: tuple[object, ...]) -> Chunk:
    (number, schema, name, oid, filenode, kind, first, end, after, until, state, snapshot, read_lsn,
     look_lsn, file, rows, delivered, piece_rows, place_lsn, place_idx, attempts) = row  # fmt: skip
    given: Range | None = None
    if kind == "blocks":
        given = BlockRange(_int(first), None if end is None else _int(end))
    elif kind == "values":
        given = ValueRange(_text(after), _text(until))
    place = None
    if place_lsn is not None:
        place = Cursor(parse_lsn(str(place_lsn)), _int(place_idx))
    return Chunk(
        backfill=backfill,
        number=_int(number),
        leaf=TableName(str(schema), str(name)),
        leaf_oid=_int(oid),
        filenode=_int(filenode),
        range=given,
        state=str(state),
        snapshot=None if snapshot is None else Snapshot.parse(str(snapshot)),
        read_lsn=0 if read_lsn is None else parse_lsn(str(read_lsn)),
        look_lsn=0 if look_lsn is None else parse_lsn(str(look_lsn)),
        file=None if file is None else Path(str(file)),
        rows=0 if rows is None else _int(rows),
        delivered=_int(delivered),
        piece_rows=None if piece_rows is None else _int(piece_rows),
        place=place,
        attempts=_int(attempts),
    )


def _int(value: object) -> int:
    return int(str(value))


def _text(value: object) -> str | None:
    return None if value is None else str(value)
