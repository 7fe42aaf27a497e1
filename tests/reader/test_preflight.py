"""Every check of a source against a real server: the sentence, the fix, and that the fix works."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.config import TableName
from cdc.cursor import parse_lsn
from cdc.errors import SourceError
from demo.embedded_postgres import EmbeddedPostgres
from tests.fix_postgres import Database, PostgresServer, embedded, fresh_database, since
from tests.preflight_source import (
    NamedSlot,
    Published,
    Settings,
    prepare,
    publication_count,
    refusal,
    refusals,
    slot_count,
)
from tests.waiting import until


@pytest.fixture
def orders(database: Database) -> Database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, total numeric)")
    return database


@pytest.fixture
def plain_role(postgres_server: PostgresServer) -> Iterator[str]:
    """A role that may log in and nothing else."""
    role = f"role_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_server.dsn, autocommit=True) as admin:
        name = sql.Identifier(role)
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'plain'").format(name))
        yield role
        admin.execute(sql.SQL("DROP ROLE {}").format(name))


def as_role(database: Database, role: str) -> Database:
    return replace(database, dsn=make_conninfo(database.dsn, user=role, password="plain"))


def test_publication_and_slot_are_created_in_a_ready_source(orders: Database) -> None:
    settings = Settings()
    identity = prepare(orders, settings, "public.orders")
    assert identity.slot_created
    assert identity.slot_active_pid is None
    assert identity.warnings == ()
    assert identity.server_version >= 140000
    stored = orders.execute(
        "SELECT system_identifier, confirmed_flush_lsn::text, plugin "
        "FROM pg_control_system(), pg_replication_slots "
        f"WHERE slot_name = '{settings.slot.name}'"
    )
    assert stored == [(identity.system_identifier, stored[0][1], "pgoutput")]
    assert identity.slot_confirmed_lsn == parse_lsn(stored[0][1])
    assert orders.execute("SELECT pubviaroot FROM pg_publication") == [(True,)]


def test_a_second_start_finds_what_the_first_one_made(orders: Database) -> None:
    settings = Settings()
    first = prepare(orders, settings, "public.orders")
    assert prepare(orders, settings, "public.orders") == replace(first, slot_created=False)


def test_only_the_configured_tables_are_published(orders: Database) -> None:
    orders.execute('CREATE TABLE "Odd.Name" (id int PRIMARY KEY); CREATE TABLE other (id int)')
    prepare(orders, Settings(publication=Published("p", tables=('public."Odd.Name"', "orders"))))
    published = orders.execute("SELECT tablename FROM pg_publication_tables ORDER BY 1")
    assert published == [("Odd.Name",), ("orders",)]


@since(15)
def test_init_sql_creates_the_publication(orders: Database) -> None:
    init_sql = "CREATE PUBLICATION mine FOR TABLE orders WHERE (total > 1);"
    prepare(orders, Settings(publication=Published("mine", init_sql=init_sql)), "public.orders")
    assert publication_count(orders) == 1


def test_init_sql_that_creates_something_else_is_reported(orders: Database) -> None:
    settings = Settings(publication=Published("mine", init_sql="CREATE PUBLICATION yours"))
    assert "init_sql ran but created no publication mine" in refusal(orders, settings).what
    assert slot_count(orders, settings) == 0


def test_a_broken_init_sql_is_reported_with_the_servers_words(orders: Database) -> None:
    settings = Settings(publication=Published("mine", init_sql="CREATE PUBLICATIN mine"))
    error = refusal(orders, settings)
    assert "syntax error" in error.what
    assert "init_sql" in error.fix


def test_a_missing_publication_that_may_not_be_created_is_an_error(orders: Database) -> None:
    settings = Settings(publication=Published("Shop", False, tables=("orders",)))
    error = refusal(orders, settings, "orders")
    assert error.what == "The publication Shop does not exist"
    orders.execute(error.fix)
    assert prepare(orders, settings, "orders").slot_created


def test_a_missing_slot_that_may_not_be_created_is_an_error(orders: Database) -> None:
    settings = Settings(slot=NamedSlot(f"by_hand_{secrets.token_hex(4)}", False))
    error = refusal(orders, settings)
    assert "does not exist" in error.what
    assert publication_count(orders) == 0
    orders.execute("CREATE PUBLICATION changes FOR ALL TABLES")
    orders.execute(error.fix)
    assert not prepare(orders, settings).slot_created


def test_a_slot_older_than_its_publication_is_refused(orders: Database) -> None:
    settings = Settings()
    prepare(orders, settings)
    orders.execute("DROP PUBLICATION changes")
    error = refusal(orders, settings)
    assert "changes that wait in the slot cannot be read" in error.what
    orders.execute(error.fix)
    assert prepare(orders, settings).slot_created


def test_a_role_without_replication_learns_how_to_get_it(orders: Database, plain_role: str) -> None:
    settings = Settings()
    orders.execute("CREATE PUBLICATION changes FOR ALL TABLES")
    error = refusal(as_role(orders, plain_role), settings)
    assert error.what == f"The role {plain_role} may not replicate"
    orders.execute(error.fix)
    assert prepare(as_role(orders, plain_role), settings).slot_created


def test_a_role_that_may_not_create_publications_gets_the_grant(
    orders: Database, plain_role: str
) -> None:
    orders.execute(f"ALTER ROLE {plain_role} REPLICATION; ALTER TABLE orders OWNER TO {plain_role}")
    settings = Settings(publication=Published("p", tables=("orders",)))
    error = refusal(as_role(orders, plain_role), settings)
    assert "may not create the publication p" in error.what
    assert error.fix.startswith("GRANT CREATE ON DATABASE")
    orders.execute(error.fix)
    assert prepare(as_role(orders, plain_role), settings).slot_created
    orders.execute(f"DROP OWNED BY {plain_role}")


def test_a_role_that_does_not_own_the_tables_gets_the_statement_for_a_superuser(
    orders: Database, plain_role: str
) -> None:
    orders.execute(
        f"ALTER ROLE {plain_role} REPLICATION; "
        f"GRANT CREATE ON DATABASE {orders.name} TO {plain_role}"
    )
    settings = Settings()
    error = refusal(as_role(orders, plain_role), settings)
    assert "may not create the publication changes" in error.what
    assert "only a superuser" in error.what
    assert error.fix.startswith('CREATE PUBLICATION "changes" FOR ')
    orders.execute(error.fix)
    assert prepare(as_role(orders, plain_role), settings).slot_created
    orders.execute(f"DROP OWNED BY {plain_role}")


def test_a_grant_that_would_not_help_is_not_suggested(orders: Database, plain_role: str) -> None:
    orders.execute(f"ALTER ROLE {plain_role} REPLICATION")
    init_sql = "CREATE PUBLICATION mine\nFOR all tables -- of the shop"
    settings = Settings(publication=Published("mine", init_sql=init_sql))
    error = refusal(as_role(orders, plain_role), settings)
    assert "only a superuser create one FOR ALL TABLES" in error.what
    orders.execute(error.fix)
    assert prepare(as_role(orders, plain_role), settings).slot_created


def test_a_misspelt_schema_gets_a_suggestion(orders: Database) -> None:
    orders.execute("CREATE SCHEMA crm; CREATE SCHEMA sales")
    error = refusal(orders, Settings(), schemas=("sale",))
    assert (error.what, error.fix) == ("The schema sale does not exist", "did you mean sales?")
    assert publication_count(orders) == 0
    assert "crm, public, sales" in refusal(orders, Settings(), schemas=("xyzzy",)).fix


@since(15)
@pytest.mark.parametrize("table", ["", 'CREATE TABLE "C r m".people (id int PRIMARY KEY)'])
def test_a_schema_of_which_nothing_is_published_is_refused(orders: Database, table: str) -> None:
    orders.execute(f'CREATE SCHEMA "C r m"; {table}')
    orders.execute("CREATE PUBLICATION changes FOR TABLE orders")
    settings = Settings()
    error = refusal(orders, settings, schemas=("public", "C r m"))
    assert error.what == "No table of the schema C r m is in the publication changes"
    assert error.fix.startswith('ALTER PUBLICATION "changes" ADD TABLES IN SCHEMA "C r m"; --')
    assert slot_count(orders, settings) == 0
    orders.execute(error.fix)
    assert prepare(orders, settings, schemas=("public", "C r m")).slot_created


def test_a_schema_is_published_by_a_publication_of_all_tables(orders: Database) -> None:
    orders.execute("CREATE SCHEMA empty; CREATE PUBLICATION changes FOR ALL TABLES")
    assert prepare(orders, Settings(), schemas=("empty",)).slot_created


def test_a_publication_without_deletes_is_refused(orders: Database) -> None:
    orders.execute("CREATE PUBLICATION changes FOR ALL TABLES WITH (publish = 'insert, update')")
    error = refusal(orders, Settings())
    assert "does not publish all of insert, update and delete" in error.what
    orders.execute(error.fix)
    assert prepare(orders, Settings()).slot_created


def test_a_misspelt_table_gets_a_suggestion(orders: Database) -> None:
    error = refusal(orders, Settings(), "public.order")
    assert error.what == "The table public.order does not exist"
    assert error.fix == "did you mean public.orders?"


def test_a_table_in_another_schema_is_suggested(orders: Database) -> None:
    orders.execute("CREATE SCHEMA somewhere_else; CREATE TABLE somewhere_else.invoices (id int)")
    assert "somewhere_else.invoices" in refusal(orders, Settings(), "public.invoices").fix


def test_a_missing_listed_table_is_reported_before_anything_is_made(orders: Database) -> None:
    settings = Settings(publication=Published("p", tables=("nothing_like_it",)))
    assert "public.nothing_like_it does not exist" in refusal(orders, settings).what
    assert publication_count(orders) == 0
    assert slot_count(orders, settings) == 0


def test_a_table_outside_the_publication_gets_the_quoted_statement(orders: Database) -> None:
    orders.execute('CREATE TABLE "sel""ect" (id int PRIMARY KEY)')
    orders.execute("CREATE PUBLICATION changes FOR TABLE orders")
    settings = Settings()
    error = refusal(orders, settings, 'public."sel""ect"')
    assert error.fix == 'ALTER PUBLICATION "changes" ADD TABLE "public"."sel""ect";'
    orders.execute(error.fix)
    assert prepare(orders, settings, 'public."sel""ect"').slot_created


def test_an_unlogged_table_cannot_be_wanted(orders: Database) -> None:
    orders.execute("CREATE UNLOGGED TABLE scratch (id int PRIMARY KEY)")
    error = refusal(orders, Settings(), "scratch")
    assert "unlogged" in error.what
    orders.execute(error.fix)
    assert prepare(orders, Settings(), "scratch").slot_created


@pytest.mark.parametrize(
    "table",
    [
        "CREATE TABLE loose (id int)",
        "CREATE TABLE loose (id int PRIMARY KEY); ALTER TABLE loose REPLICA IDENTITY NOTHING",
        "CREATE TABLE loose (id int PRIMARY KEY DEFERRABLE)",
    ],
)
def test_a_table_without_identity_is_a_warning_unless_it_is_wanted(
    orders: Database, table: str
) -> None:
    orders.execute(table)
    settings = Settings()
    (warning,) = prepare(orders, settings, "orders").warnings
    assert 'ALTER TABLE "public"."loose" REPLICA IDENTITY FULL;' in warning
    error = refusal(orders, settings, "orders", "loose")
    assert "public.loose has no usable replica identity" in error.what
    orders.execute(error.fix)
    assert prepare(orders, settings, "loose").warnings == ()


def test_an_index_serves_as_identity(orders: Database) -> None:
    orders.execute(
        "CREATE TABLE keyed (id int NOT NULL); CREATE UNIQUE INDEX keyed_id ON keyed (id); "
        "ALTER TABLE keyed REPLICA IDENTITY USING INDEX keyed_id"
    )
    assert prepare(orders, Settings(), "keyed").warnings == ()


_PARTITIONED = (
    "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id); "
    "CREATE TABLE part_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)"
)


def test_the_identity_of_a_partitioned_table_is_that_of_its_leaves(orders: Database) -> None:
    orders.execute(_PARTITIONED + "; ALTER TABLE part_1 REPLICA IDENTITY NOTHING")
    error = refusal(orders, Settings(), "parts")
    assert error.fix == 'ALTER TABLE "public"."part_1" REPLICA IDENTITY FULL;'


def test_a_root_published_by_its_leaves_is_reported(orders: Database) -> None:
    orders.execute(_PARTITIONED + "; CREATE PUBLICATION changes FOR ALL TABLES")
    error = refusal(orders, Settings(), "parts")
    assert "arrive under the names of its partitions" in error.what
    orders.execute(error.fix)
    assert prepare(orders, Settings(), "parts").slot_created


def test_a_leaf_published_by_its_root_is_reported(orders: Database) -> None:
    orders.execute(_PARTITIONED)
    error = refusal(orders, Settings(), "part_1")
    assert "arrive under the name of its root, public.parts" in error.what


def test_a_root_without_leaves_may_be_wanted(orders: Database) -> None:
    orders.execute("CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    assert prepare(orders, Settings(), "parts").slot_created


@dataclass(frozen=True)
class Bare:
    """A server that lacks everything, and a database on it."""

    server: EmbeddedPostgres
    database: Database


@pytest.fixture(scope="module")
def bare(postgres_server: PostgresServer) -> Iterator[Bare]:
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-bare-"))
    lacking = {"wal_level": "replica", "max_wal_senders": "0", "max_replication_slots": "1"}
    try:
        with (
            embedded(directory, fast=True, settings=lacking) as server,
            fresh_database(server.dsn) as database,
        ):
            yield Bare(server, database)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_all_problems_come_in_one_error_and_their_fixes_work(bare: Bare) -> None:
    bare.database.execute("SELECT pg_create_physical_replication_slot('unread')")
    error = refusals(bare.database, Settings(), "nowhere")
    assert str(error).splitlines() == [
        "database shop is not ready:",
        "  1. The server's wal_level is replica; it must be logical",
        "     fix: ALTER SYSTEM SET wal_level = logical; -- then restart Postgres",
        "  2. All 1 replication slots (max_replication_slots) are taken (nobody reads unread)",
        "     fix: ALTER SYSTEM SET max_replication_slots = 6; -- then restart Postgres",
        "  3. All 0 replication connections (max_wal_senders) are taken",
        "     fix: ALTER SYSTEM SET max_wal_senders = 5; -- then restart Postgres",
        "  4. The table public.nowhere does not exist",
        "     fix: create the table, or correct its name in the configuration",
    ]
    assert publication_count(bare.database) == 0
    for problem in error.problems[:3]:
        bare.database.execute(problem.fix)
    bare.server.restart()
    assert prepare(bare.database, Settings()).slot_created


def test_a_slot_whose_wal_was_removed_is_refused(bare: Bare) -> None:
    database = bare.database
    for line in ("wal_level = logical", "max_replication_slots = 6", "max_wal_senders = 5"):
        database.execute(f"ALTER SYSTEM SET {line}")
    bare.server.restart()
    settings = Settings()
    prepare(database, settings)
    database.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    database.execute("SELECT pg_reload_conf()")
    for _ in range(4):  # each fills a WAL file; the checkpoint then removes what is over the limit
        database.execute("SELECT pg_logical_emit_message(false, 'x', 'y'), pg_switch_wal()")
    database.execute("CHECKPOINT")
    error = refusal(database, settings)
    assert f"The slot {settings.slot.name} is lost" in error.what
    assert f"SELECT pg_drop_replication_slot('{settings.slot.name}');" in error.fix


def test_a_reader_that_would_count_as_a_synchronous_standby_is_a_warning(bare: Bare) -> None:
    database, settings = bare.database, Settings()
    for line in ("wal_level = logical", "max_replication_slots = 6", "max_wal_senders = 5"):
        database.execute(f"ALTER SYSTEM SET {line}")
    bare.server.restart()

    def warnings(names: str) -> list[str]:
        database.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        database.execute("SELECT pg_reload_conf()")
        show = "SELECT current_setting('synchronous_standby_names')"
        until("the setting to be in force", lambda: database.execute(show) == [(names,)])
        return [
            warning
            for warning in prepare(database, settings).warnings
            if "synchronous_standby_names" in warning
        ]

    try:
        for names in ("*", f'ANY 1 (standby, "Walbrook:{settings.slot.name}")'):
            (warning,) = warnings(names)
            assert "ALTER SYSTEM SET synchronous_standby_names" in warning
        assert warnings("FIRST 1 (standby, walbrook)") == []
    finally:
        database.execute("ALTER SYSTEM RESET synchronous_standby_names")
        database.execute("SELECT pg_reload_conf()")


def test_a_configured_name_keeps_its_parts(orders: Database) -> None:
    orders.execute(
        'CREATE SCHEMA "Odd Schema"; '
        'CREATE TABLE "Odd Schema"."Tä ble.x" (id int PRIMARY KEY); '
        'CREATE PUBLICATION changes FOR TABLE "Odd Schema"."Tä ble.x"'
    )
    name = TableName.parse('"Odd Schema"."Tä ble.x"')
    assert prepare(orders, Settings(), name).slot_created
    assert refusal(orders, Settings(), 'public."Tä ble.x"').fix == (
        'did you mean Odd Schema."Tä ble.x"?'
    )


@pytest.mark.parametrize("text", ["", ".", "shop.", "a.b.c", '"open', 'a"b'])
def test_a_text_that_names_no_table_is_refused(orders: Database, text: str) -> None:
    with pytest.raises(SourceError, match="is not the name of a table"):
        prepare(orders, Settings(), text)
