"""Rows that a backfill reads once more by their key, and how far the log was searched for them.

An update that leaves out a value may move its row to blocks that were read. The log is searched for
such updates while chunks are delivered, and what they touched is read by its key at the end.

Invariant: the keys that were found stand in the transaction that says how far was searched.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from cdc.connection import Connection
from cdc.cursor import format_lsn, idle_place, parse_lsn
from cdc.state.backfills import require_latest

KEYS_MAX = 1_000_000
"""Most rows of one table that are read once more by their key."""

_LOOKED = "UPDATE walbrook.backfills SET looked_lsn = %s::pg_lsn WHERE id = %s"
# Rows that are read by their keys are found wherever they lie.
_SEARCHED = """
SELECT b.looked_lsn::text,
       (SELECT max(k.read_lsn)::text FROM walbrook.backfill_chunks k
         WHERE k.backfill = b.id AND k.kind <> 'keys')
  FROM walbrook.backfills b WHERE b.id = %s
"""
_ADD_KEYS = """
INSERT INTO walbrook.backfill_keys (backfill, key)
SELECT %s, k::jsonb FROM unnest(%s::text[]) AS k ON CONFLICT DO NOTHING
"""
_COUNT_KEYS = "SELECT count(*) FROM walbrook.backfill_keys WHERE backfill = %s"
_TAKE_KEYS = """
SELECT key::text FROM walbrook.backfill_keys WHERE backfill = %s ORDER BY key LIMIT %s
"""


def searched_to(connection: Connection, backfill: int) -> int | None:
    """Up to where the log was searched for changes that left out values; None: nowhere yet."""
    row = connection.execute(_SEARCHED, (backfill,)).fetchone()
    return None if row is None or row[0] is None else parse_lsn(str(row[0]))


def search_left(connection: Connection, backfill: int) -> tuple[int, int] | None:
    """From where to where the log is still to be searched when all chunks are done, if anywhere."""
    row = connection.execute(_SEARCHED, (backfill,)).fetchone()
    if row is None or row[0] is None or row[1] is None:
        return None
    looked, read = (parse_lsn(str(lsn)) for lsn in row)
    return (looked, read) if looked < idle_place(read).lsn else None


def record_search(
    connection: Connection,
    source: str,
    term: int,
    backfill: int,
    looked_lsn: int,
    incomplete: Sequence[Sequence[str]],
) -> int:
    """Record what was found in the log up to ``looked_lsn``; returns how many keys there are."""
    with connection.transaction():
        require_latest(connection, source, term)
        return searched(connection, backfill, looked_lsn, incomplete)


def searched(
    connection: Connection, backfill: int, looked_lsn: int, incomplete: Sequence[Sequence[str]]
) -> int:
    """The same within a transaction of the caller."""
    connection.execute(_LOOKED, (format_lsn(looked_lsn), backfill))
    if not incomplete:
        return 0
    keys = [orjson.dumps(key).decode() for key in incomplete]
    connection.execute(_ADD_KEYS, (backfill, keys))
    row = connection.execute(_COUNT_KEYS, (backfill,)).fetchone()
    return 0 if row is None else int(str(row[0]))


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
