"""Every check at connect, as a role that may replicate and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.cursor import Cursor, format_lsn
from cdc.decoding.relation import Relation
from cdc.errors import GapError, SourceError, TransientError
from cdc.replication.source.identity import Identity, Recorded
from cdc.replication.source.slot_control import SlotControl
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.proxy import Proxy
from tests.waiting import until


@dataclass(frozen=True)
class Source:
    """A slot in a database, and a role that may replicate."""

    database: Database
    dsn: str
    slot: str
    recorded: Recorded

    def look(self, recorded: Recorded | None = None) -> Identity:
        with closing(SlotControl(self.dsn, self.slot, "pub")) as control:
            return control.look(recorded or self.recorded)

    def check(self, resume: Cursor) -> None:
        with closing(SlotControl(self.dsn, self.slot, "pub")) as control:
            control.check(control.look(self.recorded), resume)

    def refusal(self, recorded: Recorded | None = None) -> SourceError:
        with pytest.raises(SourceError) as caught:
            self.look(recorded)
        assert caught.value.fix
        return caught.value


@pytest.fixture
def replicator(postgres_server: PostgresServer) -> Iterator[str]:
    """A role with the right to replicate, and no other."""
    role = sql.Identifier(f"role_{secrets.token_hex(6)}")
    with psycopg.connect(postgres_server.dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN REPLICATION PASSWORD 'secret'").format(role))
    yield role.as_string(None).strip('"')
    with psycopg.connect(postgres_server.dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.fixture
def source(database: Database, replicator: str) -> Source:
    slot = f"slot_{database.name}"
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    ((identifier,),) = database.execute("SELECT system_identifier FROM pg_control_system()")
    dsn = make_conninfo(database.dsn, user=replicator, password="secret")
    return Source(database, dsn, slot, Recorded(str(identifier), 1))


def test_the_server_that_was_recorded_is_known_again(source: Source) -> None:
    identity = source.look()
    assert (identity.system_identifier, identity.timeline) == (
        source.recorded.system_identifier,
        1,
    )
    assert not identity.server.in_recovery
    assert not identity.slot.two_phase
    assert identity.server.version >= 140_000
    ((confirmed,),) = source.database.execute(
        "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots "
        f"WHERE slot_name = '{source.slot}'"
    )
    assert identity.confirmed == int(confirmed)
    source.check(Cursor(identity.confirmed, 0))


def test_a_source_without_a_recorded_timeline_is_taken_as_it_is(source: Source) -> None:
    unknown = Recorded(source.recorded.system_identifier, None)
    assert source.look(unknown).timeline == 1


def test_another_cluster_is_refused_before_its_slots_are_looked_at(source: Source) -> None:
    source.database.execute(f"SELECT pg_drop_replication_slot('{source.slot}')")
    assert source.refusal(Recorded("1", 1)).kind == "other_cluster"


def test_a_timeline_older_than_what_was_read_is_refused(source: Source) -> None:
    with pytest.raises(GapError, match="before a failover") as caught:
        source.look(Recorded(source.recorded.system_identifier, 2))
    assert caught.value.kind == "older_timeline"


def test_a_missing_slot_is_refused(source: Source) -> None:
    source.database.execute(f"SELECT pg_drop_replication_slot('{source.slot}')")
    assert source.refusal().kind == "slot_missing"


def test_a_slot_of_another_plugin_is_refused(source: Source) -> None:
    source.database.execute(f"SELECT pg_drop_replication_slot('{source.slot}')")
    source.database.execute(f"SELECT pg_create_physical_replication_slot('{source.slot}')")
    assert source.refusal().kind == "slot_physical"
    source.database.execute(f"SELECT pg_drop_replication_slot('{source.slot}')")


def test_a_slot_of_another_database_is_refused(
    source: Source, postgres_server: PostgresServer
) -> None:
    with fresh_database(postgres_server.dsn) as other:
        elsewhere = Source(
            other, make_conninfo(source.dsn, dbname=other.name), source.slot, source.recorded
        )
        assert elsewhere.refusal().kind == "slot_database"


def test_a_slot_beyond_our_cursor_is_a_gap(source: Source) -> None:
    at = source.look().confirmed
    with pytest.raises(GapError, match="the changes between are gone") as caught:
        source.check(Cursor(at - 1, 0))
    assert caught.value.kind == "slot_ahead"


def test_wal_that_ends_before_our_cursor_is_an_older_history(source: Source) -> None:
    with pytest.raises(GapError, match="an older state of the database") as caught:
        source.check(Cursor(1 << 50, 0))
    assert caught.value.kind == "older_history"


def test_of_two_readers_the_second_learns_why_it_waits(source: Source) -> None:
    with (
        closing(SlotControl(source.dsn, source.slot, "pub")),
        pytest.raises(TransientError, match="another service reads slot") as caught,
    ):
        SlotControl(source.dsn, source.slot, "pub")
    assert caught.value.kind == "slot_busy"


def test_a_publication_that_is_gone_is_refused(source: Source) -> None:
    source.database.execute("DROP PUBLICATION pub")
    assert source.refusal().kind == "publication_missing"


def test_a_slot_that_moved_since_it_was_looked_at_is_refused(source: Source) -> None:
    with closing(SlotControl(source.dsn, source.slot, "pub")) as control:
        identity = control.look(source.recorded)
        resume = Cursor(identity.confirmed, 0)
        source.database.execute("CREATE TABLE moved ()")
        advance = f"pg_replication_slot_advance('{source.slot}', pg_current_wal_lsn())"
        moved = f"SELECT 1 FROM {advance} WHERE end_lsn > '{format_lsn(resume.lsn)}'"
        until("the slot to move", lambda: source.database.execute(moved))
        with (
            closing(
                psycopg.connect(source.dsn, replication="database", autocommit=True)
            ) as replication,
            pytest.raises(GapError, match="the changes between are gone"),
        ):
            control.check_again(replication, identity, resume)


def test_a_stream_from_the_server_that_was_looked_at_is_distinguished_from_another(
    source: Source,
) -> None:
    with closing(SlotControl(source.dsn, source.slot, "pub")) as control:
        identity = control.look(source.recorded)
        with closing(
            psycopg.connect(source.dsn, replication="database", autocommit=True)
        ) as replication:
            replication.execute("SET TimeZone = 'Asia/Tokyo'")
            control.check_again(replication, identity, Cursor(identity.confirmed, 0))


def test_a_frozen_connection_is_given_up_within_a_bound(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.replication.source.slot_control._ANSWER_S", 0.5)
    with (
        Proxy(source.dsn) as proxy,
        closing(
            SlotControl(proxy.dsn(source.dsn, sslmode="disable"), source.slot, "pub")
        ) as control,
    ):
        control.look(source.recorded)
        proxy.freeze()
        with pytest.raises(TransientError, match="does not answer"):
            control.catalog_of(Relation(1, "public", "item", "d", (), ()), 3)
