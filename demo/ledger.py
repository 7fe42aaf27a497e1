"""The ledger in Postgres, and the judge of values: a delivered record is read back as a row.

A record and the row that was written are compared as Postgres sees them: the JSON is turned into a
row of its table, and its text must be the text of the written row. So the check depends on no rule
of our own about how a type looks in JSON. A record must also have exactly the table's columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any, Final, NamedTuple, cast

import psycopg
from psycopg import sql

from cdc.errors import OperatorError
from demo.change import Change, Key, State

Connection = psycopg.Connection[tuple[Any, ...]]

_KEYS: Final = {
    "customers": ("id",),
    "products": ("sku",),
    "orders": ("id",),
    "order_items": ("order_id", "line"),
}
_PIN: Final = b"SET timezone = 'UTC'; SET datestyle = 'ISO'"
# A change's number in its transaction. One is left free before the first of each further table.
_ENTRIES: Final = """
SELECT xid, row_number() OVER place + count(*) FILTER (WHERE is_first) OVER place - 2, table_name,
       action, key, old_key, digest, before
  FROM (SELECT *, row_number() OVER (PARTITION BY xid, table_name ORDER BY n) = 1 AS is_first
          FROM ledger.entries) e
WINDOW place AS (PARTITION BY xid ORDER BY n)
 ORDER BY n
"""
_STATE: Final = "SELECT ledger.key_of(to_jsonb(t), VARIADIC %s), md5(t::text) FROM {} AS t"
_COLUMNS: Final = """
SELECT array_agg(column_name::text) FROM information_schema.columns
 WHERE table_schema = 'public' AND table_name = %s
"""
_RECEIVE: Final = b"CREATE TEMP TABLE delivered (position bigint PRIMARY KEY, message jsonb)"
_ARRIVALS: Final = """
SELECT position, (message #>> '{metadata,xid}')::bigint,
       (message #>> '{metadata,commit_idx}')::bigint,
       concat_ws('.', message #>> '{metadata,table_schema}', message #>> '{metadata,table_name}'),
       message ->> 'action', message #> '{metadata,record_pks}'
  FROM delivered ORDER BY position
"""
_ROWS: Final = """
SELECT position,
       ledger.key_of(record, VARIADIC %(key)s),
       ledger.key_of(before, VARIADIC %(key)s),
       CASE WHEN record ?& %(columns)s AND record - %(columns)s::text[] = '{{}}'
            THEN md5(jsonb_populate_record(NULL::{table}, record)::text) ELSE 'other columns' END,
       md5(jsonb_populate_record(NULL::{table}, before)::text)
  FROM delivered,
       coalesce(nullif(message -> 'changes', 'null'), '{{}}') AS changes,
       LATERAL (SELECT message -> 'record', (message -> 'record') || changes) AS s (record, before)
 WHERE message #>> '{{metadata,table_schema}}' = 'public'
   AND message #>> '{{metadata,table_name}}' = %(name)s
"""


class _Row(NamedTuple):
    """A delivered record, read back as a row of its table."""

    key: Key
    old_key: Key
    digest: str
    before: str


_NO_ROW: Final = _Row((), (), "", "")  # a message about a table that is not the shop's


def create_ledger(connection: Connection) -> None:
    """Note from now on what is written to the shop."""
    connection.execute((resources.files(__package__) / "ledger.sql").read_bytes())


def written_count(connection: Connection) -> int:
    """How many changes were committed since the ledger was created."""
    row = connection.execute("SELECT count(*) FROM ledger.entries").fetchone()
    return int(row[0]) if row else 0


def written_changes(connection: Connection) -> list[Change]:
    """Everything in the ledger, in the order it was written."""
    return [
        Change(xid, idx, table, action, tuple(key), tuple(old_key), tuple(key), digest, before)
        for xid, idx, table, action, key, old_key, digest, before in connection.execute(_ENTRIES)
    ]


def source_state(connection: Connection) -> State:
    """Every row of the shop as it stands."""
    connection.execute(_PIN)
    return {
        (f"public.{name}", tuple(row_key)): digest
        for name, key in _KEYS.items()
        for row_key, digest in connection.execute(
            sql.SQL(_STATE).format(sql.Identifier("public", name)), (list(key),)
        )
    }


def delivered_changes(connection: Connection, messages: Sequence[bytes]) -> list[Change]:
    """What delivered messages say, in their order."""
    connection.execute(_PIN)
    try:
        with connection.transaction(force_rollback=True):
            return _read_back(connection, messages)
    except psycopg.DataError as error:
        raise OperatorError(
            f"a delivered message cannot be read as a row of its table: {error}",
            fix="look at the values in the sink",
        ) from error


def _read_back(connection: Connection, messages: Sequence[bytes]) -> list[Change]:
    connection.execute(_RECEIVE)
    cursor = connection.cursor()
    with cursor.copy("COPY delivered FROM STDIN") as copy:
        for position, message in enumerate(messages):
            copy.write_row((position, message.decode()))
    rows: dict[int, _Row] = {}
    for name in _KEYS:
        rows |= _rows_of(connection, name)
    changes = []
    for position, xid, idx, table, action, pks in connection.execute(_ARRIVALS):
        key, old_key, digest, before = rows.get(position, _NO_ROW)
        changes.append(Change(xid, idx, table, action, key, old_key, tuple(pks), digest, before))
    return changes


def _rows_of(connection: Connection, name: str) -> dict[int, _Row]:
    """What the messages about one table say, by their positions."""
    columns = cast(tuple[list[str]], connection.execute(_COLUMNS, (name,)).fetchone())
    found = connection.execute(
        sql.SQL(_ROWS).format(table=sql.Identifier("public", name)),
        {"key": list(_KEYS[name]), "columns": columns[0], "name": name},
    )
    return {
        position: _Row(tuple(key), tuple(old_key), digest, before)
        for position, key, old_key, digest, before in found
    }
