"""A database without an encoding, with a row that nobody can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.lane_on_log import arrived
from tests.service import running


@pytest.fixture
def ascii_database(postgres_server: PostgresServer) -> Iterator[Database]:
    """A database without an encoding; the test reads what is in it as UTF-8."""
    with fresh_database(postgres_server.dsn, "SQL_ASCII") as database:
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
    assert "Dead letters ever: files 1" in status
    assert "walbrook.dead_letters" in status
    counts = ascii_database.execute(
        "SELECT name, delivered, dead FROM walbrook.consumers ORDER BY 1"
    )
    assert counts == [("files", 4, 1), ("others", 1, 0)]
