"""What operators do, from Python: the SQL functions, their refusals as errors of ours.

The functions decide everything (``migrations/functions``); the command line and the HTTP
API pass on what they say. A refusal has one of three kinds: ``unknown`` (there is no such consumer,
dead letter or message), ``malformed`` (the request makes no sense) and ``refused`` (it cannot be
done as things are).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.rows import dict_row

from cdc.connection import Connection
from cdc.errors import OperatorError

State = dict[str, object]
"""The columns of ``walbrook.consumer_state`` by name."""

_KINDS = {
    "WB001": "unknown",  # consumer
    "P0002": "unknown",  # no_data_found
    "P0003": "refused",  # too_many_rows: an ambiguous name
    "55000": "refused",  # object_not_in_prerequisite_state
    "42501": "refused",  # insufficient_privilege
    "42883": "missing",  # undefined_function
    "42P01": "missing",  # undefined_table
    "3F000": "missing",  # invalid_schema_name
}
COUNTED_MAX = 10_000
"""``waiting`` and ``dead_letters`` of a state are counted up to here: it stands for more, too."""

LETTERS_MAX = 1_000
"""Most dead letters that are listed at once."""

_PAUSE = "SELECT * FROM walbrook.pause(%s)"
_RESUME = "SELECT * FROM walbrook.resume(%s)"
_ACCEPT_LOSS = "SELECT * FROM walbrook.accept_loss(%s)"
_REWIND = """
SELECT * FROM walbrook.rewind(%s, to_cursor => %s, to_time => %s::timestamptz, to_earliest => %s,
                              destination => %s)
"""
_SKIP_TO = "SELECT * FROM walbrook.skip_to(%s, %s)"
_ADVANCE_WATERMARK = """
SELECT to_char(walbrook.advance_watermark(%s, to_time => %s::timestamptz, source => %s)
               AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS watermark
"""
_SET_PARTITION_IDLE = "SELECT * FROM walbrook.set_partition_idle(%s, %s, idle => %s)"
_FINISH_SOURCE = "SELECT walbrook.finish_source(%s, %s, finished => %s)"
_ACCEPT_GAP = """
SELECT source, consumer, from_lsn || ':' || from_idx AS "from", to_lsn || ':' || to_idx AS "to",
       reason, noted_at
  FROM walbrook.accept_gap(%s, %s::pg_lsn)
"""
_FORGET = "SELECT walbrook.forget(%s)"
_FORGET_SOURCE = "SELECT walbrook.forget_source(%s)"
_DISCARD_ALL = "SELECT * FROM walbrook.discard_all(%s)"
_REDELIVER_ONE = "SELECT * FROM walbrook.redeliver(%s::bigint, %s::text)"
_REDELIVER = "SELECT * FROM walbrook.redeliver(%s::text)"
_DISCARD_ONE = "SELECT * FROM walbrook.discard(%s::bigint, %s::text)"
_DISCARD = "SELECT * FROM walbrook.discard(%s::text)"
_DISCARD_WAITING = "SELECT * FROM walbrook.discard(%s::text, %s::text)"
_KNOWN = """
SELECT FROM walbrook.consumers WHERE name = %(named)s OR source || '/' || name = %(named)s
"""
_LETTERS = """
SELECT id, source, consumer, walbrook.called(source, consumer) AS called,
       commit_lsn || ':' || commit_idx AS cursor, table_schema, table_name, action, kind,
       error, deliveries, event IS NOT NULL AS was_message, dead_at
  FROM walbrook.dead_letters
 WHERE %(named)s::text IS NULL OR consumer = %(named)s OR source || '/' || consumer = %(named)s
 ORDER BY commit_lsn, commit_idx, id LIMIT %(most)s
"""


def pause(connection: Connection, consumer: str) -> State:
    return _act(connection, _PAUSE, consumer)


def resume(connection: Connection, consumer: str) -> State:
    return _act(connection, _RESUME, consumer)


def accept_loss(connection: Connection, consumer: str) -> State:
    return _act(connection, _ACCEPT_LOSS, consumer)


def rewind(
    connection: Connection,
    consumer: str,
    *,
    to_cursor: str | None = None,
    to_time: str | None = None,
    to_earliest: bool = False,
    destination: str | None = None,
) -> State:
    """``to_time`` is whatever Postgres takes for a time.

    ``destination`` says what becomes of what a destination with a position of its own holds:
    ``new_generation`` or ``truncate``.
    """
    return _act(connection, _REWIND, consumer, to_cursor, to_time, to_earliest, destination)


def skip_to(connection: Connection, consumer: str, cursor: str) -> State:
    """Move the consumer forward; what lies before ``cursor`` is given up, and a gap says so."""
    return _act(connection, _SKIP_TO, consumer, cursor)


def advance_watermark(
    connection: Connection, consumer: str, to_time: str | None, source: str | None = None
) -> State:
    """``to_time`` is whatever Postgres takes for a time. Returns the least ``watermark`` then."""
    return _act(connection, _ADVANCE_WATERMARK, consumer, to_time, source)


def set_partition_idle(
    connection: Connection, consumer: str, partition: str | None, *, idle: bool = True
) -> State:
    return _act(connection, _SET_PARTITION_IDLE, consumer, partition, idle)


def finish_source(
    connection: Connection, consumer: str, source: str, *, finished: bool = True
) -> State:
    """Say that a database of a consumer in event-time order has ended, or counts again."""
    with refusals():
        connection.execute(_FINISH_SOURCE, (consumer, source, finished))
    return {"source": source, "consumer": consumer, "finished": finished}


def accept_gap(connection: Connection, source: str, lsn: str) -> list[State]:
    """Move a source that has lost changes, and its consumers. Returns what they never get."""
    with refusals():
        rows = connection.cursor(row_factory=dict_row)
        return rows.execute(_ACCEPT_GAP, (source, lsn)).fetchall()


def forget(connection: Connection, consumer: str) -> int:
    """Remove a consumer that is not active. Returns of how many sources it was one."""
    return _count(connection, _FORGET, consumer)


def forget_source(connection: Connection, source: str) -> int:
    """Remove a source that is not served. Returns how many consumers went with it."""
    return _count(connection, _FORGET_SOURCE, source)


def discard_all(connection: Connection, consumer: str) -> State:
    return _act(connection, _DISCARD_ALL, consumer)


def redeliver(connection: Connection, consumer: str, letter: int | None = None) -> State:
    """One dead letter of the consumer, or all that can be sent again."""
    if letter is None:
        return _act(connection, _REDELIVER, consumer)
    return _act(connection, _REDELIVER_ONE, letter, consumer)


def discard(
    connection: Connection, consumer: str, letter: int | None = None, cursor: str | None = None
) -> State:
    """One dead letter of the consumer, one message that waits, or all dead letters."""
    if letter is not None and cursor is not None:
        raise OperatorError(
            "a dead letter has an id, a message that waits has a cursor; both were given",
            fix="give one of them",
            kind="malformed",
        )
    if letter is not None:
        return _act(connection, _DISCARD_ONE, letter, consumer)
    if cursor is not None:
        return _act(connection, _DISCARD_WAITING, consumer, cursor)
    return _act(connection, _DISCARD, consumer)


def dead_letters(
    connection: Connection, consumer: str | None = None, most: int = LETTERS_MAX
) -> list[State]:
    """The first dead letters, of one consumer or of all, in the order of their cursors."""
    with refusals():
        rows = connection.cursor(row_factory=dict_row)
        named = {"named": consumer}
        found = rows.execute(_LETTERS, {**named, "most": most}).fetchall()
        if consumer and not found and connection.execute(_KNOWN, named).fetchone() is None:
            raise OperatorError(
                f"there is no consumer {consumer}",
                fix="walbrook status lists them",
                kind="unknown",
            )
        return found


def _count(connection: Connection, statement: str, name: str) -> int:
    with refusals():
        row = connection.execute(statement.encode(), (name,)).fetchone()
    assert row is not None
    return int(str(row[0]))


def _act(connection: Connection, statement: str, *arguments: object) -> State:
    with refusals():
        row = connection.cursor(row_factory=dict_row).execute(statement, arguments).fetchone()
    assert row is not None
    return row


@contextmanager
def refusals() -> Iterator[None]:
    """What the functions refuse, and what Postgres cannot read, as errors that say what to do."""
    try:
        yield
    except psycopg.Error as error:
        kind = _KINDS.get(error.sqlstate or "", "malformed" if _unreadable(error) else "")
        if kind == "missing":
            raise OperatorError(
                "the state database does not know this command yet",
                fix="run walbrook migrate, or start the service",
                kind="refused",
            ) from error
        if not kind:
            raise
        what = error.diag.message_primary or str(error).strip()
        raise OperatorError(what, fix=error.diag.message_hint or "", kind=kind) from None


def _unreadable(error: psycopg.Error) -> bool:
    return isinstance(error, psycopg.DataError)
