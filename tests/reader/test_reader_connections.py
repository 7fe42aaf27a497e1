"""What one connection of the reader learns or suffers, and what the next one makes of it."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc.errors import TransientError
from cdc.replication import reader as reader_module
from cdc.replication.options import StreamOptions
from cdc.replication.stream import ReplicationStream
from tests.fix_postgres import Database
from tests.slot_source import SlotSource, make_slot_source

pytestmark = pytest.mark.migrated


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    return make_slot_source(database, tmp_path / "shop")


def fill(shop: SlotSource, count: int) -> None:
    shop.database.execute(f"INSERT INTO item SELECT n, 'x' FROM generate_series(1, {count}) n")


def test_a_failed_connection_does_not_bring_streaming_back(
    shop: SlotSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed: list[bool] = []

    class FailsOnce(ReplicationStream):
        def __init__(self, dsn: str, *, options: StreamOptions, **others: object) -> None:
            streamed.append(options.stream_transactions)
            if len(streamed) == 2:
                raise TransientError("the slot is still held by the last connection")
            super().__init__(dsn, options=options, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(reader_module, "ReplicationStream", FailsOnce)
    small = make_conninfo(shop.database.dsn, options="-c logical_decoding_work_mem=64kB")
    stream = StreamOptions(stream_transactions=True)
    with shop.reading(dsn=small, stream=stream, spill_bytes_max=10_000, heartbeat_s=0):
        fill(shop, 3000)
        shop.until_logged(3000)
    assert streamed == [True, False, False]


def test_a_transaction_timeout_of_the_server_does_not_end_the_stream(
    database: Database, tmp_path: Path
) -> None:
    with database.connect() as connection:
        if connection.info.server_version < 170_000:
            pytest.skip("this server has no transaction_timeout")
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    # The server spends a long time on each row and sends only the last.
    slow = "FOR TABLE item WHERE (id = 4000 OR md5(repeat(name, 20000)) = '')"
    shop = make_slot_source(database, tmp_path / "shop", publication=slow)
    fill(shop, 4000)
    impatient = make_conninfo(database.dsn, options="-c transaction_timeout=150ms")
    with shop.reading(dsn=impatient, heartbeat_s=0):
        shop.until_logged(1)
    assert database.execute("SELECT what FROM walbrook.health_events") == []


def test_an_index_that_names_a_column_twice_serves_as_replica_identity(shop: SlotSource) -> None:
    shop.database.execute("CREATE TABLE twice (id int NOT NULL, part int NOT NULL)")
    shop.database.execute("CREATE UNIQUE INDEX twice_key ON twice (part, id, part)")
    shop.database.execute("ALTER TABLE twice REPLICA IDENTITY USING INDEX twice_key")
    with shop.reading(heartbeat_s=0):
        shop.database.execute("INSERT INTO twice VALUES (1, 2)")
        assert [kind for _, kind in shop.until_logged(1)] == ["I"]


def test_a_settlement_waits_for_the_disk_of_its_server(shop: SlotSource) -> None:
    shop.database.execute("""
        CREATE TABLE seen (setting text);
        CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO seen VALUES (current_setting('synchronous_commit'));
            RETURN NULL;
        END $$;
        CREATE TRIGGER see AFTER UPDATE ON walbrook.consumers
            FOR EACH STATEMENT EXECUTE FUNCTION see()
    """)
    fill(shop, 1)
    with shop.reading(heartbeat_s=0):
        shop.until_logged(1)
    for setting in ("off", "local"):
        with psycopg.connect(
            shop.database.dsn, autocommit=True, options=f"-c synchronous_commit={setting}"
        ) as connection:
            shop.settle_all(connection)
            assert connection.execute("SHOW synchronous_commit").fetchone() == (setting,)
    assert shop.database.execute("SELECT setting FROM seen") == [("on",), ("local",)]
