"""A database may have another encoding; what is read from its slot is UTF-8 all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import cdc
from cdc.replication.protocol import XLOG_HEADER_BYTES
from cdc.replication.stream import ReplicationStream
from tests.fix_postgres import Database, on_both_versions
from tests.integration.types_source import as_the_reader, open_slot
from tests.waiting import until

TEXT = "Ã©"
"""In Latin 1 the bytes of a UTF-8 é: taken for what they are not, they would pass unnoticed."""

_ACTIVE = "SELECT 1 FROM pg_replication_slots WHERE database = %s AND active"
_DROP = """
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s
"""


@contextmanager
def _latin(database: Database) -> Iterator[Database]:
    name = f"{database.name}_latin"
    made = Database(name, make_conninfo(database.dsn, dbname=name))
    with database.connect() as admin:
        admin.execute(
            sql.SQL(
                "CREATE DATABASE {} TEMPLATE template0"
                " ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'"
            ).format(sql.Identifier(name))
        )
        try:
            yield made
        finally:
            until("the reader's end", lambda: not admin.execute(_ACTIVE, [name]).fetchall())
            admin.execute(_DROP, [name])
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@on_both_versions
def test_text_of_a_database_in_latin_1_is_the_text_that_was_written(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with _latin(database) as latin:
        with as_the_reader(latin) as connection:
            connection.execute('CREATE TABLE "bücher" ("größe" text)')
            open_slot(connection)
            connection.execute('INSERT INTO "bücher" VALUES (%s)', [TEXT])
        (change,) = cdc.decode(_read(latin)).changes.to_pylist()
    assert change["table_name"] == "bücher"
    assert change["record"] == f'{{"größe":"{TEXT}"}}'


def _read(database: Database) -> list[bytes]:
    """The first transaction, from the reader's own stream."""
    stream = ReplicationStream(
        database.dsn, slot=database.name, publication="everything", start_lsn=0
    )
    messages: list[bytes] = []
    idle, other = os.pipe()

    def committed() -> bool:
        stream.wait(0.1, idle)
        stream.drain(messages, bytes_max=1 << 20, rows_max=100)
        return any(message[XLOG_HEADER_BYTES:][:1] == b"C" for message in messages)

    try:
        until("the transaction", committed)
    finally:
        stream.close()
        os.close(idle)
        os.close(other)
    return [message[XLOG_HEADER_BYTES:] for message in messages]
