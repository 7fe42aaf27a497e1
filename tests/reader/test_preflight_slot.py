"""Preflight and the slot: refused, created, or warned about; and that the fixes work."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest

from cdc.errors import SourceError
from cdc.replication.preflight.slot import create_slot
from tests.fix_postgres import Database, PostgresServer, fresh_database, since
from tests.preflight_source import (
    NamedSlot,
    Settings,
    prepare,
    refusal,
)


@pytest.fixture
def orders(database: Database) -> Database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, total numeric)")
    return database


def test_a_slot_of_another_database_is_refused(
    orders: Database, postgres_server: PostgresServer
) -> None:
    settings = Settings()
    with fresh_database(postgres_server.dsn) as other:
        prepare(other, settings)
        error = refusal(orders, settings)
        assert f"belongs to the database {other.name}, not {orders.name}" in error.what


def test_a_physical_slot_is_refused(orders: Database) -> None:
    settings = Settings()
    orders.execute(f"SELECT pg_create_physical_replication_slot('{settings.slot.name}')")
    try:
        assert "is a physical one" in refusal(orders, settings).what
    finally:
        orders.execute(f"SELECT pg_drop_replication_slot('{settings.slot.name}')")


def test_a_temporary_slot_is_refused(orders: Database) -> None:
    settings = Settings()
    orders.execute("CREATE PUBLICATION changes")
    with orders.connect() as holder:
        holder.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', temporary => true)",
            [settings.slot.name],
        )
        assert "is temporary" in refusal(orders, settings).what


def test_a_name_that_no_slot_can_have_is_refused(orders: Database) -> None:
    assert (
        "cannot be the name of a slot" in refusal(orders, Settings(slot=NamedSlot("My-Slot"))).what
    )


def test_the_reader_on_the_slot_is_named(orders: Database) -> None:
    settings = Settings()
    prepare(orders, settings)
    # Closed, not committed: the connection is in the middle of a COPY.
    with closing(psycopg.connect(orders.dsn, replication="database", autocommit=True)) as reader:
        command = f"START_REPLICATION SLOT {settings.slot.name} LOGICAL 0/0 "
        command += "(proto_version '1', publication_names 'changes')"
        reader.pgconn.send_query(command.encode())
        while reader.pgconn.flush():
            pass
        reader.pgconn.get_result()
        assert prepare(orders, settings).slot_active_pid == reader.info.backend_pid


def test_a_slot_that_waits_for_an_open_transaction_gives_up_and_names_it(orders: Database) -> None:
    with orders.connect() as writer, orders.connect() as connection, writer.transaction():
        writer.execute("INSERT INTO orders VALUES (1, 1)")
        with pytest.raises(SourceError, match="has not ended") as caught:
            create_slot(connection, Settings().slot, timeout_s=0.3)
        assert str(writer.info.backend_pid) in caught.value.fix


@since(15)
def test_a_slot_is_created_with_the_flags_of_the_configuration(
    orders: Database, postgres_server: PostgresServer
) -> None:
    slot = NamedSlot(f"slot_{secrets.token_hex(6)}", two_phase=True)
    prepare(orders, Settings(slot=slot))
    made = f"SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{slot.name}'"
    assert orders.execute(made) == [(True,)]
    failover = Settings(slot=NamedSlot(f"slot_{secrets.token_hex(6)}", failover=True))
    if postgres_server.version < 17:
        assert "slot.failover needs Postgres 17" in refusal(orders, failover).what
        return
    (warning,) = prepare(orders, failover).warnings
    assert "synchronized_standby_slots names no standby" in warning
    made = f"SELECT failover FROM pg_replication_slots WHERE slot_name = '{failover.slot.name}'"
    assert orders.execute(made) == [(True,)]


def test_an_existing_slot_of_another_kind_is_a_warning_whose_command_works(
    orders: Database, postgres_server: PostgresServer
) -> None:
    if postgres_server.version < 17:
        pytest.skip("slots have no failover before Postgres 17")
    settings = Settings()
    prepare(orders, settings)
    wanted = replace(settings, slot=replace(settings.slot, failover=True))
    _, warning = prepare(orders, wanted).warnings
    command = warning[warning.index("ALTER_REPLICATION_SLOT") :]
    with psycopg.connect(orders.dsn, replication="database", autocommit=True) as connection:
        connection.execute(command.encode())
    (left,) = prepare(orders, wanted).warnings
    assert "synchronized_standby_slots" in left
