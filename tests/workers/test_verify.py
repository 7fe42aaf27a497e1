"""A mirror compared with its source, both real Postgres: what differs is found by key, no more."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc.config import PostgresDestination
from cdc.verify import key_ranges
from cdc.verify.source_rows import SourceReader
from spark_pipeline.verify import comparison
from tests.backfill_rig import Rig
from tests.fix_postgres import DEFAULT_VERSION, Database
from tests.waiting import until
from tests.walbrook_service import _url

pytestmark = pytest.mark.migrated

_ITEMS = (
    "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, note text, at timestamptz);"
    "INSERT INTO item SELECT i, 1, 'note ' || i, now() FROM generate_series(1, 2000) i"
)


def _rig(database: Database, there: Database, directory: Path, **given: Any) -> Rig:
    destination = PostgresDestination.model_validate({"type": "postgres", "url": _url(there.dsn)})
    return Rig(database, directory, sink={"destination": destination}, **given)


def _keys(rig: Rig, verification: int) -> dict[str, str]:
    found = rig.rows(
        "SELECT key::text, difference FROM walbrook.verification_keys "
        f"WHERE verification = {verification}"
    )
    return dict(found)


def test_a_mirror_that_equals_its_source_is_verified_through_a_position(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        database.execute(
            "UPDATE item SET note = NULL WHERE id % 3 = 0; DELETE FROM item WHERE id % 7 = 0;"
            "UPDATE item SET id = id + 10000 WHERE id % 11 = 0"
        )
        row = rig.verified()
    assert (row.missing, row.extra, row.different, row.changing) == (0, 0, 0, 0)
    ((rows,),) = database.execute("SELECT count(*) FROM item")
    assert row.source_rows == row.destination_rows == rows
    ((through, last),) = rig.rows(
        "SELECT verified_through::text, last_differences FROM walbrook.verified"
    )
    assert (through, last) == (row.position, 0)
    assert not [*(tmp_path / "log" / "verify" / "files").glob("*")]


def test_rows_changed_by_hand_at_the_destination_are_found_by_key(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        there.execute(
            "DELETE FROM item WHERE id IN (7, 1999); UPDATE item SET note = 'x' WHERE id = 12;"
            "INSERT INTO item VALUES (-5, 1, 'extra')"
        )
        row = rig.verified()
    assert (row.missing, row.extra, row.different, row.changing) == (2, 1, 1, 0)
    assert _keys(rig, row.id) == {
        '["7"]': "missing", '["1999"]': "missing", '["12"]': "different", '["-5"]': "extra",
    }  # fmt: skip
    ((through, last),) = rig.rows(
        "SELECT verified_through::text, last_differences FROM walbrook.verified"
    )
    assert (through, last) == (None, 4)


_KEYS = {
    "composite": ("a int, b text, PRIMARY KEY (b, a)", "i % 7, 'k\"\\t' || i", "b = 'k\"\\t5'"),
    "text": ('b text COLLATE "C" PRIMARY KEY', "repeat('ä', i % 3) || i", "b = 'ää5'"),
    "uuid": ("b uuid PRIMARY KEY", "md5(i::text)::uuid", "b = md5('5')::uuid"),
}


@pytest.mark.parametrize(
    "kind",
    ["composite", *(pytest.param(kind, marks=pytest.mark.sinks) for kind in ("text", "uuid"))],
)
def test_keys_of_every_kind_are_compared(
    database: Database, there: Database, tmp_path: Path, kind: str
) -> None:
    columns, values, one = _KEYS[kind]
    database.execute(
        f"CREATE TABLE item ({columns}, price numeric, doc jsonb, raw bytea, f float8);"
        f"INSERT INTO item SELECT {values}, i * 1.10, '{{\"a\": [1, null]}}', '\\xdeadbeef',"
        " 0.1 * i FROM generate_series(0, 999) AS i"
    )
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        equal = rig.verified()
        there.execute(f"UPDATE item SET price = price + 0.01 WHERE {one}")
        row = rig.verified()
    assert (equal.source_rows, equal.missing, equal.extra, equal.different) == (1000, 0, 0, 0)
    assert (row.missing, row.extra, row.different) == (0, 0, 1)


@contextmanager
def _writing(database: Database, writers: int) -> Iterator[None]:
    over = threading.Event()
    acts = (
        "INSERT INTO item VALUES (%(id)s, 1, 'new')",
        "UPDATE item SET version = version + 1 WHERE id = %(id)s",
        "UPDATE item SET note = note || '!', version = version + 1 WHERE id = %(id)s",
        "UPDATE item SET id = %(to)s WHERE id = %(id)s",
        "DELETE FROM item WHERE id = %(id)s",
    )

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with database.connect() as connection:
            while not over.wait(0.005):
                key = chance.randrange(1, 300) * writers + seed
                try:
                    with connection.transaction(force_rollback=chance.random() < 0.1):
                        act = chance.choice(acts)
                        connection.execute(act.encode(), {"id": key, "to": key + writers})
                except psycopg.errors.UniqueViolation:
                    continue

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_writers_cause_no_false_difference_and_hide_no_true_one(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        there.execute("UPDATE item SET note = 'x' WHERE id = 1900")
        with _writing(database, 3):
            for _ in range(3):
                row = rig.verified()
                assert _keys(rig, row.id) == {'["1900"]': "different"}
        after = rig.verified()
    assert rig.rows("SELECT DISTINCT verification FROM walbrook.verification_keys") == [(after.id,)]
    assert (after.missing, after.extra, after.different, after.changing) == (0, 0, 1, 0)


def test_a_repair_makes_the_destination_equal(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        there.execute(
            "DELETE FROM item WHERE id % 100 = 0; UPDATE item SET note = 'x' WHERE id = 12;"
            "INSERT INTO item VALUES (-5, 1, 'extra'), (-6, 1, 'extra')"
        )
        row = rig.verified(repair=True)
        repaired = rig.rows("SELECT DISTINCT repaired FROM walbrook.verification_keys")
        again = rig.verified()
    assert (row.missing, row.extra, row.different, row.repaired) == (20, 2, 1, 23)
    assert repaired == [(True,)]
    assert (again.missing, again.extra, again.different) == (0, 0, 0)
    ((rows,),) = rig.rows(f"SELECT rows FROM walbrook.backfill_progress WHERE id = {row.backfill}")
    assert rows == 23
    ((through,),) = rig.rows("SELECT verified_through::text FROM walbrook.verified")
    assert through == again.position


def test_a_repair_waits_for_another_backfill_and_does_not_compare_again(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        there.execute("DELETE FROM item WHERE id = 7")
        other = rig.start("item", where_sql="id > 12", rows_per_second=1)
        rig.rows(f"SELECT walbrook.pause_backfill({other})")
        rig.rows("SELECT walbrook.start_verification('files', 'item', true)")
        query = "SELECT started_at, reason, state, repaired FROM walbrook.verifications"
        waits = "another backfill of public.item is under way"
        (begun,) = until(
            "the wait for the other one", lambda: [r for r in rig.rows(query) if r[1] == waits]
        )
        rig.rows(f"SELECT walbrook.cancel_backfill({other})")
        until("the end", lambda: rig.rows(query)[0][2] == "done")
        assert rig.rows(query) == [(begun[0], None, "done", 1)]


@pytest.mark.skipif(DEFAULT_VERSION < 15, reason="column lists and row filters came with 15")
def test_only_published_columns_and_rows_are_compared(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, secret text, note text);"
        "INSERT INTO item SELECT i, 'hidden', 'n' FROM generate_series(1, 100) AS i"
    )
    rig = _rig(database, there, tmp_path, publication="FOR TABLE item (id, note) WHERE (id > 90)")
    with rig.running():
        rig.backfilled("item")
        database.execute("UPDATE item SET secret = 'other'")
        row = rig.verified()
    assert (row.source_rows, row.missing, row.extra, row.different) == (10, 0, 0, 0)


def test_all_tables_of_a_consumer_are_compared_one_by_one(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    database.execute(
        "CREATE TABLE part (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF part FOR VALUES FROM (0) TO (50);"
        "CREATE TABLE high PARTITION OF part FOR VALUES FROM (50) TO (100);"
        "INSERT INTO part SELECT generate_series(0, 99); CREATE TABLE keyless (a int)"
    )
    rig = _rig(database, there, tmp_path)
    with rig.running():
        for table in ("item", "low", "high"):
            rig.backfilled(table)
        ((request,),) = rig.rows("SELECT request FROM walbrook.start_verification('files')")
        query = (
            "SELECT table_name, state, source_rows, error FROM walbrook.verifications "
            f"WHERE request = {request} ORDER BY table_name"
        )
        rows = until(
            "all of them",
            lambda: [r for r in [rig.rows(query)] if all(e[1] in ("done", "failed") for e in r)],
        )[0]
    assert [row[:3] for row in rows] == [
        ("high", "done", 50), ("item", "done", 2000), ("keyless", "failed", None),
        ("low", "done", 50),
    ]  # fmt: skip
    assert "has no key" in rows[2][3]


def test_a_destination_that_cannot_be_read_back_is_refused(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path)
    with rig.running():
        row = rig.verified(state="failed")
    assert "a destination of the type file cannot be read back" in row.error


def test_a_consumer_without_published_tables_has_nothing_to_compare(
    database: Database, there: Database, tmp_path: Path
) -> None:
    rig = _rig(database, there, tmp_path)
    rig.sink["source"] = {"include_tables": ["public.nothing"]}
    with rig.running():
        rig.rows("SELECT walbrook.start_verification('files')")
        query = "SELECT error FROM walbrook.verifications WHERE state = 'failed'"
        ((error,),) = until("the refusal", lambda: rig.rows(query))
    assert "no published table is one of consumer files" in error


def test_a_filter_makes_a_comparison_impossible(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    rig.sink["filter"] = "record.id > 5"
    with rig.running():
        row = rig.verified(state="failed")
    assert "its filter decides which changes of a row arrive" in row.error


def test_a_table_of_many_chunks_and_ranges_is_compared_in_bounded_parts(
    database: Database, there: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(comparison, "_LOOKED_AT_MAX", 7)
    monkeypatch.setattr(key_ranges, "RANGE_ROWS", 100)
    monkeypatch.setattr(key_ranges, "_SPILLED_ROWS", 300)
    at_once = []
    by_key = SourceReader.read

    def counted(self: SourceReader, connection: Any, keys: Any) -> Any:
        at_once.append(len(keys))
        return by_key(self, connection, keys)

    monkeypatch.setattr(SourceReader, "read", counted)
    database.execute(_ITEMS)
    database.execute("ANALYZE item")
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        there.execute("DELETE FROM item WHERE id % 50 = 0; INSERT INTO item VALUES (-1, 0)")
        row = rig.verified()
    assert (row.missing, row.extra, row.different) == (40, 1, 0)
    assert row.parts == row.parts_done > 3
    assert max(at_once) == 7


def test_more_differences_than_can_be_held_end_a_verification(
    database: Database, there: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_CANDIDATES_MAX", 100)
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        there.execute("UPDATE item SET version = 0")
        row = rig.verified(state="failed")
    assert "more than 100 rows of public.item differ" in row.error
    assert "backfill the table" in row.error


def test_a_verification_waits_for_a_paused_consumer_and_outlives_its_process(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        rig.pause()
        database.execute("UPDATE item SET note = 'new' WHERE id = 3")
        ((number,),) = rig.rows("SELECT id FROM walbrook.start_verification('files', 'item')")
        query = f"SELECT reason FROM walbrook.verifications WHERE id = {number}"
        until("the reason", lambda: rig.rows(query) == [("files is paused",)])
    rig.rows("SELECT walbrook.resume('files')")
    query = f"SELECT different FROM walbrook.verifications WHERE id = {number} AND state = 'done'"
    with rig.running():
        assert until("the end", lambda: rig.rows(query)) == [(0,)]


def test_a_cancelled_verification_ends_and_leaves_nothing(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    with rig.running():
        rig.backfilled("item")
        rig.pause()
        database.execute("UPDATE item SET note = 'new' WHERE id = 3")
        ((number,),) = rig.rows("SELECT id FROM walbrook.start_verification('files', 'item')")
        query = f"SELECT reason FROM walbrook.verifications WHERE id = {number}"
        until("the reason", lambda: rig.rows(query) == [("files is paused",)])
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is under way"):
            rig.rows("SELECT walbrook.start_verification('files')")
        rig.rows(f"SELECT walbrook.cancel_verification({number})")
        scratch = rig.source.settings.log_directory / "verify" / "files"
        until("its files to be gone", lambda: not scratch.exists())
        rig.rows("SELECT walbrook.resume('files')")
        assert rig.verified().different == 0
    states = rig.rows("SELECT state FROM walbrook.verifications ORDER BY id")
    assert states == [("cancelled",), ("done",)]


def test_a_row_that_flips_all_the_time_is_never_called_different(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path)
    over = threading.Event()

    def flip() -> None:
        with database.connect() as connection:
            while not over.wait(0.001):
                connection.execute("UPDATE item SET version = 3 - version WHERE id = 5")

    thread = threading.Thread(target=flip)
    with rig.running():
        rig.backfilled("item")
        thread.start()
        try:
            found = [rig.verified() for _ in range(3)]
        finally:
            over.set()
            thread.join()
        after = rig.verified()
    assert [(row.missing, row.extra, row.different) for row in found] == [(0, 0, 0)] * 3
    assert (after.different, after.changing) == (0, 0)


def test_a_partitioned_table_is_compared_under_the_name_that_its_changes_have(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);"
        "CREATE TABLE low (note text, id int NOT NULL);"  # in another order of columns
        "ALTER TABLE item ATTACH PARTITION low FOR VALUES FROM (0) TO (500);"
        "CREATE TABLE high PARTITION OF item FOR VALUES FROM (500) TO (1000);"
        "INSERT INTO item SELECT i, 'n' || i FROM generate_series(0, 999) AS i"
    )
    published = "FOR TABLE item WITH (publish_via_partition_root = true)"
    rig = _rig(database, there, tmp_path, publication=published)
    with rig.running():
        rig.backfilled("item")
        there.execute("DELETE FROM item WHERE id IN (3, 900)")
        row = rig.verified(repair=True)
    assert (row.source_rows, row.missing, row.repaired) == (1000, 2, 2)
    assert there.execute("SELECT count(*) FROM item") == [(1000,)]


def test_row_level_security_of_a_partitioned_table_fails_and_deletes_nothing(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF item FOR VALUES FROM (0) TO (500);"
        "INSERT INTO item SELECT i, 'n' FROM generate_series(0, 99) AS i;"
        "ALTER TABLE item ENABLE ROW LEVEL SECURITY;"
        "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'limited') THEN"
        " CREATE ROLE limited LOGIN PASSWORD 'limited'; END IF; END $$;"
        "GRANT SELECT ON item, low TO limited"
    )
    published = "FOR TABLE item WITH (publish_via_partition_root = true)"
    rig = _rig(database, there, tmp_path, publication=published)
    rig.read_as = psycopg.conninfo.make_conninfo(database.dsn, user="limited", password="limited")
    with rig.running():
        rig.backfilled("item")
        there.execute("UPDATE item SET note = 'x' WHERE id = 3")
        row = rig.verified(repair=True, state="failed")
    assert "row-level security" in row.error
    assert there.execute("SELECT count(*) FROM item") == [(100,)]


def test_a_target_that_two_tables_share_is_neither_compared_nor_repaired(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE SCHEMA a; CREATE TABLE a.item (id int PRIMARY KEY);"
        "CREATE SCHEMA b; CREATE TABLE b.item (id int PRIMARY KEY)"
    )
    rig = _rig(database, there, tmp_path, publication="FOR TABLE a.item, b.item")
    rig.sink["destination"] = PostgresDestination.model_validate(
        {"type": "postgres", "url": _url(there.dsn), "table": "mirror.{table}"}
    )
    with rig.running():
        database.execute("INSERT INTO a.item VALUES (1); INSERT INTO b.item VALUES (2)")
        rig.until_delivered()
        row = rig.verified("a.item", repair=True, state="failed")
    assert "table b.item has the same target" in row.error
    assert there.execute("SELECT id FROM mirror.item ORDER BY id") == [(1,), (2,)]
