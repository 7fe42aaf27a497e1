"""The ledger as rows of ``walbrook.ledger`` in the state database: one row per note.

Messages of a queue have one row per message.

Notes that come while a statement is under way share the next one: many deliveries at once cost one
round trip, not one each. A note returns only when its own row is there.

A row is not waited for on the server's disk: a server that loses power forgets the last fraction of
a second, which costs repeats, and a note would otherwise cost a sync. Invariant: a
name that is no consumer's (any more) gets no rows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg

from cdc.connection import Connection, connect
from cdc.cursor import Cursor, format_lsn
from cdc.errors import TransientError
from cdc.queue.ledger.base import Integers, pack_each, pack_note
from cdc.state.ledgers import TRIM

STATEMENT_S: Final = 10

_SEEN = """
SELECT cursors FROM walbrook.ledger
 WHERE ledger = %(ledger)s::uuid AND queued = %(queued)s
   AND (high_lsn, high_idx) >= (%(lsn)s::pg_lsn, %(idx)s)
"""
# Two processes may send the same request for a moment after a crash, cut differently.
_NOTE = """
INSERT INTO walbrook.ledger AS l (ledger, queued, high_lsn, high_idx, cursors)
SELECT n.ledger, false, n.lsn, n.idx, n.cursors
  FROM unnest(%(ledgers)s::uuid[], %(lsn)s::pg_lsn[], %(idx)s::bigint[], %(cursors)s::bytea[])
       AS n (ledger, lsn, idx, cursors)
 WHERE EXISTS (SELECT FROM walbrook.consumers c WHERE c.ledger = n.ledger)
    ON CONFLICT (ledger, queued, high_lsn, high_idx)
    DO UPDATE SET cursors = l.cursors || excluded.cursors
"""
_NOTE_QUEUED = """
INSERT INTO walbrook.ledger (ledger, queued, high_lsn, high_idx, cursors)
SELECT %(ledger)s::uuid, true, n.lsn, n.idx, n.cursor
  FROM unnest(%(lsn)s::pg_lsn[], %(idx)s::bigint[], %(cursors)s::bytea[]) AS n (lsn, idx, cursor)
 WHERE EXISTS (SELECT FROM walbrook.consumers c WHERE c.ledger = %(ledger)s::uuid)
    ON CONFLICT (ledger, queued, high_lsn, high_idx) DO NOTHING
"""
DROP = """
DELETE FROM walbrook.ledger l USING unnest(%(lsn)s::pg_lsn[], %(idx)s::bigint[]) AS n (lsn, idx)
 WHERE l.ledger = %(ledger)s::uuid AND l.queued AND l.high_lsn = n.lsn AND l.high_idx = n.idx
"""


@dataclass(eq=False)
class _Note:
    """One note to be written, and what became of that."""

    ledger: str
    high: Cursor
    cursors: bytes
    done: bool = False
    error: TransientError | None = None


class PostgresLedger:
    """Rows over one connection, which is opened when it is first needed."""

    with_state = True

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._notes: deque[_Note] = deque()  # one per thread that delivers, at most

    def seen(self, ledger: str, first: Cursor, last: Cursor, *, queued: bool = False) -> bytes:
        rows = self._execute(_SEEN, {"ledger": ledger, "queued": queued, **_place(first)})
        return b"".join(bytes(row[0]) for row in rows)  # type: ignore[call-overload]

    def note(self, ledger: str, lsn: Integers, idx: Integers, *, queued: bool = False) -> None:
        if queued:
            cursors = pack_each(lsn, idx)
            self._execute(_NOTE_QUEUED, {**dropped(ledger, lsn, idx), "cursors": cursors})
            return
        note = _Note(ledger, *pack_note(lsn, idx))
        self._notes.append(note)
        with self._lock:
            if not note.done:  # else the delivery that had the connection before has written it too
                self._write_notes()
        if note.error is not None:
            raise note.error

    def _write_notes(self) -> None:
        """All notes that wait, in one statement; the lock is held."""
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        # Whatever ends this statement, those whose rows it had learn that they are not there.
        error: TransientError | None = TransientError("the ledger could not be written")
        try:
            self._execute_locked(_NOTE, _rows_of(notes))
            error = None
        except TransientError as failed:
            error = failed
        finally:
            for note in notes:
                note.done, note.error = True, error

    def trim(self, ledger: str, below: Cursor) -> None:
        self._execute(TRIM, {"ledger": ledger, **_place(below)})

    def drop(self, ledger: str, lsn: Integers, idx: Integers) -> None:
        self._execute(DROP, dropped(ledger, lsn, idx))

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _execute(self, query: str, given: Mapping[str, object]) -> list[tuple[object, ...]]:
        """One statement; over a connection that turns out to be gone, once more over a new one."""
        with self._lock:
            return self._execute_locked(query, given)

    def _execute_locked(self, query: str, given: Mapping[str, object]) -> list[tuple[object, ...]]:
        kept = self._connection is not None
        try:
            return self._answer(query, given)
        except psycopg.OperationalError as error:
            self._disconnect()
            if not kept or isinstance(error, psycopg.errors.QueryCanceled):
                raise _unreachable(error) from error
        except psycopg.Error as error:
            self._disconnect()
            raise _unreachable(error) from error
        try:
            return self._answer(query, given)
        except psycopg.Error as error:
            self._disconnect()
            raise _unreachable(error) from error

    def _answer(self, query: str, given: Mapping[str, object]) -> list[tuple[object, ...]]:
        if self._connection is None:
            self._connection = connect(self._dsn, name="ledger", statement_s=STATEMENT_S)
            self._connection.execute("SET synchronous_commit = off")
        answer = self._connection.execute(query.encode(), given)
        return answer.fetchall() if answer.description else []

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def dropped(ledger: str, lsn: Integers, idx: Integers) -> dict[str, object]:
    """What ``DROP`` is given, for those who run it in a transaction of theirs."""
    return {
        "ledger": ledger,
        "lsn": [format_lsn(each) for each in lsn.tolist()],
        "idx": idx.tolist(),
    }


def _rows_of(notes: Sequence[_Note]) -> dict[str, object]:
    """What ``_NOTE`` is given: each row once, in the order that every process takes them in."""
    rows: dict[tuple[str, Cursor], bytes] = {}
    for note in notes:
        key = (note.ledger, note.high)
        rows[key] = rows.get(key, b"") + note.cursors
    keys = sorted(rows)
    # As Postgres writes arrays: psycopg takes far longer for lists.
    return {
        "ledgers": _array(ledger for ledger, _ in keys),
        "lsn": _array(format_lsn(high.lsn) for _, high in keys),
        "idx": _array(str(high.idx) for _, high in keys),
        "cursors": _array(f'"\\\\x{rows[key].hex()}"' for key in keys),
    }


def _array(values: Iterable[str]) -> str:
    """Values without quotes, commas or spaces of their own, as the text of an array."""
    return "{" + ",".join(values) + "}"


def _place(cursor: Cursor) -> dict[str, object]:
    return {"lsn": format_lsn(cursor.lsn), "idx": cursor.idx}


def _unreachable(error: psycopg.Error) -> TransientError:
    text = str(error).strip().partition("\n")[0]
    return TransientError(
        f"the ledger in the state database cannot be used: {text}",
        fix="it is tried again; check that the state database is up and can be reached from the "
        "process that delivers, which on a cluster is an executor",
    )
