"""Existing rows among changes, from a real Postgres: what arrives, in which order, of which tables.

Rows have a ``version`` that grows with every write, so a row that goes back in time shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc.backfill.open_transactions import OpenListing
from cdc.backfill.reading import ChunkRead, list_open
from cdc.connection import connect
from cdc.service.cli.backfills import watch
from cdc.state import backfill_keys
from cdc.state.backfill_operators import backfills
from spark_pipeline.backfill import runner
from tests.backfill_rig import Rig, stale
from tests.fix_postgres import DEFAULT_VERSION, Database
from tests.waiting import until

pytestmark = pytest.mark.migrated

KEYS = {
    "negative": ("id bigint PRIMARY KEY", "i - 500"),
    "composite": ("a int, id text, PRIMARY KEY (id, a)", "i % 7, 'k' || i"),
    "uuid": ("id uuid PRIMARY KEY", "gen_random_uuid()"),
    "collated": ('id text COLLATE "C" PRIMARY KEY', "repeat('ä', i % 3) || i"),
    "enum": ("kind mood, id int, PRIMARY KEY (kind, id)", "'calm'::mood, i"),
    "domain": ("id positive PRIMARY KEY", "i + 1"),
}
_TYPES = """
CREATE TYPE mood AS ENUM ('wild', 'calm');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
"""


@pytest.mark.parametrize(
    "kind",
    [
        *("composite", "uuid", "collated"),
        *(pytest.param(kind, marks=pytest.mark.sinks) for kind in ("negative", "enum", "domain")),
    ],
)
def test_rows_with_every_kind_of_key_arrive_once_and_as_changes_bring_them(
    database: Database, tmp_path: Path, kind: str
) -> None:
    columns, values = KEYS[kind]
    database.execute(_TYPES)
    database.execute(
        f"CREATE TABLE item ({columns}, note text, price numeric(10,2), at timestamptz, doc jsonb,"
        " raw bytea, f float8);"
        f"INSERT INTO item SELECT {values}, E'tab\\there\\\\n' || i, i * 1.10, "
        "'2024-02-29 12:00:00.5+02', '{\"a\": [1, null]}', '\\xdeadbeef', 0.1 * i "
        "FROM generate_series(0, 999) AS i"
    )
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("item", chunk_bytes=16384)
        read = rig.messages()
        database.execute("UPDATE item SET f = f")
        rig.until_delivered()
    updates = [each for each in rig.messages() if each["action"] == "update"]
    assert {each["action"] for each in read} == {"read"}
    by_key = {json.dumps(each["metadata"]["record_pks"]): each["record"] for each in read}
    assert len(read) == len(by_key) == 1000
    assert by_key == {
        json.dumps(each["metadata"]["record_pks"]): each["record"] for each in updates
    }
    (chunks,) = rig.rows(
        "SELECT count(*) > 2, bool_and(state = 'done') FROM walbrook.backfill_chunks"
    )
    assert chunks == (True, True)


def test_rows_without_a_key_arrive(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE item (note text); INSERT INTO item VALUES ('a'), ('a'), (NULL)")
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("item")
    assert sorted(str(each["record"]["note"]) for each in rig.messages()) == ["None", "a", "a"]


@pytest.mark.parametrize("via_root", [True, False])
def test_the_partitions_of_a_table_arrive_under_the_names_that_changes_have(
    database: Database, tmp_path: Path, via_root: bool
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);"
        "CREATE TABLE low (note text, id int NOT NULL);"  # in another order of columns
        "ALTER TABLE item ATTACH PARTITION low FOR VALUES FROM (0) TO (500);"
        "CREATE TABLE high PARTITION OF item FOR VALUES FROM (500) TO (1000);"
        "INSERT INTO item SELECT i, 'n' || i FROM generate_series(0, 999) AS i"
    )
    published = f"FOR TABLE item WITH (publish_via_partition_root = {via_root})"
    rig = Rig(database, tmp_path, publication=published)
    with rig.running():
        backfill = rig.start("item", chunk_bytes=8192)
        with connect(rig.state_dsn, name="test") as state:
            watch(state, backfill)  # until all of them have ended
        before = rig.messages()
        database.execute("UPDATE item SET note = note || '!'")
        rig.until_delivered()
    with connect(rig.state_dsn, name="test") as state:
        asked_for = [row["rows"] for row in backfills(state, request=backfill)]
    assert asked_for == ([1000] if via_root else [500, 500])
    after = rig.messages()[len(before) :]
    assert len(before) == 1000
    names = {each["metadata"]["table_name"] for each in before}
    assert names == {each["metadata"]["table_name"] for each in after}
    assert names == ({"item"} if via_root else {"low", "high"})
    assert {(each["record"]["id"], each["record"]["note"] + "!") for each in before} == {
        (each["record"]["id"], each["record"]["note"]) for each in after
    }


@pytest.mark.skipif(DEFAULT_VERSION < 15, reason="column lists and row filters came with 15")
def test_only_what_the_publication_sends_arrives(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, secret text, note text,"
        " twice int GENERATED ALWAYS AS (id * 2) STORED);"
        "INSERT INTO item SELECT i, 'hidden', 'n' FROM generate_series(1, 100) AS i"
    )
    rig = Rig(database, tmp_path, publication="FOR TABLE item (id, note) WHERE (id > 90)")
    with rig.running():
        rig.backfilled("item", where_sql="id % 2 = 0 -- even ones")
    assert [each["record"] for each in rig.messages()] == [
        {"id": i, "note": "n"} for i in (92, 94, 96, 98, 100)
    ]


@pytest.mark.parametrize(
    ("wanted", "tables"), [("*", {"item", "other"}), ("public.item", {"item"})]
)
def test_a_new_consumer_gets_the_rows_of_all_its_tables_or_of_those_it_lists(
    database: Database, tmp_path: Path, wanted: str, tables: set[str]
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1);"
        "CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)"
    )
    rig = Rig(database, tmp_path)
    database.execute(
        f"UPDATE walbrook.consumers SET initial_backfill = ARRAY['{wanted}'] WHERE name = 'files'"
    )
    ended = "SELECT count(*) FROM walbrook.backfills WHERE state = 'done'"
    with rig.running():
        until("the backfills", lambda: rig.rows(ended) == [(len(tables),)])
    assert {each["metadata"]["table_name"] for each in rig.messages()} == tables
    left = "SELECT count(*) FROM walbrook.consumers WHERE initial_backfill IS NOT NULL"
    assert rig.rows(left) == [(0,)]


def test_a_table_that_is_added_to_the_publication_is_backfilled_by_itself(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1);"
        "CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other SELECT generate_series(1, 9)"
    )
    rig = Rig(database, tmp_path, publication="FOR TABLE item")
    with rig.running():
        backfill = rig.start("other")
        rig.until_state(backfill, "failed")
        assert "ALTER PUBLICATION" in str(rig.progress(backfill)[2])
        database.execute("ALTER PUBLICATION pub ADD TABLE other; DELETE FROM other WHERE id = 9")
        rig.rows(f"SELECT walbrook.retry_backfill({backfill})")
        rig.until_state(backfill)
        database.execute("INSERT INTO other VALUES (10)")
        rig.until_delivered()
    assert set(rig.table()) == {f'other ["{i}"]' for i in (*range(1, 9), 10)}


def test_rows_are_read_in_the_order_of_a_column_from_a_position_on(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, rank text);"
        "INSERT INTO item SELECT i, lpad(((i * 7919) % 5000)::text, 5, '0')"
        " FROM generate_series(1, 5000) AS i; ANALYZE item"
    )
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("item", sort_column="rank", start_position="01000", chunk_bytes=65536)
    ranks = [each["record"]["rank"] for each in rig.messages()]
    assert ranks == sorted(ranks)
    assert ranks == [f"{i:05}" for i in range(1000, 5000)]
    ((chunks,),) = rig.rows("SELECT count(*) FROM walbrook.backfill_chunks")
    assert chunks > 2


def test_rows_are_read_in_the_order_of_a_date_however_the_database_writes_it(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        f"ALTER DATABASE {database.name} SET datestyle = 'SQL, DMY';"
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, made date);"
        "INSERT INTO item SELECT i, 1, date '2020-01-01' + i FROM generate_series(1, 5000) AS i;"
        "ANALYZE item"
    )
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("item", sort_column="made", chunk_bytes=8192)
    made = [each["record"]["made"] for each in rig.messages()]
    assert made == sorted(made)
    assert len(made) == 5000


def test_an_update_that_leaves_a_large_value_alone_takes_nothing_from_its_row(
    database: Database, tmp_path: Path
) -> None:
    """The update overtakes its row: it is decoded while the chunk waits for the log to pass it."""
    database.execute(_LARGE)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = rig.start("item", chunk_bytes=131072, rows_per_second=20, connections=1)
        _until_some(rig)
        database.execute("UPDATE item SET version = 2")
        rig.until_delivered()
        rig.hurry()
        rig.until_state(backfill)
    (merged,) = rig.rows("SELECT sum(merged) > 0, sum(dropped) = 0 FROM walbrook.backfill_chunks")
    assert merged == (True, True)
    assert stale(rig.messages()) == []
    _check_large(database, rig)


def test_a_row_that_moves_to_a_block_that_was_read_is_read_again_by_its_key(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_LARGE)
    database.execute("DELETE FROM item WHERE id <= 50")
    database.execute("VACUUM item")  # leaves room in the first blocks
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = rig.start("item", chunk_bytes=8192, rows_per_second=20, connections=1)
        _until_some(rig)
        database.execute("UPDATE item SET version = 2 WHERE id > 150")
        rig.hurry()
        rig.until_state(backfill)
    ((by_key,),) = rig.rows("SELECT sum(rows) FROM walbrook.backfill_chunks WHERE kind = 'keys'")
    assert by_key == 50
    assert stale(rig.messages()) == []
    _check_large(database, rig)


@pytest.mark.parametrize(
    ("moved", "chunks_read"),
    [("id BETWEEN 151 AND 160", 1), ("id > 182", 13)],
    ids=["first", "last"],
)
def test_a_row_that_moves_while_an_empty_chunk_is_read_is_read_again_by_its_key(
    moved: str,
    chunks_read: int,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows move to the first block, which was read, before the next chunk is, or the last one."""
    database.execute(_LARGE)
    database.execute("DELETE FROM item WHERE id <= 50 OR id > 196")
    database.execute("VACUUM item")
    read: list[ChunkRead] = []

    def read_at_once(_name: str, run: Callable[[], ChunkRead]) -> Future[ChunkRead]:
        future: Future[ChunkRead] = Future()
        read.append(run())
        future.set_result(read[-1])
        return future

    def list_later(connection: psycopg.Connection[Any]) -> OpenListing:
        if len(read) == chunks_read:
            database.execute(f"UPDATE item SET version = 2 WHERE {moved} AND version = 1")
        return list_open(connection)

    monkeypatch.setattr(runner, "_in_thread", read_at_once)
    monkeypatch.setattr(runner, "list_open", list_later)
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("item", chunk_bytes=8192)
    assert (read[0].rows, read[13].rows == 0) == (0, chunks_read == 13)
    assert database.execute("SELECT count(*) > 0 FROM item WHERE ctid < '(1,0)'") == [(True,)]
    _check_large(database, rig)


def test_a_row_that_is_to_be_read_by_its_key_and_gets_another_one_is_followed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key changes twice: before its chunk is read, and again before the next one is."""
    database.execute(_LARGE)
    database.execute("DELETE FROM item WHERE id <= 50")
    database.execute("VACUUM item")
    moves = iter(
        [
            "UPDATE item SET id = id + 1000 WHERE id > 190",
            "UPDATE item SET id = id + 1000 WHERE id > 1195",
        ]
    )
    taken = backfill_keys.incomplete_keys

    def move_then_read(*given: Any) -> list[list[str]]:
        keys = taken(*given)
        if (move := next(moves, None)) is not None:
            database.execute(move)
        return keys

    monkeypatch.setattr(backfill_keys, "incomplete_keys", move_then_read)
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = rig.start("item", chunk_bytes=8192, rows_per_second=20, connections=1)
        _until_some(rig)
        database.execute("UPDATE item SET version = 2 WHERE id > 150")
        rig.hurry()
        rig.until_state(backfill)
        rig.until_delivered()
    assert next(moves, None) is None
    _check_large(database, rig)


_LARGE = """
CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, pad text, body text NOT NULL);
ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
INSERT INTO item SELECT i, 1, repeat('p', 500), repeat('body ' || i || ' ', 1000)
  FROM generate_series(1, 200) AS i
"""


def _until_some(rig: Rig) -> None:
    """Until some rows have arrived."""
    until("some rows", rig.messages)


def _check_large(database: Database, rig: Rig) -> None:
    """Every row is there as it is now, its large value included."""
    with database.connect() as connection:
        rows = connection.execute("SELECT id, version, pad, body FROM item").fetchall()
    expected = {
        f'item ["{key}"]': {"id": key, "version": version, "pad": pad, "body": body}
        for key, version, pad, body in rows
    }
    assert rig.table() == expected
