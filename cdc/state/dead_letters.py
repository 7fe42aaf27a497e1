"""Dead letters: changes that a consumer went on without, as rows of ``walbrook.dead_letters``.

Invariants: a row is written in the transaction that moves the consumer's cursor over the change,
and once; a change that comes again finds its row there. Its error may quote the change, and is
shown nowhere else: logs and health name kind, table and cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import structlog

from cdc.connection import Connection, allow_time_for
from cdc.cursor import Cursor, format_lsn
from cdc.state.health import Condition, report_conditions

_logger = structlog.get_logger("walbrook.state")

_INSERT_BYTES_MAX = 4 << 20
_INSERT_ROWS_MAX = 5_000
_COUNTED_MAX = 1_000

_INSERT = """
INSERT INTO walbrook.dead_letters
       (source, consumer, commit_lsn, commit_idx, commit_timestamp, table_schema, table_name,
        action, kind, error, payload, schema)
SELECT %(source)s, %(consumer)s, d.*
  FROM unnest(%(lsn)s::pg_lsn[], %(idx)s::bigint[], %(committed)s::timestamptz[],
              %(table_schema)s::text[], %(table_name)s::text[], %(action)s::text[],
              %(kind)s::text[], %(error)s::text[], %(payload)b::bytea[], %(schema)b::bytea[]) d
    ON CONFLICT (source, consumer, commit_lsn, commit_idx) DO NOTHING
"""
# Consumers that have any, and those that have an open event about it, which may be over.
_COUNT = """
SELECT c.name,
       (SELECT count(*) FROM (
            SELECT FROM walbrook.dead_letters d
             WHERE d.source = %(source)s AND d.consumer = c.name LIMIT %(most)s) few),
       (SELECT format('%%s, %%s%%s', d.kind, d.commit_lsn || ':' || d.commit_idx,
                      ' of table ' || nullif(d.table_schema || '.' || d.table_name, '.'))
          FROM walbrook.dead_letters d
         WHERE d.source = %(source)s AND d.consumer = c.name
         ORDER BY d.commit_lsn, d.commit_idx LIMIT 1)
  FROM (SELECT name FROM walbrook.consumers k
         WHERE source = %(source)s
           AND EXISTS (SELECT FROM walbrook.dead_letters d
                        WHERE d.source = %(source)s AND d.consumer = k.name)
         UNION SELECT consumer FROM walbrook.health
                WHERE source = %(source)s AND consumer IS NOT NULL AND kind = 'dead_letters') c
 ORDER BY 1
"""

_COUNTED = "UPDATE walbrook.consumers SET dead = dead + %s WHERE source = %s AND name = %s"

Kind = Literal["decode", "expression", "delivery", "event_time"]


@dataclass(frozen=True)
class DeadLetter:
    """A change of one consumer that nothing can be made of."""

    cursor: Cursor
    committed_at: datetime
    table_schema: str
    table_name: str
    action: str
    kind: Kind
    error: str  # in full: it may quote the change
    payload: bytes
    schema: bytes | None  # None for a logical message

    @property
    def table(self) -> str:
        """Empty for a message that belongs to none."""
        return f"{self.table_schema}.{self.table_name}" if self.table_name else ""

    @property
    def size(self) -> int:
        return len(self.payload) + len(self.schema or b"") + len(self.error)


def bury(connection: Connection, source: str, consumer: str, letters: Iterable[DeadLetter]) -> int:
    """Write dead letters, inside the settling transaction; says how many are new."""
    new = 0
    for some in _bounded(letters):
        allow_time_for(connection, sum(letter.size for letter in some))
        new += connection.execute(
            _INSERT, {"source": source, "consumer": consumer, **_columns(some)}
        ).rowcount
        _logger.warning(
            "dead_letters",
            source=source,
            consumer=consumer,
            count=len(some),
            kind=some[0].kind,
            table=some[0].table,
            first=str(some[0].cursor),
        )
    return new


def count_dead(connection: Connection, source: str, consumer: str, new: int) -> None:
    """Count dead letters that were written before what follows them is settled."""
    connection.execute(_COUNTED, (new, source, consumer))


def report_dead_letters(connection: Connection, source: str, term: int) -> None:
    """Open, renew or resolve each consumer's event about its dead letters."""
    rows = connection.execute(_COUNT, {"source": source, "most": _COUNTED_MAX + 1}).fetchall()
    for consumer, count, first in rows:
        conditions = [_condition(str(consumer), int(str(count)), str(first))] if count else []
        report_conditions(
            connection, source, term, conditions, consumer=str(consumer), scope="dead_letters"
        )


def _condition(consumer: str, count: int, first: str) -> Condition:
    many = f"more than {_COUNTED_MAX}" if count > _COUNTED_MAX else str(count)
    return Condition(
        "dead_letters",
        "warning",
        f"{consumer} went on without {many} change{'s' if count > 1 else ''} that could not be "
        f"delivered; the first: {first}",
        fix="look at walbrook.dead_letters: walbrook.redeliver sends one again, or says why not; "
        "correct the rows in the source, or the sink's expressions, or bring the destination up to "
        "date by other means, and walbrook.discard what is dealt with",
    )


def _bounded(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    """Cut into lists that are small enough for a statement each."""
    some: list[DeadLetter] = []
    size = 0
    for letter in letters:
        if some and (len(some) >= _INSERT_ROWS_MAX or size + letter.size > _INSERT_BYTES_MAX):
            yield some
            some, size = [], 0
        some.append(letter)
        size += letter.size
    if some:
        yield some


def _columns(letters: list[DeadLetter]) -> dict[str, list[object]]:
    return {
        "lsn": [format_lsn(letter.cursor.lsn) for letter in letters],
        "idx": [letter.cursor.idx for letter in letters],
        "committed": [letter.committed_at for letter in letters],
        "table_schema": [letter.table_schema for letter in letters],
        "table_name": [letter.table_name for letter in letters],
        "action": [letter.action for letter in letters],
        "kind": [letter.kind for letter in letters],
        # Postgres has no text with this one character in it.
        "error": [letter.error.replace("\0", "\\0") for letter in letters],
        "payload": [letter.payload for letter in letters],
        "schema": [letter.schema for letter in letters],
    }
