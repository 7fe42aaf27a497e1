"""What a slot costs its server, and the transaction that pins it, on a real server."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc.replication.source.source_watch import SourceWatch
from cdc.state.health import Condition
from tests.fix_postgres import Database
from tests.waiting import until


@pytest.fixture
def slot(database: Database) -> str:
    name = f"slot_{database.name}"
    database.execute("CREATE TABLE item (id int PRIMARY KEY, note text)")
    database.execute("CREATE PUBLICATION pub FOR TABLE item")
    database.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    return name


def pinned(watch: SourceWatch, pid: int) -> list[Condition]:
    """The warning about this transaction: others of the server may be older for a moment."""
    return [each for each in watch.conditions() if f"pid {pid}," in each.what]


def test_a_slot_that_falls_behind_shows_the_wal_that_it_retains(
    database: Database, slot: str
) -> None:
    with closing(SourceWatch(database.dsn, slot, "pub", heartbeat_s=0.1)) as watch:
        before = until("the figures", lambda: watch.figures)
        assert before is not None
        rows = "SELECT n, repeat('x', 100) FROM generate_series(1, 2000) n"
        database.execute(f"INSERT INTO item {rows}")

        def grown() -> bool:
            now = watch.figures
            return now is not None and now.retained > before.retained + 200_000

        until("the slot to fall behind", grown)
        now = watch.figures
        assert now is not None
        assert now.retained == now.confirmed_to_current + now.restart_to_confirmed
        assert now.wal_status in ("reserved", "extended")


@pytest.mark.parametrize("role", ["owner", "stranger"])
def test_a_long_transaction_is_named_without_its_query(
    database: Database, slot: str, role: str
) -> None:
    dsn, stranger = database.dsn, f"watch_{database.name}"
    if role == "stranger":  # of another role's transaction it sees no times
        database.execute(f"CREATE ROLE {stranger} LOGIN REPLICATION PASSWORD 'secret'")
        dsn = make_conninfo(database.dsn, user=stranger, password="secret")
    try:
        with (
            closing(SourceWatch(dsn, slot, "pub", heartbeat_s=0.1, long_transaction_s=1)) as watch,
            psycopg.connect(database.dsn, application_name="import") as writer,
        ):
            writer.execute("INSERT INTO item VALUES (1, 'canary in a query')")
            pid = writer.info.backend_pid
            (warning,) = until("the warning", lambda: pinned(watch, pid))
            assert (warning.kind, warning.severity) == ("slot_pinned", "warning")
            assert "application import" in warning.what
            assert f"pg_terminate_backend({pid})" in warning.fix
            assert "canary" not in warning.what + warning.fix
            assert ("idle in transaction" in warning.what) == (role == "owner")
            assert ("last query begun" in warning.what) == (role == "owner")
            assert (watch.oldest_transaction_s or 0) >= 1
            writer.rollback()
            until("the warning to end", lambda: not pinned(watch, pid))
    finally:
        if role == "stranger":
            database.execute(f"DROP ROLE {stranger}")
