"""The catalog beside the stream: ahead of it, behind it, and under other settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import walbrook
from cdc.decoding.relation import parse_relation
from cdc.errors import TransientError
from cdc.replication.source import catalog
from cdc.replication.source.published import published_relations
from tests.fix_postgres import Database, on_both_versions
from tests.slot_decoder import as_the_reader, open_slot, read_messages, read_slot, slot_decoder
from tests.waiting import until

pytestmark = on_both_versions


def keys(changes: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    return [(one["action"], [int(pk) for pk in orjson.loads(one["record_pks"])]) for one in changes]


def test_rows_written_before_a_primary_key_changed_keep_the_old_key(database: Database) -> None:
    with slot_decoder(database) as source:
        source.run(
            "CREATE TABLE item (a int PRIMARY KEY, b int)",
            "INSERT INTO item VALUES (1, 10)",
            "UPDATE item SET a = 2",
            "DELETE FROM item",
            "ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (b)",
            "INSERT INTO item VALUES (3, 30)",
            "DELETE FROM item",
        )
        changes = source.changes()
    assert keys(changes) == [
        ("insert", [1]),
        ("update", [2]),
        ("delete", [2]),
        ("insert", [30]),
        ("delete", [30]),
    ]


def test_a_key_that_got_or_lost_a_column_is_the_one_it_was(database: Database) -> None:
    with slot_decoder(database) as source:
        source.run(
            "CREATE TABLE item (a int, b int, c int, PRIMARY KEY (b, a))",
            "INSERT INTO item VALUES (1, 2, 3)",
            "DELETE FROM item",
            "ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (c, b, a)",
            "INSERT INTO item VALUES (4, 5, 6)",
            "DELETE FROM item",
        )
        changes = source.changes()
    # Of the old key only the columns are known by now, so they come in the table's order.
    assert [pks for _, pks in keys(changes)] == [[1, 2], [1, 2], [6, 5, 4], [6, 5, 4]]


def test_a_primary_key_that_may_be_deferred_identifies_rows(database: Database) -> None:
    with slot_decoder(database) as source:
        source.run(
            "CREATE TABLE item (a int, b int PRIMARY KEY DEFERRABLE)",
            "INSERT INTO item VALUES (1, 2)",
        )
        assert keys(source.changes()) == [("insert", [2])]


def test_an_index_with_included_or_repeated_columns_gives_its_key_once(database: Database) -> None:
    with slot_decoder(database) as source:
        source.run(
            "CREATE TABLE wide (a int, b int, c int, PRIMARY KEY (c, a) INCLUDE (b))",
            "CREATE TABLE twice (a int NOT NULL, b int NOT NULL)",
            "CREATE UNIQUE INDEX twice_key ON twice (b, a, b)",
            "ALTER TABLE twice REPLICA IDENTITY USING INDEX twice_key",
            "INSERT INTO wide VALUES (1, 2, 3)",
            "INSERT INTO twice VALUES (4, 5)",
            "DELETE FROM wide",
            "DELETE FROM twice",
        )
        found = [pks for _, pks in keys(source.changes())]
        described = map(parse_relation, published_relations(source.connection, "everything"))
        by_name = {str(one): [one.columns[at].name for at in one.key] for one in described}
    assert found == [[3, 1], [5, 4], [3, 1], [5, 4]]
    assert by_name == {"public.wide": ["c", "a"], "public.twice": ["b", "a"]}


# Without a composite: to write its values the server itself waits for the lock on its type.
MADE_AND_FILLED = """
BEGIN;
CREATE TYPE mood AS ENUM ('calm', 'angry');
CREATE DOMAIN amount AS int;
CREATE TABLE item (id int PRIMARY KEY, moods mood[], amount amount);
INSERT INTO item VALUES (1, '{calm,angry}', 5);
COMMIT
"""
RECORD = {"id": 1, "moods": ["calm", "angry"], "amount": 5}


@contextmanager
def committed_but_invisible(database: Database) -> Iterator[threading.Event]:
    """A transaction that is in the WAL and waits for a standby that never answers.

    It becomes visible when the event is set, at the latest at the end.
    """
    release = threading.Event()
    elsewhere = replace(database, dsn=make_conninfo(database.dsn, dbname="postgres"))
    with (
        database.connect() as admin,
        database.connect() as writer,
        elsewhere.connect() as first,
    ):
        open_slot(admin)

        def commit_until_it_waits() -> None:
            """The server hears of its new setting in its own time."""
            while not release.wait(0.01):
                first.execute("SELECT pg_logical_emit_message(true, 'walbrook-test', '')")

        def write() -> None:
            writer.execute(MADE_AND_FILLED)

        def let_go() -> None:
            release.wait(60)
            _wait_for_standby(admin, "")

        writers = [(first, commit_until_it_waits), (writer, write)]
        threads = [threading.Thread(target=let_go)]
        _wait_for_standby(admin, "nobody")
        try:
            threads[0].start()
            for connection, commit in writers:
                connection.execute("SET synchronous_commit = on")
                threads.append(threading.Thread(target=commit))
                threads[-1].start()
                pid = connection.info.backend_pid
                query = f"SELECT wait_event FROM pg_stat_activity WHERE pid = {pid}"
                until("the commit to wait", partial(_is_waiting, database, query))
            yield release
        finally:
            release.set()
            for thread in threads:
                thread.join(30)


def _is_waiting(database: Database, query: str) -> bool:
    return database.execute(query) == [("SyncRep",)]


def _wait_for_standby(admin: psycopg.Connection[Any], name: str) -> None:
    admin.execute(
        sql.SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(sql.Literal(name))
    )
    admin.execute("SELECT pg_reload_conf()")


def test_a_table_that_is_not_visible_yet_is_described_once_it_is(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with as_the_reader(database) as connection, committed_but_invisible(database) as release:
        looked: list[bool] = []
        is_visible = catalog._is_visible

        def look(*given: Any) -> bool:
            looked.append(is_visible(*given))
            release.set()
            return looked[-1]

        monkeypatch.setattr(catalog, "_is_visible", look)
        (record,) = read_slot(connection).changes.column("record").to_pylist()
    assert not looked[0]
    assert orjson.loads(record) == RECORD


def test_an_answer_that_lacks_a_table_is_not_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_VISIBLE_WITHIN_S", 0.1)
    with as_the_reader(database) as connection:
        decoder = walbrook.Decoder(walbrook.catalog_of(connection))
        with committed_but_invisible(database):
            messages = read_messages(connection)
            with pytest.raises(TransientError, match=r"public\.item.*synchronous replication"):
                decoder.decode(messages)
        (record,) = decoder.decode(messages).changes.column("record").to_pylist()
    assert orjson.loads(record) == RECORD


def test_a_table_that_is_gone_is_not_waited_for(database: Database) -> None:
    with slot_decoder(database) as source:
        source.run(
            "CREATE TYPE mood AS ENUM ('calm')",
            "CREATE TABLE item (id int PRIMARY KEY, mood mood)",
            "INSERT INTO item VALUES (1, 'calm')",
            "DROP TABLE item",
            "DROP TYPE mood",
        )
        (change,) = source.changes()
    assert orjson.loads(change["record"]) == {"id": 1, "mood": "calm"}


def test_settings_of_the_role_and_functions_of_the_same_name_change_no_type(
    database: Database,
) -> None:
    database.execute(
        "CREATE FUNCTION array_subscript_handler() RETURNS int LANGUAGE sql AS 'SELECT 1'"
    )
    database.execute(f"ALTER DATABASE {database.name} SET quote_all_identifiers = on")
    database.execute(f"ALTER DATABASE {database.name} SET search_path = public, pg_catalog")
    with slot_decoder(database) as source:
        source.run(
            "CREATE TYPE mood AS ENUM ('calm', 'angry')",
            "CREATE TABLE item (id int PRIMARY KEY, moods mood[])",
            "INSERT INTO item VALUES (1, '{calm,angry}')",
        )
        (change,) = source.changes()
    assert orjson.loads(change["record"]) == {"id": 1, "moods": ["calm", "angry"]}
