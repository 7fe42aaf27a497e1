"""Databases of other encodings, and one without any, with a row that nobody can read."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.fix_postgres import Database, PostgresServer, dropped_database
from tests.lane_on_log import arrived
from tests.service import running
from tests.slot_source import make_slot_source

_CREATE = """
CREATE DATABASE {} ENCODING {} TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'
"""


@contextmanager
def encoded_database(server: PostgresServer, encoding: str) -> Iterator[Database]:
    name = f"test_{encoding.lower()}_{secrets.token_hex(6)}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(sql.SQL(_CREATE).format(sql.Identifier(name), sql.Literal(encoding)))
    with dropped_database(server.dsn, name):
        yield Database(name, make_conninfo(server.dsn, dbname=name))


@pytest.fixture
def ascii_database(postgres_server: PostgresServer) -> Iterator[Database]:
    """A database without an encoding; the test reads what is in it as UTF-8."""
    with encoded_database(postgres_server, "SQL_ASCII") as database:
        yield replace(database, dsn=make_conninfo(database.dsn, client_encoding="UTF8"))


@pytest.mark.timeout(400)
def test_text_that_is_not_utf8_is_a_dead_letter_and_everything_else_arrives(
    ascii_database: Database, tmp_path: Path
) -> None:
    ascii_database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    ascii_database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    sinks: list[dict[str, object]] = [
        {"name": "files", "destination": {"type": "file", "path": "out"}},
        {
            "name": "others",
            "source": {"include_tables": ["public.other"]},
            "destination": {"type": "file", "path": "others"},
        },
    ]
    with running(ascii_database, tmp_path / "service", sinks) as service:
        ascii_database.execute(
            "INSERT INTO item VALUES (1, 'before'), "
            "(2, convert_from('\\x62ff'::bytea, 'SQL_ASCII')), (3, 'beside')"
        )
        ascii_database.execute("INSERT INTO item VALUES (4, 'after'); INSERT INTO other VALUES (5)")
        service.until_settled()
        status = service.run("status").stdout
        assert service.stop() == 0, service.log_tail()

    messages = arrived(tmp_path / "service" / "out")
    assert [message["record"]["id"] for message in messages] == [1, 3, 4, 5]
    assert [m["record"]["id"] for m in arrived(tmp_path / "service" / "others")] == [5]
    ((consumer, table, action, cursor, error, payload),) = ascii_database.execute(
        "SELECT consumer, table_name, action, commit_lsn || ':' || commit_idx, error, payload "
        "FROM walbrook.dead_letters"
    )
    assert (consumer, table, action) == ("files", "item", "insert")
    assert "public.item" in error
    assert "name" in error
    assert cursor in error
    assert b"b\xff" in payload
    assert "Dead letters: files 1" in status
    assert "walbrook.dead_letters" in status
    counts = ascii_database.execute(
        "SELECT name, delivered, dead FROM walbrook.consumers ORDER BY 1"
    )
    assert counts == [("files", 4, 1), ("others", 1, 0)]


def test_a_database_of_another_encoding_is_read_as_utf8(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with encoded_database(postgres_server, "LATIN1") as database:
        database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
        source = make_slot_source(database, tmp_path)
        with source.reading():
            database.execute("INSERT INTO item VALUES (1, chr(233))")
            source.until_logged(1)
        (frame,) = [frame for frame in source.view.frames(0, 1) if frame.raw.num_rows]
        assert "é".encode() in frame.raw.column("payload")[0].as_py()
