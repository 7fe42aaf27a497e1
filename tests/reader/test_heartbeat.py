"""The watch over a source: heartbeats there and back, and a slot that is about to be lost."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc.cursor import parse_lsn
from cdc.errors import SourceError, TransientError
from cdc.replication.source.identity import Recorded
from cdc.replication.source.source_watch import SourceWatch
from cdc.state.health import Condition
from demo.embedded_postgres import EmbeddedPostgres
from tests.fix_postgres import Database, PostgresServer, embedded, fresh_database
from tests.plain_reader import PlainReader
from tests.proxy import Proxy
from tests.standby import execute
from tests.waiting import until

BEAT_S = 0.1
_TIGHT_BYTES = 96 << 20
_SAFE = "SELECT safe_wal_size FROM pg_replication_slots WHERE slot_name = 'tight'"


def make_reader(dsn: str, slot: str) -> PlainReader:
    """A reader of a new slot."""
    ((lsn, identifier),) = execute(
        dsn,
        "SELECT lsn, system_identifier FROM pg_control_system(), "
        f"pg_create_logical_replication_slot('{slot}', 'pgoutput')",
    )
    return PlainReader(dsn, slot, Recorded(str(identifier), 1), at=parse_lsn(lsn))


@pytest.fixture
def reader(database: Database) -> PlainReader:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR TABLE item")
    return make_reader(database.dsn, f"slot_{database.name}")


@pytest.fixture
def watch(reader: PlainReader) -> Iterator[SourceWatch]:
    with closing(SourceWatch(reader.dsn, reader.slot, "pub", heartbeat_s=BEAT_S)) as ours:
        yield ours


def came_back(watch: SourceWatch) -> bool:
    return watch.sight().heartbeat_at is not None


def test_a_heartbeat_of_an_idle_database_comes_back(
    reader: PlainReader, watch: SourceWatch
) -> None:
    reader.read("a heartbeat", lambda: came_back(watch), watch=watch)
    sight = watch.sight()
    assert sight.heartbeat_lag_s is not None
    assert 0 <= sight.heartbeat_lag_s < 30
    assert sight.slot_wal_status == "reserved"
    assert sight.slot_safe_bytes is None
    assert watch.conditions() == []


def test_a_role_that_may_only_replicate_can_send_and_receive(
    reader: PlainReader, database: Database
) -> None:
    role = f"role_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'")
    try:
        reader.dsn = make_conninfo(database.dsn, user=role, password="secret")
        with closing(SourceWatch(reader.dsn, reader.slot, "pub", heartbeat_s=BEAT_S)) as ours:
            reader.read("a heartbeat", lambda: came_back(ours), watch=ours)
            assert ours.conditions() == []
    finally:
        database.execute(f"DROP ROLE {role}")


def test_heartbeats_of_another_reader_of_the_database_do_not_count(
    reader: PlainReader,
) -> None:
    silent = SourceWatch(reader.dsn, reader.slot, "pub", heartbeat_s=0)
    other = SourceWatch(reader.dsn, "another_slot", "pub", heartbeat_s=BEAT_S)
    with closing(silent), closing(other):
        reader.read(
            "three heartbeats of the other", lambda: len(reader.heartbeats) >= 3, watch=silent
        )
        assert not came_back(silent)


def test_a_stream_that_passes_a_heartbeat_without_giving_it_is_left(
    reader: PlainReader, watch: SourceWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.replication.source.heartbeat._PASSED_S", 0.2)

    def passed() -> bool:
        watch.check(reader.server_lsn)
        return False

    with pytest.raises(TransientError, match="without the heartbeat") as caught:
        reader.read("the missing heartbeat to be noticed", passed)
    assert caught.value.kind == "heartbeat_missed"


def test_a_primary_that_is_another_database_is_refused(
    reader: PlainReader, postgres_server: PostgresServer
) -> None:
    with (
        fresh_database(postgres_server.dsn) as other,
        closing(
            SourceWatch(reader.dsn, reader.slot, "pub", heartbeat_s=BEAT_S, primary_dsn=other.dsn)
        ) as ours,
    ):
        (condition,) = until("the watch to say so", ours.conditions)
        assert condition.kind == "heartbeat_refused"
        assert other.name in condition.what


def test_a_role_that_may_not_send_learns_what_to_grant(
    reader: PlainReader, database: Database
) -> None:
    for arguments in _signatures(database):
        database.execute(f"REVOKE EXECUTE ON FUNCTION {arguments} FROM PUBLIC")
    role = f"role_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'")
    dsn = make_conninfo(database.dsn, user=role, password="secret")
    try:
        with closing(SourceWatch(dsn, reader.slot, "pub", heartbeat_s=BEAT_S)) as ours:
            (condition,) = until("the watch to say so", ours.conditions)
            assert "permission denied" in condition.what
            assert "pg_logical_emit_message" in condition.fix
            for arguments in _signatures(database):
                database.execute(f"GRANT EXECUTE ON FUNCTION {arguments} TO {role}")
            until("the complaint to end", lambda: ours.conditions() == [])
            for arguments in _signatures(database):
                database.execute(f"REVOKE EXECUTE ON FUNCTION {arguments} FROM {role}")
    finally:
        database.execute(f"DROP ROLE {role}")


def test_a_heartbeat_that_cannot_be_written_is_one_warning_and_a_condition_until_it_can(
    reader: PlainReader, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    role = f"role_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'")
    dsn = make_conninfo(database.dsn, user=role, password="secret")
    try:
        with closing(SourceWatch(dsn, reader.slot, "pub", heartbeat_s=BEAT_S)) as ours:
            reader.read("a heartbeat", lambda: came_back(ours), watch=ours)
            assert ours.conditions() == []
            database.execute(f"ALTER ROLE {role} NOLOGIN")
            end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"
            database.execute(end)
            (condition,) = until("the watch to say so", ours.conditions)
            assert condition.kind == "heartbeat_failed"
            assert ours.conditions(reading=False) == [], "a reader that is cut off says so itself"
            database.execute(f"ALTER ROLE {role} LOGIN CONNECTION LIMIT 0")
            until("another reason", lambda: "too many" in ours.conditions()[0].what)
            database.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
            until("the complaint to end", lambda: ours.conditions() == [])
    finally:
        database.execute(f"DROP ROLE {role}")
    assert capsys.readouterr().out.count("watch.heartbeat_failed") == 1


def _signatures(database: Database) -> list[str]:
    rows = database.execute(
        "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = 'pg_logical_emit_message'"
    )
    return [str(signature) for (signature,) in rows]


def test_the_watch_outlives_cut_connections(reader: PlainReader) -> None:
    with (
        Proxy(reader.dsn) as proxy,
        closing(SourceWatch(proxy.dsn(reader.dsn), reader.slot, "pub", heartbeat_s=BEAT_S)) as ours,
    ):
        reader.read("a heartbeat", lambda: came_back(ours), watch=ours)
        first = ours.sight().heartbeat_at
        connections = proxy.accepted
        proxy.cut()
        until("the watch to come back", lambda: proxy.accepted > connections)
        reader.read(
            "another heartbeat",
            lambda: (ours.sight().heartbeat_at or first) != first,
            watch=ours,
        )


def test_the_watch_is_closed_within_two_seconds_whatever_the_server_does(
    reader: PlainReader,
) -> None:
    with Proxy(reader.dsn) as proxy:
        ours = SourceWatch(proxy.dsn(reader.dsn), reader.slot, "pub", heartbeat_s=BEAT_S)
        until("the watch to see the slot", lambda: ours.sight().slot_wal_status)
        proxy.freeze()
        begun = time.monotonic()
        ours.close()
        assert time.monotonic() - begun < 2.5


@pytest.fixture
def tight() -> Iterator[EmbeddedPostgres]:
    """A server that keeps little WAL for its slots."""
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-tight-"))
    settings = {"max_slot_wal_keep_size": "96MB", "wal_keep_size": "0", "min_wal_size": "32MB"}
    with ExitStack() as running:
        running.callback(shutil.rmtree, directory, ignore_errors=True)
        yield running.enter_context(embedded(directory, fast=True, settings=settings))


def fill_a_segment(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    connection.execute("SELECT pg_logical_emit_message(false, 'filler', 'x')")
    connection.execute("SELECT pg_switch_wal()")


def test_a_slot_is_warned_about_before_it_is_lost_and_refused_after(
    tight: EmbeddedPostgres,
) -> None:
    execute(tight.dsn, "CREATE PUBLICATION pub")
    reader = make_reader(tight.dsn, "tight")
    assert reader.look().confirmed
    with (
        closing(SourceWatch(tight.dsn, "tight", "pub", heartbeat_s=BEAT_S, source="shop")) as ours,
        psycopg.connect(tight.dsn, autocommit=True) as connection,
    ):
        until("the watch to see the slot", lambda: ours.sight().slot_safe_bytes)
        assert ours.conditions() == []

        def of_kind(kind: str) -> list[Condition]:
            return [condition for condition in ours.conditions() if condition.kind == kind]

        def warned() -> list[Condition]:
            ((safe,),) = connection.execute(_SAFE).fetchall()
            if int(str(safe)) > _TIGHT_BYTES // 2:
                fill_a_segment(connection)
            return of_kind("slot_at_risk")

        until("a warning while there is still room", warned)
        assert reader.look().slot.at_risk

        def lost() -> list[Condition]:
            fill_a_segment(connection)
            connection.execute("CHECKPOINT")
            return of_kind("slot_lost")

        (error,) = until("the slot to be lost", lost)
        assert error.severity == "error"
        assert "walbrook.accept_gap('shop', lsn)" in error.fix
        assert of_kind("slot_at_risk") == []
    with pytest.raises(SourceError, match="is lost") as caught:
        reader.look()
    assert caught.value.kind == "slot_lost"
