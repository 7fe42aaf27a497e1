"""Verifications as rows: what is asked for, how far it is, what was found.

Invariants: a start of the service that another one has replaced writes nothing. What an operator
has cancelled is not written to any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, LiteralString

from cdc.backfill.ranges import GoneRows
from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn
from cdc.errors import OperatorError
from cdc.state.backfill_chunks import add_chunks
from cdc.state.backfills import as_int, as_text, require_latest

KEYS_LISTED_MAX = 10_000
"""Most keys of one verification that are listed."""

Stage = Literal["reading", "comparing", "repairing"]

_OPEN_CONSUMERS = """
SELECT DISTINCT consumer FROM walbrook.verifications
 WHERE source = %s AND state IN ('waiting', 'reading', 'comparing', 'repairing')
"""
_NEXT = """
SELECT id, table_schema, table_name, repair FROM walbrook.verifications
 WHERE source = %s AND consumer = %s AND state IN ('waiting', 'reading', 'comparing', 'repairing')
 ORDER BY id LIMIT 1
"""
_ADD = """
INSERT INTO walbrook.verifications
       (request, source, consumer, table_schema, table_name, repair, requested_at)
SELECT request, source, consumer, %(schema)s, %(table)s, repair, requested_at
  FROM walbrook.verifications WHERE id = %(id)s
"""
_REMOVE = "DELETE FROM walbrook.verifications WHERE id = %s"
_BEGIN = """
UPDATE walbrook.verifications
   SET state = 'reading', started_at = clock_timestamp(), parts = %(parts)s, parts_done = 0,
       reason = NULL, position = %(position)s::pg_lsn, backfill = NULL, repaired = NULL
 WHERE id = %(id)s AND state IN ('waiting', 'reading', 'comparing', 'repairing')
"""
_ADVANCE = """
UPDATE walbrook.verifications
   SET state = %(state)s, parts_done = parts_done + %(parts)s, reason = %(reason)s
 WHERE id = %(id)s AND state IN ('waiting', 'reading', 'comparing', 'repairing')
"""
_FOUND = """
UPDATE walbrook.verifications
   SET source_rows = %(source_rows)s, destination_rows = %(destination_rows)s,
       missing = %(missing)s, extra = %(extra)s, different = %(different)s,
       changing = %(changing)s, reason = NULL
 WHERE id = %(id)s AND state IN ('reading', 'comparing')
"""
# Of a table the keys of the latest verification are listed, so that they are bounded.
_DROP_KEYS = """
DELETE FROM walbrook.verification_keys k USING walbrook.verifications v, walbrook.verifications n
 WHERE n.id = %s AND (v.source, v.consumer) = (n.source, n.consumer)
   AND (v.table_schema, v.table_name) = (n.table_schema, n.table_name) AND k.verification = v.id
"""
_ADD_KEYS = """
INSERT INTO walbrook.verification_keys (verification, key, difference)
SELECT %s, k.key::jsonb, k.difference FROM unnest(%s::text[], %s::text[]) AS k (key, difference)
"""
_REPAIRED = """
UPDATE walbrook.verification_keys SET repaired = NOT key = ANY (%s::text[]::jsonb[])
 WHERE verification = %s
"""
_FINISH = """
UPDATE walbrook.verifications
   SET state = 'done', reason = NULL, parts_done = parts, finished_at = clock_timestamp(),
       repaired = %s
 WHERE id = %s AND state IN ('reading', 'comparing', 'repairing')
"""
_FAIL = """
UPDATE walbrook.verifications
   SET state = 'failed', reason = NULL, error = %s, finished_at = clock_timestamp()
 WHERE id = %s AND state IN ('waiting', 'reading', 'comparing', 'repairing')
"""
_CONSUMER_POSITION = """
SELECT c.cursor_lsn::text, c.cursor_idx, c.paused_at IS NOT NULL,
       EXISTS (SELECT FROM walbrook.events e WHERE e.consumer = c.id)
  FROM walbrook.consumers c WHERE c.source = %s AND c.name = %s
"""
_REPAIR = """
INSERT INTO walbrook.backfills (source, consumer, table_schema, table_name, planned)
VALUES (%s, %s, %s, %s, true) ON CONFLICT DO NOTHING RETURNING id
"""
_REPAIR_KEYS = """
INSERT INTO walbrook.backfill_keys (backfill, key)
SELECT %s, k::jsonb FROM unnest(%s::text[]) AS k ON CONFLICT DO NOTHING
"""
_REPAIRING = """
UPDATE walbrook.verifications SET state = 'repairing', backfill = %s
 WHERE id = %s AND state IN ('reading', 'comparing', 'repairing')
"""
_BACKFILL_STATE = "SELECT state, coalesce(error, reason) FROM walbrook.backfills WHERE id = %s"


class CancelledError(OperatorError):
    """An operator has ended the verification."""


@dataclass(frozen=True)
class Verification:
    """One table of one consumer; without a table all of them."""

    id: int
    table: TableName | None
    repair: bool


@dataclass(frozen=True)
class ComparisonResult:
    """What a comparison came to; ``differences`` by the key as JSON."""

    source_rows: int
    destination_rows: int
    differences: Mapping[str, str]  # missing, extra, different
    changing: int


@dataclass(frozen=True)
class ConsumerPosition:
    """Where a consumer stands."""

    cursor: Cursor
    paused: bool
    has_queue: bool  # messages wait for another try


def consumers_with_verifications(connection: Connection, source: str) -> set[str]:
    """The consumers of a source whose destinations are to be compared."""
    return {str(row[0]) for row in connection.execute(_OPEN_CONSUMERS, (source,)).fetchall()}


def next_verification(connection: Connection, source: str, consumer: str) -> Verification | None:
    """The oldest one that has not ended; one that a crash interrupted begins again."""
    row = connection.execute(_NEXT, (source, consumer)).fetchone()
    if row is None:
        return None
    schema, table = as_text(row[1]), as_text(row[2])
    named = None if schema is None or table is None else TableName(schema, table)
    return Verification(as_int(row[0]), named, bool(row[3]))


def split_verification(
    connection: Connection, source: str, term: int, verification: int, tables: Iterable[TableName]
) -> None:
    """One per table in place of one for several."""
    with connection.transaction():
        require_latest(connection, source, term)
        for table in tables:
            named = {"schema": table.schema, "table": table.table, "id": verification}
            connection.execute(_ADD, named)
        connection.execute(_REMOVE, (verification,))


class VerificationRow:
    """The row of a verification that is under way; ``CancelledError`` once it is not any more."""

    def __init__(self, connection: Connection, source: str, term: int, verification: int) -> None:
        self._connection = connection
        self._source, self._term = source, term
        self.id = verification

    def begin(self, parts: int, position: int) -> None:
        given = {"parts": parts, "position": format_lsn(position), "id": self.id}
        with self._connection.transaction():
            require_latest(self._connection, self._source, self._term)
            self._write(_BEGIN, given)
            self._connection.execute(_DROP_KEYS, (self.id,))

    def advance(self, stage: Stage, parts: int = 0, reason: str | None = None) -> None:
        """So many parts more are done; ``reason`` says what it waits for."""
        given = {"state": stage, "parts": parts, "reason": reason, "id": self.id}
        with self._connection.transaction():
            require_latest(self._connection, self._source, self._term)
            self._write(_ADVANCE, given)

    def found(self, found: ComparisonResult) -> None:
        """Record what was found, and the keys that may be listed."""
        kinds = [*found.differences.values()]
        given = {
            "source_rows": found.source_rows,
            "destination_rows": found.destination_rows,
            "changing": found.changing,
            **{kind: kinds.count(kind) for kind in ("missing", "extra", "different")},
            "id": self.id,
        }
        keys = [*found.differences][:KEYS_LISTED_MAX]
        with self._connection.transaction():
            require_latest(self._connection, self._source, self._term)
            self._write(_FOUND, given)
            self._connection.execute(_ADD_KEYS, (self.id, keys, kinds[: len(keys)]))

    def start_repair(
        self, consumer: str, table: TableName, oid: int, keys: Sequence[str], *, deletes: bool
    ) -> int | None:
        """A backfill of these rows; None while another one of the table is under way.

        ``deletes``: rows that the destination alone has are found again and delivered as deletes.
        """
        connection, source, term = self._connection, self._source, self._term
        with connection.transaction():
            require_latest(connection, source, term)
            named = (source, consumer, table.schema, table.table)
            row = connection.execute(_REPAIR, named).fetchone()
            if row is None:
                return None
            backfill = as_int(row[0])
            if deletes:
                gone = [(table, oid, 0, GoneRows())]
                add_chunks(connection, source, term, backfill, gone, planned=True)
            connection.execute(_REPAIR_KEYS, (backfill, list(keys)))
            self._write(_REPAIRING, (backfill, self.id))
        return backfill

    def finish(self, repaired: int | None = None, left: Iterable[str] = ()) -> None:
        """It is done; ``left`` are keys that differ after the repair."""
        with self._connection.transaction():
            require_latest(self._connection, self._source, self._term)
            if repaired is not None:
                self._connection.execute(_REPAIRED, (list(left), self.id))
            self._write(_FINISH, (repaired, self.id))

    def _write(
        self, statement: LiteralString, given: Sequence[object] | Mapping[str, object]
    ) -> None:
        if not self._connection.execute(statement, given).rowcount:
            raise CancelledError(f"verification {self.id} was cancelled")


def fail_verification(
    connection: Connection, source: str, term: int, verification: int, error: str
) -> None:
    """It cannot be done; ``error`` quotes no value of a row."""
    with connection.transaction():
        require_latest(connection, source, term)
        connection.execute(_FAIL, (error, verification))


def consumer_position(connection: Connection, source: str, consumer: str) -> ConsumerPosition:
    row = connection.execute(_CONSUMER_POSITION, (source, consumer)).fetchone()
    assert row is not None
    cursor = cursor_of(row[0], row[1])
    return ConsumerPosition(cursor, bool(row[2]), bool(row[3]))


def backfill_state(connection: Connection, backfill: int) -> tuple[str, str | None]:
    """The state of a backfill, and its error or what it waits for."""
    row = connection.execute(_BACKFILL_STATE, (backfill,)).fetchone()
    return ("cancelled", None) if row is None else (str(row[0]), as_text(row[1]))
