"""Reading a chunk: one short transaction, whose rows go into one file.

The transaction is REPEATABLE READ and READ ONLY, holds no lock but ACCESS SHARE on one leaf, writes
nothing, and needs no slot; a standby and a pooler in transaction mode will do. First the lock, then
the snapshot, then the position of the WAL, then the rows: whatever the snapshot sees was committed
below that position.

Invariants: the file is whole and on disk when ``read_chunk`` returns; memory is bounded by
``_PIECE_BYTES`` and by the largest row, whatever the chunk's size.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus

from cdc.backfill.chunk_file import chunk_file, rows_of
from cdc.backfill.open_transactions import OpenListing
from cdc.backfill.query import RowChoice, copy_rows, lock
from cdc.backfill.ranges import BlockRange
from cdc.backfill.snapshot import Snapshot
from cdc.backfill.table import PublishedTable, describe_table
from cdc.config.table import TableName
from cdc.connection import LIVENESS
from cdc.cursor import parse_lsn
from cdc.decoding.format import Wanted
from cdc.error_text import public_text
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.replication.stream import PINNED

_PIECE_BYTES: Final = 1 << 20  # what is decoded together stays in the processor's cache
_NICE: Final = 5
_PAGE_BYTES: Final = 8192
_PAGE_HEADER_BYTES: Final = 40  # at most

_BEGIN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_SNAPSHOT: Final = """
SELECT pg_current_snapshot()::text, (extract(epoch FROM clock_timestamp()) * 1000000)::int8,
       coalesce(pg_relation_filenode(%s::oid), 0)::int8, pg_is_in_recovery()
"""
_WAL_END: Final = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_insert_lsn() END::text
"""
_OPEN: Final = """
SELECT transactionid::text FROM pg_locks
 WHERE locktype = 'transactionid' AND granted AND mode = 'ExclusiveLock'
"""


class MovedTableError(TransientError):
    """The rows of a leaf lie elsewhere than when its chunks were planned."""


@dataclass(frozen=True)
class ChunkTask:
    """What a chunk reads, and where its rows go; it may be handed to another process."""

    dsn: str
    source: str
    publication: str
    table: TableName  # as its changes are named
    leaf: TableName
    leaf_oid: int
    filenode: int
    choice: RowChoice
    path: Path
    wanted: Wanted | None = None  # what the rows are decoded for, if they are
    statement_s: int = 600

    def __repr__(self) -> str:
        return f"ChunkTask({self.leaf}, {self.choice})"  # the DSN may hold a password


@dataclass(frozen=True)
class ChunkRead:
    """What a chunk came to."""

    snapshot: Snapshot
    lsn: int  # whatever the snapshot sees was committed below
    rows: int
    bytes: int  # of the text that was read


def read_chunk(task: ChunkTask) -> ChunkRead:
    """Read a chunk into its file. Errors of Postgres come back as errors of ours."""
    with (
        reading_errors(task.leaf, task.statement_s),
        closing(connect_to_read(task.dsn, f"{task.source}:backfill")) as connection,
    ):
        return _read(connection, task)


def read_chunk_apart(task: ChunkTask) -> ChunkRead | WalbrookError:
    """The same in another process: an error of ours comes back as itself."""

    def read() -> ChunkRead | WalbrookError:
        _give_way()
        try:
            return read_chunk(task)
        except WalbrookError as error:
            return error

    # The process does other work after this, which is as urgent as ever.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(read).result()


def _give_way() -> None:
    """Let this thread run behind what changes need, where Linux can tell threads apart."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, thread) + _NICE
            os.setpriority(os.PRIO_PROCESS, thread, nice)


@contextmanager
def reading_errors(leaf: TableName, statement_s: int) -> Iterator[None]:
    """Errors of Postgres while a table is read, as errors of ours."""
    try:
        yield
    except psycopg.errors.QueryCanceled as error:
        raise TransientError(
            f"reading a chunk of {leaf} took longer than {statement_s} s",
            fix="it is read again in smaller parts",
            kind="chunk_timeout",
        ) from error
    except psycopg.errors.UndefinedTable as error:
        raise MovedTableError(
            f"{leaf} is not there any more", fix="the table is planned again", kind="moved"
        ) from error
    except psycopg.ProgrammingError as error:
        raise OperatorError(
            f"{leaf} cannot be read: {public_text(error)}",
            fix="grant SELECT on it to the role of the source (and BYPASSRLS if it has row-level "
            "security), then retry the backfill"
            if isinstance(error, psycopg.errors.InsufficientPrivilege)
            else "cancel the backfill, and start it again with a where that fits the table, and a "
            "sort_column that has an order",
            kind="chunk_refused",
        ) from error
    except psycopg.Error as error:
        raise TransientError(
            f"{leaf} could not be read: {public_text(error)}", fix="it is tried again"
        ) from error


def connect_to_read(dsn: str, name: str) -> psycopg.Connection[Any]:
    """A connection without startup options, which poolers refuse."""
    return psycopg.connect(
        dsn, autocommit=True, prepare_threshold=None, application_name=f"walbrook:{name}",
        **LIVENESS,
    )  # fmt: skip


def list_open(connection: psycopg.Connection[Any]) -> OpenListing:
    """The open transactions of a primary; the LSN is taken before they are listed."""
    lsn = wal_end(connection)
    rows = connection.execute(_OPEN).fetchall()
    return OpenListing(lsn, frozenset(int(row[0]) for row in rows))


def wal_end(connection: psycopg.Connection[Any]) -> int:
    """Where the next WAL record will be, or what a standby has replayed.

    Behind the header of a page that is still empty the server says so: nothing can stand in it.
    """
    row = connection.execute(_WAL_END).fetchone()
    assert row is not None
    lsn = parse_lsn(row[0])
    within = lsn % _PAGE_BYTES
    return lsn - within if within <= _PAGE_HEADER_BYTES else lsn


def begin_reading(connection: psycopg.Connection[Any], table: TableName, statement_s: int) -> None:
    """Begin a transaction that reads a table; its snapshot is taken by the next query.

    Invariant: row-level security is an error, and never fewer rows.
    """
    connection.execute(_BEGIN)
    settings = {**PINNED, "row_security": "off", "statement_timeout": f"{statement_s}s"}
    for name, value in settings.items():
        # Not as a query: that would take the snapshot before a lock is held.
        connection.execute(sql.SQL("SET LOCAL {} TO {}").format(sql.SQL(name), value))
    connection.execute(lock(table))


def take_snapshot(connection: psycopg.Connection[Any], oid: int) -> tuple[Snapshot, int, int]:
    """The snapshot of the transaction, when it was taken (µs), and the file of a table."""
    row = connection.execute(_SNAPSHOT, (oid,)).fetchone()
    assert row is not None
    snapshot, read_us, filenode, in_recovery = row
    seen = Snapshot.parse(snapshot)
    return seen.of_standby if in_recovery else seen, int(read_us), int(filenode)


def _read(connection: psycopg.Connection[Any], task: ChunkTask) -> ChunkRead:
    begin_reading(connection, task.leaf, task.statement_s)
    snapshot, read_us, filenode = take_snapshot(connection, task.leaf_oid)
    # As low as it may be: by the time that the rows are read, the log has most often got there.
    end = wal_end(connection)
    table = describe_table(connection, task.publication, task.table)
    if task.choice.range is not None and task.leaf_oid not in {leaf.oid for leaf in table.leaves}:
        raise MovedTableError(
            f"{task.leaf} is no longer a partition of {task.table}",
            fix="the rest of its chunks is left out",
            kind="moved",
        )
    if isinstance(task.choice.range, BlockRange) and filenode != task.filenode:
        raise MovedTableError(
            f"the rows of {task.leaf} were moved to another file, as VACUUM FULL, CLUSTER and "
            "ALTER TABLE do",
            fix="its chunks are planned again",
            kind="moved",
        )
    rows, size = _copy(connection, task, table, read_us)
    connection.execute("COMMIT")
    return ChunkRead(snapshot, end, rows, size)


def _copy(
    connection: psycopg.Connection[Any], task: ChunkTask, table: PublishedTable, read_us: int
) -> tuple[int, int]:
    query = copy_rows(
        task.leaf, table.columns, table.key, table.row_filter, task.choice,
        with_partitions=table.is_partitioned,
    )  # fmt: skip
    rows = size = 0
    with chunk_file(task.path, table, task.wanted, read_us) as write:
        for text in copy_texts(connection, query):
            found = rows_of(text, table, read_us, task.wanted)
            write(found)
            rows += found.num_rows
            size += len(text)
    return rows, size


def copy_texts(
    connection: psycopg.Connection[Any], query: sql.Composed
) -> Generator[bytes, None, None]:
    """The text of a COPY in pieces of whole lines.

    Lines are taken from libpq itself: a step of psycopg for each costs more than all that the
    server does. A wait ends by the statement timeout of the server or by ``LIVENESS``.
    """
    copying = connection.pgconn
    started = copying.exec_(query.as_bytes(connection))
    if started.status != ExecStatus.COPY_OUT:
        raise error_from_result(started, connection.info.encoding)
    next_line, size = copying.get_copy_data, 1
    try:
        while size > 0:
            piece, taken = io.BytesIO(), 0
            while taken < _PIECE_BYTES:
                size, line = next_line(0)
                if size <= 0:
                    break
                taken += piece.write(line)
            if taken:
                yield piece.getvalue()
    finally:
        if size > 0:  # the rest is not wanted
            connection.cancel()
            while next_line(0)[0] > 0:
                pass
        results = [*iter(copying.get_result, None)]
    for result in results:
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result, connection.info.encoding)
