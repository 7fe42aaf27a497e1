"""The schema: migrations, definitions of functions and views, and the snapshot of both."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from cdc.errors import OperatorError
from cdc.state import migrate as module
from cdc.state.migrate import Definition, Migration, available, definitions, migrate
from tests.fix_postgres import Database
from tests.schema_snapshot import FILE, snapshot


@pytest.fixture
def migrated(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with database.connect() as connection:
        migrate(connection)
        yield connection


def test_migrations_are_applied_in_order_and_each_once(database: Database) -> None:
    with database.connect() as connection:
        assert [m.number for m in migrate(connection)] == [m.number for m in available()]
        assert migrate(connection) == []
    numbers = [m.number for m in available()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_two_services_may_migrate_at_the_same_time(database: Database) -> None:
    applied: list[int] = []

    def run() -> None:
        with database.connect() as connection:
            applied.append(len(migrate(connection)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(applied) == [0, 0, 0, len(available())]


def test_a_schema_of_a_newer_version_is_refused(database: Database) -> None:
    with database.connect() as connection:
        migrate(connection)
        connection.execute("INSERT INTO walbrook.migrations VALUES (9999, 'from the future')")
        with pytest.raises(OperatorError, match="migration 9999"):
            migrate(connection)


def test_a_role_that_may_not_create_the_schema_learns_what_to_grant(database: Database) -> None:
    role = f"poor_{database.name}"
    database.execute(f"CREATE ROLE {role}")
    try:
        with database.connect() as connection:
            connection.execute(f"SET ROLE {role}".encode())
            with pytest.raises(OperatorError, match="GRANT CREATE ON DATABASE"):
                migrate(connection)
    finally:
        database.execute(f"DROP ROLE {role}")


def test_every_table_and_view_has_a_comment(migrated: psycopg.Connection[Any]) -> None:
    silent = migrated.execute(
        "SELECT c.relname FROM pg_class c WHERE c.relnamespace = 'walbrook'::regnamespace "
        "AND c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition "
        "AND obj_description(c.oid, 'pg_class') IS NULL"
    ).fetchall()
    assert silent == []


def test_the_schema_is_what_its_snapshot_says(migrated: psycopg.Connection[Any]) -> None:
    assert snapshot(migrated) == FILE.read_text(), "run `make schema` and review the difference"


def test_each_function_and_view_is_defined_once(migrated: psycopg.Connection[Any]) -> None:
    text = "\n".join(each.statements for each in definitions())
    for created, counted in (
        ("FUNCTION", "SELECT count(*) FROM pg_proc WHERE pronamespace = 'walbrook'::regnamespace"),
        (
            "VIEW",
            "SELECT count(*) FROM pg_class "
            "WHERE relnamespace = 'walbrook'::regnamespace AND relkind = 'v'",
        ),
    ):
        written = len(re.findall(f"^CREATE OR REPLACE {created} ", text, re.MULTILINE))
        assert [(written,)] == migrated.execute(counted.encode()).fetchall()


def test_a_changed_function_is_replaced_at_the_next_start_and_public_may_not_call_it(
    migrated: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = definitions()
    applied_at = "SELECT min(applied_at) FROM walbrook.definitions"
    before = migrated.execute(applied_at).fetchall()
    migrate(migrated)
    assert migrated.execute(applied_at).fetchall() == before
    for number in (1, 2):
        added = Definition(
            "functions/answer.sql",
            "CREATE OR REPLACE FUNCTION walbrook.answer() RETURNS integer "
            f"LANGUAGE sql AS 'SELECT {number}'",
        )
        monkeypatch.setattr(module, "definitions", lambda added=added: [*known, added])
        migrate(migrated)
        assert migrated.execute("SELECT walbrook.answer()").fetchall() == [(number,)]
    assert migrated.execute(
        "SELECT FROM pg_proc, aclexplode(proacl) WHERE grantee = 0 "
        "AND pronamespace = 'walbrook'::regnamespace"
    ).fetchall() == []  # fmt: skip


def test_a_definition_that_fails_changes_nothing_and_is_tried_again(
    migrated: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = definitions()
    broken = Definition("views/broken.sql", "CREATE OR REPLACE VIEW walbrook.health AS SELECT 1")
    monkeypatch.setattr(module, "definitions", lambda: [*known, broken])
    for _ in range(2):
        with pytest.raises(psycopg.errors.InvalidTableDefinition):
            migrate(migrated)
    monkeypatch.setattr(module, "definitions", lambda: known)
    migrate(migrated)
    assert migrated.execute("SELECT * FROM walbrook.health").fetchall() == []


def test_a_view_that_a_migration_drops_is_made_again_also_after_a_crash_between_the_two(
    migrated: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations = [*available(), Migration(9000, "drop", "DROP VIEW walbrook.health")]
    monkeypatch.setattr(module, "available", lambda: migrations)

    def die(_connection: object, _known: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_define", die)
        with pytest.raises(KeyboardInterrupt):
            migrate(migrated)
    assert migrate(migrated) == []
    assert migrated.execute("SELECT * FROM walbrook.health").fetchall() == []


def test_functions_for_operators_and_pull_workers_run_with_the_rights_of_their_owner(
    migrated: psycopg.Connection[Any],
) -> None:
    without = (
        "SELECT f::text FROM walbrook.functions_of(%s) f JOIN pg_proc p ON p.oid = f "
        "WHERE NOT p.prosecdef "
        "OR NOT coalesce(p.proconfig, '{}') @> ARRAY['search_path=pg_catalog, pg_temp']"
    )
    for access in ("operator", "pull"):
        assert migrated.execute(without, [access]).fetchall() == []
        (count,) = migrated.execute(
            "SELECT count(*) FROM walbrook.functions_of(%s)", [access]
        ).fetchall()[0]
        assert count > 3
