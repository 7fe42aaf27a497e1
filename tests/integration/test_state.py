"""Positions as rows: migrations, registration, settling, and the view that shows them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from cdc.cursor import Cursor
from cdc.errors import OperatorError, SourceError, TransientError
from cdc.state.migrate import available, migrate
from cdc.state.positions import (
    Settlement,
    consumer_cursors,
    register_source,
    restart_cursor,
    settle,
)
from cdc.state.reader_state import report_reader
from tests.fix_postgres import Database

START = Cursor(100, 0)


@pytest.fixture
def state(database: Database) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    with database.connect() as connection:
        migrate(connection)
        yield connection


def register(state: psycopg.Connection[tuple[Any, ...]], *consumers: str, system: str = "1") -> int:
    return register_source(
        state,
        name="shop",
        slot="s",
        publication="p",
        system_identifier=system,
        slot_lsn=100,
        consumers=consumers,
    )


def settled(
    state: psycopg.Connection[tuple[Any, ...]], term: int, end: Cursor, **cursors: Cursor
) -> None:
    before = consumer_cursors(state, "shop")
    consumers = {name: Settlement(before[name], cursor) for name, cursor in cursors.items()}
    settle(state, source="shop", term=term, read_to=end, consumers=consumers)


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


def test_a_role_that_may_not_create_the_schema_is_told_what_to_grant(database: Database) -> None:
    role = f"poor_{database.name}"
    database.execute(f"CREATE ROLE {role}")
    try:
        with database.connect() as connection:
            connection.execute(f"SET ROLE {role}".encode())
            with pytest.raises(OperatorError, match="GRANT CREATE ON DATABASE"):
                migrate(connection)
    finally:
        database.execute(f"DROP ROLE {role}")


def test_a_new_source_starts_where_its_slot_stands(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    register(state, "a", "b")
    assert restart_cursor(state, "shop") == Cursor(100, 0)
    assert consumer_cursors(state, "shop") == {"a": Cursor(100, 0), "b": Cursor(100, 0)}


def test_the_restart_cursor_is_the_lowest_of_the_consumers(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    settled(state, term, Cursor(200, 5), a=Cursor(200, 5), b=Cursor(150, 2))
    assert restart_cursor(state, "shop") == Cursor(150, 2)
    settled(state, term, Cursor(200, 5), b=Cursor(200, 5))
    assert restart_cursor(state, "shop") == Cursor(200, 5)


def test_a_cursor_that_somebody_moved_is_not_overwritten(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/96' WHERE name = 'a'")
    moves = {name: Settlement(START, Cursor(200, 5)) for name in ("a", "b")}
    with pytest.raises(TransientError, match="somebody moved it"):
        settle(state, source="shop", term=term, read_to=Cursor(200, 5), consumers=moves)
    assert consumer_cursors(state, "shop") == {"a": Cursor(0x96, 0), "b": START}


def test_the_restart_cursor_never_goes_back(state: psycopg.Connection[tuple[Any, ...]]) -> None:
    term = register(state, "a")
    settled(state, term, Cursor(200, 5), a=Cursor(200, 5))
    settled(state, term, Cursor(150, 0), a=Cursor(150, 0))
    assert restart_cursor(state, "shop") == Cursor(200, 5)


def test_without_consumers_the_restart_cursor_follows_what_was_read(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state)
    settled(state, term, Cursor(300, 0))
    assert restart_cursor(state, "shop") == Cursor(300, 0)


def test_an_earlier_start_of_the_service_may_not_settle(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    stale = register(state, "a")
    current = register(state, "a")
    with pytest.raises(OperatorError, match="has taken over"):
        settled(state, stale, Cursor(200, 0), a=Cursor(200, 0))
    assert restart_cursor(state, "shop") == Cursor(100, 0)
    settled(state, current, Cursor(200, 0), a=Cursor(200, 0))


def test_a_consumer_that_is_gone_holds_nothing_back_and_a_new_one_starts_at_the_restart_cursor(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    settled(state, term, Cursor(200, 0), a=Cursor(200, 0))
    term = register(state, "a", "c")
    assert consumer_cursors(state, "shop") == {"a": Cursor(200, 0), "c": Cursor(100, 0)}
    settled(state, term, Cursor(300, 0), a=Cursor(300, 0), c=Cursor(300, 0))
    assert restart_cursor(state, "shop") == Cursor(300, 0)


def test_a_consumer_that_comes_back_too_late_is_refused_not_skipped_ahead(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    register(state, "a", "b")
    term = register(state, "a")
    settled(state, term, Cursor(300, 0), a=Cursor(300, 0))
    with pytest.raises(OperatorError, match="consumer b of source shop stopped at cursor"):
        register(state, "a", "b")


def test_another_cluster_under_the_same_name_is_refused(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    register(state, "a")
    with pytest.raises(SourceError, match="another cluster"):
        register(state, "a", system="2")


def test_the_view_shows_cursor_lag_and_when_it_moved(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    old = datetime.now(UTC) - timedelta(seconds=60)
    settle(
        state,
        source="shop",
        term=term,
        read_to=Cursor(500, 3),
        consumers={
            "a": Settlement(START, Cursor(500, 3), delivered=7, absorbed=2, last_commit=old),
            "b": Settlement(START, Cursor(300, 1), last_commit=old, error="the sink is down"),
        },
    )
    report_reader(
        state, "shop", state="streaming", error=None, head_lsn=600, log_end=Cursor(500, 3)
    )
    rows = state.execute(
        "SELECT consumer, cursor, lsn::text, lag_bytes, lag_seconds::int, "
        "moved_at > now() - interval '1 minute' FROM walbrook.cursors ORDER BY consumer NULLS FIRST"
    ).fetchall()
    restart, a, b = rows
    assert restart[:4] == (None, "0/12C:1", "0/12C", 300)
    assert a == ("a", "0/1F4:3", "0/1F4", 100, 0, True)
    assert b[:4] == ("b", "0/12C:1", "0/12C", 300)
    assert 59 <= b[4] <= 70
    assert state.execute(
        "SELECT delivered, absorbed, last_error FROM walbrook.consumers ORDER BY name"
    ).fetchall() == [(7, 2, None), (0, 0, "the sink is down")]
